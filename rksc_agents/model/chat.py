"""A prompt as text: messages checked, brought into the shape a chat template accepts, and rendered."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rksc_agents.errors import ConfigError
from rksc_agents.types import Prompt

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_LABELS = {"user": "User: ", "assistant": "Assistant: ", "tool": "Tool: ", "system": ""}


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


def plain(messages: Sequence[Message]) -> str:
    """Render a conversation for a model without a chat template.

    System text stands first on its own, then come lines ``User: ...``, ``Assistant: ...`` and ``Tool: ...``;
    the end is ``Assistant:``, or the text of a last message of the assistant.
    """
    text = "".join(
        _LABELS[message["role"]] + message["content"] + ("\n\n" if message["role"] == "system" else "\n")
        for message in map(_spell_calls, messages)
    )
    return text[:-1] if continues(messages) else text + "Assistant:"


def continues(messages: Sequence[Message]) -> bool:
    """Say whether the answer continues a last message of the assistant."""
    return messages[-1]["role"] == "assistant" and bool(messages[-1]["content"])


class Template:
    """The chat template of a tokenizer, with what it takes to feed it any conversation.

    A conversation is tried as it is. Where the template raises or leaves out a system or user text,
    adjacent messages of one role are merged, then the system text is folded into the first user
    turn, then tool results become user turns. Templates for several media, which read a list of
    parts only, get one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._warned = False

    def render(self, messages: Sequence[Message], *, thinking: bool = True) -> str:
        """Return the conversation as the template writes it, ready for the model's turn.

        Parameters
        ----------
        messages : sequence of Message
            The conversation.
        thinking : bool, default True
            False asks templates that can to open the turn without thinking (``enable_thinking``).

        Raises
        ------
        ConfigError
            The template rejects the conversation in every shape.
        """
        texts = [message["content"].strip() for message in messages if message["role"] in {"system", "user"}]
        incomplete: str | None = None
        cause: Exception | None = None
        for shape in _shapes(messages):
            for candidate in (shape, _as_parts(shape)):
                try:
                    text = self._apply(candidate, thinking)
                except TemplateError as error:
                    cause = cause or error
                    break
                except (TypeError, ValueError) as error:
                    cause = cause or error
                    continue
                if all(part in text for part in texts) and "'type': 'text'" not in text:
                    return text
                incomplete = incomplete or text
        if incomplete is None:
            raise ConfigError(
                f"the chat template rejects a conversation of the roles "
                f"{', '.join(message['role'] for message in messages)}: {cause}; change the order of the messages, "
                "or set another tokenizer.chat_template"
            ) from cause
        if not self._warned:
            self._warned = True
            warnings.warn(
                "the chat template leaves out or changes a system or user text: look at tokenizer.chat_template",
                stacklevel=4,
            )
        return incomplete

    def _apply(self, messages: list[Message], thinking: bool) -> str:
        if not continues(messages):
            return self._call(messages, **({} if thinking else {"enable_thinking": False}))
        try:
            return self._call(messages, continued=True)
        except ValueError:  # the template rewrites the last message, so its end cannot be found
            if len(messages) == 1 or not isinstance(messages[-1]["content"], str):
                raise
            return self._call(messages[:-1]) + messages[-1]["content"]

    def _call(self, messages: list[Message], *, continued: bool = False, **variables: Any) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, continue_final_message=continued, add_generation_prompt=not continued, **variables
        )
        return cast(str, text)


def _shapes(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The conversation as it is, then in ever plainer shapes; each only once."""
    shape = list(messages)
    yield shape
    for plainer in (_merge, _fold_system, _fold_tools):
        changed = plainer(shape)
        if changed != shape:
            shape = changed
            yield shape


def _merge(messages: list[Message]) -> list[Message]:
    """Join adjacent messages of one role, except those that belong to tool calls."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last and last["role"] == message["role"] and not (_of_tools(last) or _of_tools(message)):
            merged[-1] = {**last, "content": _join(last["content"], message["content"])}
        else:
            merged.append(message)
    return merged


def _of_tools(message: Message) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _join(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _fold_system(messages: list[Message]) -> list[Message]:
    """Write the leading system text into the first user turn; a later one becomes a user turn."""
    first = next((k for k, message in enumerate(messages) if message["role"] != "system"), len(messages))
    system = _join(*(message["content"] for message in messages[:first]))
    rest = [{**message, "role": "user"} if message["role"] == "system" else message for message in messages[first:]]
    if system:
        user = next((k for k, message in enumerate(rest) if message["role"] == "user"), None)
        if user is None or user > 0:
            rest.insert(0, {"role": "user", "content": system})
        else:
            rest[user] = {**rest[user], "content": _join(system, rest[user]["content"])}
    return _merge(rest)


def _fold_tools(messages: list[Message]) -> list[Message]:
    """Tool results as user turns, tool calls as text, and a user turn first."""
    folded = [
        {"role": "user", "content": "Tool result: " + message["content"]} if message["role"] == "tool" else spelled
        for message, spelled in zip(messages, map(_spell_calls, messages), strict=True)
    ]
    if folded[0]["role"] == "assistant":
        folded.insert(0, {"role": "user", "content": ""})
    return _merge(folded)


def _spell_calls(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = json.dumps(message["tool_calls"], ensure_ascii=False, default=str)
    spelled = {**message, "content": _join(message["content"], calls)}
    del spelled["tool_calls"]
    return spelled


def _as_parts(messages: list[Message]) -> list[Message]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
