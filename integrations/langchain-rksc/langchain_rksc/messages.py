"""LangChain messages as a conversation of the core."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from rksc_agents.errors import ConfigError

Message = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXTS = {"text": "text", "text-plain": "text", "refusal": "refusal"}
_DROPPED = ("reasoning", "reasoning_content", "thinking", "redacted_thinking")
_CALLS = ("tool_use", "tool_call", "function_call")
_SPELLED_ELSEWHERE = ("tool_call_chunk", "invalid_tool_call")  # the message lists them as well


def conversation(messages: Sequence[BaseMessage]) -> list[Message]:
    """Return a conversation as chat templates take it: mappings with "role" and "content".

    Reasoning blocks are left out, as chat templates of models that think do. Names of messages are left out, for which
    chat templates have no place; the name of a tool is kept.

    Raises
    ------
    ConfigError
        If a message has a role or holds a content block that the model cannot read.
    """
    conversed: list[Message] = []
    names: dict[str, str] = {}  # of the tools called so far, by the call's id
    for message in messages:
        for converted in _converted(message):
            for call in converted.get("tool_calls", ()):
                names[call["id"]] = call["function"]["name"]
            called = names.get(converted.get("tool_call_id", "")) if converted["role"] == "tool" else None
            conversed.append(converted if called is None else {"name": called, **converted})
    return conversed


def _converted(message: BaseMessage) -> Iterable[Message]:
    match message:
        case AIMessage():
            yield _assistant(message)
        case ToolMessage():
            named = {"name": message.name} if message.name else {}
            text = _told(_text(message.content, message), failed=message.status == "error")
            yield {"role": "tool", "content": text, "tool_call_id": message.tool_call_id, **named}
        case FunctionMessage():
            yield {"role": "tool", "content": _text(message.content, message), "name": message.name}
        case SystemMessage():
            yield {"role": "system", "content": _text(message.content, message)}
        case HumanMessage():
            yield from _user(message)
        case ChatMessage(role=role) if role in _ROLES:
            yield {"role": _ROLES[role], "content": _text(message.content, message)}
        case ChatMessage(role=role):
            raise ConfigError(f"a ChatMessage has the role {role!r}: use one of {', '.join(_ROLES)}")
        case _:
            raise ConfigError(f"a {type(message).__name__} is nothing that a model reads: remove it, or apply it first")


def _assistant(message: AIMessage) -> Message:
    blocks = _blocks(message.content)
    calls = [_call(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    known = {call["id"] for call in calls}
    for block in blocks:
        if isinstance(block, dict) and block.get("type") in _CALLS:
            call = _call_of_block(block)
            if call["id"] not in known:  # content that no integration has parsed yet
                calls.append(call)
    wrong = [call["args"] or "" for call in message.invalid_tool_calls]  # as the model wrote them
    text = "\n".join(filter(None, [_text(message.content, message, skipped=_CALLS + _SPELLED_ELSEWHERE), *wrong]))
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _call(id_: str | None, name: str, arguments: Any) -> Message:
    return {"id": id_ or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_of_block(block: dict[str, Any]) -> Message:
    arguments: Any = next((block[key] for key in ("args", "input", "arguments") if key in block), {})
    return _call(block.get("call_id") or block.get("id"), block.get("name", ""), arguments)


def _user(message: HumanMessage) -> Iterable[Message]:
    """A user turn; results of tools among its blocks, as some providers write them, become turns of their own."""
    rest: list[str | dict[str, Any]] = []
    for block in _blocks(message.content):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            text = _told(_text(block.get("content", ""), message), failed=bool(block.get("is_error")))
            yield {"role": "tool", "content": text, "tool_call_id": block.get("tool_use_id", "")}
        else:
            rest.append(block)
    if rest or not message.content:
        yield {"role": "user", "content": _text(rest, message)}


def _told(text: str, *, failed: bool) -> str:
    return f"Error: {text}" if failed and not text.lower().startswith("error") else text


def _blocks(content: str | list[Any]) -> list[Any]:
    return [content] if isinstance(content, str) else content


def _text(content: str | list[Any], message: BaseMessage, *, skipped: Sequence[str] = ()) -> str:
    """The text of content blocks, joined."""
    return "".join(_part(block, message, skipped) for block in _blocks(content))


def _part(block: str | dict[str, Any], message: BaseMessage, skipped: Sequence[str]) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type", "text" if "text" in block else None)
    if kind in _TEXTS and isinstance(text := block.get(_TEXTS[kind]), str):
        return text
    if kind == "json" and "json" in block:
        return json.dumps(block["json"], ensure_ascii=False)
    if kind in _DROPPED or kind in skipped:
        return ""
    raise ConfigError(
        f"a {type(message).__name__} holds a content block of type {kind!r}, and the model reads text alone: remove "
        "the block, or put what it says into words"
    )
