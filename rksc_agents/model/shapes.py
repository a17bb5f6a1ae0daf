"""A conversation in ever plainer shapes, for chat templates that do not take every conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rksc_agents.model.tools.formats import ToolFormat
from rksc_agents.model.tools.history import as_text, one_call_each

Message = dict[str, Any]


def shapes(messages: Sequence[Message], form: ToolFormat) -> Iterator[list[Message]]:
    """The conversation as it is, then in ever plainer shapes; each only once.

    Adjacent messages of one role are merged; calls that were made at once are made one after the other; calls become
    the assistant's text and their results user turns; the system text is folded into the first user turn, last, as it
    tells the model most.
    """
    given = list(messages)
    merged = _merge(given)
    folded = _fold_system(given)
    last = _merge(_spelled(folded, form))
    if last[0]["role"] == "assistant":
        last.insert(0, {"role": "user", "content": ""})
    known: list[list[Message]] = []
    for shape in (
        given,
        one_call_each(given),
        merged,
        one_call_each(merged),
        _merge(_spelled(given, form)),
        folded,
        one_call_each(folded),
        last,
    ):
        if shape not in known:
            known.append(shape)
            yield shape


def as_parts(messages: list[Message]) -> list[Message]:
    """The conversation for templates that read a list of parts."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def _spelled(messages: list[Message], form: ToolFormat) -> list[Message]:
    return [as_text(message, form) for message in messages]


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
