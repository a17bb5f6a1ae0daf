"""A prompt as text: messages checked, brought into the shape a chat template accepts, and rendered."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rksc_agents.errors import ConfigError
from rksc_agents.model.shapes import Message, as_parts, shapes
from rksc_agents.model.tools import Tool, ToolFormat, format_of
from rksc_agents.model.tools.hermes import instructions
from rksc_agents.model.tools.history import as_text, told
from rksc_agents.types import Prompt

ROLES = ("system", "user", "assistant", "tool")
_PROBE = "\U0010fffe{}\U0010fffe"  # no text has this noncharacter
_LABELS = {"user": "User: ", "assistant": "Assistant: ", "system": ""}


def conversation(prompt: Prompt) -> list[Message]:
    """Check a prompt and return it as messages whose content is one text each.

    Raises
    ------
    ConfigError
        The prompt is empty, or a message is malformed, has an unknown role or holds other parts than text.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
        if not prompt[0]["content"]:
            raise ConfigError("the prompt is an empty text: give a question or a list of messages")
    elif isinstance(prompt, (Mapping, bytes)) or not isinstance(prompt, Sequence):
        raise ConfigError(
            f"a prompt is a text or a list of messages, not {type(prompt).__name__}: put a single message in a list"
        )
    if not prompt:
        raise ConfigError("the conversation is empty: give at least one message")
    return [_checked(number, message) for number, message in enumerate(prompt)]


def _checked(number: int, message: object) -> Message:
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise ConfigError(
            f"{where} is {message!r}, not a mapping: write it as {{'role': 'user', 'content': 'the text'}}"
        )
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ConfigError(f"{where} has the role {role!r}: use one of {', '.join(ROLES)}")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        content = "".join(_part(where, part) for part in _parts(where, content))
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} holds half a character (a lone surrogate) at {error.start}: remove it") from None
    return {**{str(key): value for key, value in message.items() if value is not None}, "content": content}


def _parts(where: str, content: object) -> Sequence[object]:
    if not isinstance(content, (list, tuple)):
        raise ConfigError(
            f"{where} has the content {content!r}: give a text or a list of {{'type': 'text', 'text': ...}} parts"
        )
    return content


def _part(where: str, part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise ConfigError(f"{where} has a content part {kind!r}: only {{'type': 'text', 'text': ...}} parts are read")
    return cast(str, part["text"])


def plain(messages: Sequence[Message], format: ToolFormat) -> str:
    """Render a conversation for a model without a chat template.

    System text stands first on its own, then come lines ``User: ...`` and ``Assistant: ...``; the end is
    ``Assistant:``, or the text of a last message of the assistant. Tool calls are the assistant's text, results the
    user's.
    """
    text = "".join(
        _LABELS[message["role"]] + message["content"] + ("\n\n" if message["role"] == "system" else "\n")
        for message in (as_text(message, format) for message in messages)
    )
    return text[:-1] if continues(messages) else text + "Assistant:"


def continues(messages: Sequence[Message]) -> bool:
    """Say whether the answer continues a last message of the assistant; one that calls tools is finished."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A rendered conversation, and how many of its tools, and of its texts and calls, are missing from it."""

    text: str
    unoffered: int = 0
    lost: int = 0


class Template:
    """The chat template of a tokenizer, with what it takes to feed it any conversation and any tools.

    A conversation is tried as it is. Where the template raises or leaves something out, the plainer
    :func:`~rksc_agents.model.shapes.shapes` are tried. Templates for several media, which read a list of parts only,
    get one. Tools are offered by the template where it knows how the model calls them, else by a system text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._warned: set[str] = set()

    @property
    def format(self) -> ToolFormat:
        """How the template teaches the model to call tools."""
        return format_of(str(self._tokenizer.chat_template or ""))

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), thinking: bool = True) -> str:
        """Return the conversation as the template writes it, ready for the model's turn.

        Parameters
        ----------
        messages : sequence of Message
            The conversation, its tool calls normalized.
        tools : sequence of Tool, default ()
            What can be called.
        thinking : bool, default True
            False asks templates that can to open the turn without thinking (``enable_thinking``).

        Raises
        ------
        ConfigError
            The template rejects the conversation in every shape.
        """
        if tools and self.format.native:
            found, _ = self._best(messages, tools, thinking)
            if found is not None and not found.unoffered:
                return self._said(found)
            self._warn("the chat template mentions tools but leaves them out: they are told as a system text")
        if tools:
            messages = told(messages, instructions(tools))
        found, cause = self._best(messages, (), thinking)
        if found is None:
            raise ConfigError(
                f"the chat template rejects a conversation of the roles "
                f"{', '.join(message['role'] for message in messages)}: {cause}; change the order of the messages, "
                "or set another tokenizer.chat_template"
            ) from cause
        return self._said(found)

    def _best(
        self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool
    ) -> tuple[_Rendered | None, Exception | None]:
        """The first rendering from which least is missing, and what the template rejected first."""
        texts = {message["content"].strip() for message in messages if message["role"] != "assistant"}
        best: _Rendered | None = None
        cause: Exception | None = None
        more = continues(messages)
        for shape in shapes(messages, self.format):
            for candidate in (shape, as_parts(shape)):
                try:
                    text = self._apply(candidate, tools, more, thinking)
                    unoffered, unmade = self._unnamed(candidate, tools, more, thinking)
                except TemplateError as error:
                    cause = cause or error
                    break
                except (TypeError, ValueError) as error:
                    cause = cause or error
                    continue
                lost = unmade + sum(not _holds(text, part) for part in texts)
                lost += "'type': 'text'" in text  # a list of parts, written as it is
                if not lost and not unoffered:
                    return _Rendered(text), cause
                if best is None or (unoffered, lost) < (best.unoffered, best.lost):
                    best = _Rendered(text, unoffered, lost)
        return best, cause

    def _unnamed(self, messages: list[Message], tools: Sequence[Tool], more: bool, thinking: bool) -> tuple[int, int]:
        """How many tools and calls the template leaves out: those whose names are not found when they are others."""
        names = map(_PROBE.format, itertools.count())
        probes = [replace(tool, name=next(names)) for tool in tools]
        probed = [
            {**message, "tool_calls": [_renamed(call, next(names)) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        ]
        called = [call["function"]["name"] for message in probed for call in message.get("tool_calls") or ()]
        if not probes and not called:
            return 0, 0
        text = self._apply(probed, probes, more, thinking)
        return sum(not _holds(text, tool.name) for tool in probes), sum(not _holds(text, name) for name in called)

    def _said(self, found: _Rendered) -> str:
        if found.lost:
            self._warn("the chat template leaves out or changes a text of the conversation: look at its chat_template")
        return found.text

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=5)

    def _apply(self, messages: list[Message], tools: Sequence[Tool], more: bool, thinking: bool) -> str:
        variables: dict[str, Any] = {"tools": [tool.function() for tool in tools]} if tools else {}
        if not more:
            return self._call(messages, **variables, **({} if thinking else {"enable_thinking": False}))
        try:
            return self._call(messages, continued=True, **variables)
        except ValueError:  # the template rewrites the last message, so its end cannot be found
            if len(messages) == 1 or not isinstance(messages[-1]["content"], str):
                raise
            return self._call(messages[:-1], **variables) + messages[-1]["content"]

    def _call(self, messages: list[Message], *, continued: bool = False, **variables: Any) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, continue_final_message=continued, add_generation_prompt=not continued, **variables
        )
        return cast(str, text)


def _renamed(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "name": name}}


def _holds(text: str, part: str) -> bool:
    """Whether a part stands in a text, as it is or as JSON."""
    return part in text or any(json.dumps(part, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))
