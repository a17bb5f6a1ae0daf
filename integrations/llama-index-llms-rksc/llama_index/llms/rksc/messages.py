"""LlamaIndex messages as a conversation of the core."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from rksc_agents.errors import ConfigError

Message = dict[str, Any]

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


def conversation(messages: object, system: str | None = None) -> list[Message]:
    """Return a conversation as chat templates take it: mappings with "role" and "content".

    Thinking is left out, as chat templates of models that think do, and so are points to cache up to: all is cached.

    Parameters
    ----------
    messages : sequence of ChatMessage
        They are left as they are.
    system : str or None
        The system text where the conversation has none of its own.

    Raises
    ------
    ConfigError
        If a message holds a content block that the model cannot read, or something is no message.
    """
    if isinstance(messages, (str, ChatMessage)) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages = {messages!r}: give a list of ChatMessage; complete() takes a text")
    conversed: list[Message] = []
    names: dict[str, str] = {}  # of the tools called so far, by the call's id
    for message in messages:
        if not isinstance(message, ChatMessage):
            raise ConfigError(f"messages hold {message!r}: give ChatMessage objects")
        converted = _converted(message)
        for call in converted.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        called = names.get(converted.get("tool_call_id", "")) if converted["role"] == "tool" else None
        conversed.append(converted if called is None else {"name": called, **converted})
    if system and not any(message["role"] == "system" for message in conversed):
        conversed.insert(0, {"role": "system", "content": system})
    return conversed


def _converted(message: ChatMessage) -> Message:
    role = _ROLES[message.role]
    converted: Message = {"role": role, "content": text_of(message)}
    if role == "assistant" and (calls := calls_of(message)):
        converted["tool_calls"] = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id_, name, arguments in calls
        ]
    if role == "tool":
        told = {"tool_call_id": message.additional_kwargs.get("tool_call_id")}
        told["name"] = message.additional_kwargs.get("name")
        converted |= {key: value for key, value in told.items() if value}
    return converted


def text_of(message: ChatMessage) -> str:
    """The text of a message, that of its blocks line by line, as ``ChatMessage.content`` has it.

    Raises
    ------
    ConfigError
        If a block is neither text nor something that stands beside it.
    """
    return "\n".join(text for block in message.blocks for text in _texts(block, message.role.value))


def _texts(block: ContentBlock, role: str) -> list[str]:
    match block:
        case TextBlock(text=text):
            return [text]
        case CitableBlock(content=parts):
            return [text for part in parts for text in _texts(part, role)]
        case CitationBlock(cited_content=part):
            return _texts(part, role)
        case ThinkingBlock() | CachePoint() | ToolCallBlock():
            return []
    raise ConfigError(
        f"a {role} message holds a block of type {block.block_type!r}, and the model reads text alone: remove the "
        "block, or put what it says into words"
    )


def calls_of(message: ChatMessage) -> list[tuple[str, str, dict[str, Any]]]:
    """Id, name and arguments of each tool call: from its blocks, else in OpenAI's form from `additional_kwargs`."""
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if blocks:
        return [(block.tool_call_id or "", block.tool_name, _arguments(block.tool_kwargs)) for block in blocks]
    return [_legacy(call) for call in message.additional_kwargs.get("tool_calls") or ()]


def _legacy(call: Any) -> tuple[str, str, dict[str, Any]]:
    inner = _of(call, "function") or call
    return str(_of(call, "id") or ""), str(_of(inner, "name") or ""), _arguments(_of(inner, "arguments"))


def _of(holder: Any, name: str) -> Any:
    """A field of a mapping, or of an object of some provider's library."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _arguments(given: Any) -> dict[str, Any]:
    """Arguments as a mapping; of text that is no JSON object, which no tool can be called with, nothing is left."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return {}
    return dict(given) if isinstance(given, Mapping) else {}
