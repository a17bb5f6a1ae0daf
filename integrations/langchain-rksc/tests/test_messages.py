"""LangChain messages as a conversation of the core."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call

from langchain_rksc.messages import conversation
from rksc_agents import ConfigError

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def one(message: BaseMessage) -> dict[str, Any]:
    (converted,) = conversation([message])
    return converted


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (SystemMessage("Be brief."), {"role": "system", "content": "Be brief."}),
        (HumanMessage("Hi", name="Ann"), {"role": "user", "content": "Hi"}),
        (AIMessage("Hello", name="bot"), {"role": "assistant", "content": "Hello"}),
        (AIMessageChunk("Hello"), {"role": "assistant", "content": "Hello"}),
        (ChatMessage("x", role="developer"), {"role": "system", "content": "x"}),
        (ChatMessage("x", role="user"), {"role": "user", "content": "x"}),
        (ChatMessage("x", role="assistant"), {"role": "assistant", "content": "x"}),
        (FunctionMessage("3", name="add"), {"role": "tool", "content": "3", "name": "add"}),
        (ToolMessage("3", tool_call_id="c1"), {"role": "tool", "content": "3", "tool_call_id": "c1"}),
        (
            ToolMessage("3", tool_call_id="c1", name="add"),
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        ),
        (HumanMessage(""), {"role": "user", "content": ""}),
    ],
)
def test_roles(message: BaseMessage, expected: dict[str, Any]) -> None:
    assert one(message) == expected


def test_a_remove_message_and_an_unknown_role_are_refused() -> None:
    with pytest.raises(ConfigError, match="RemoveMessage is nothing that a model reads"):
        conversation([RemoveMessage(id="1")])
    with pytest.raises(ConfigError, match="'critic': use one of system"):
        conversation([ChatMessage("x", role="critic")])


@pytest.mark.parametrize(
    "content",
    [
        ["Hel", "lo"],
        [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
        [{"text": "Hello"}],
        [{"type": "text-plain", "text": "Hello", "mime_type": "text/plain"}],
        [{"type": "reasoning", "reasoning": "I greet."}, {"type": "text", "text": "Hello"}],
        [{"type": "thinking", "thinking": "I greet.", "signature": "s"}, {"type": "text", "text": "Hello"}],
        [{"type": "redacted_thinking", "data": "s"}, "Hello"],
    ],
)
def test_text_blocks_are_joined_and_reasoning_is_left_out(content: list[Any]) -> None:
    assert one(AIMessage(content)) == {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image", "base64": "aGk=", "mime_type": "image/png"},
        {"type": "audio", "base64": "aGk="},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
        {"type": "file", "file": {"file_id": "1"}},
        {"type": "video", "url": "https://example.org"},
        {"type": "non_standard", "value": {}},
        {"type": "text", "text": 3},
        {"weird": True},
    ],
)
def test_other_blocks_raise_and_are_named(block: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"HumanMessage holds a content block of type {block.get('type')!r}"):
        conversation([HumanMessage(["Look: ", block])])


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_tool_calls_of_the_history(content: Any) -> None:
    message = AIMessage(content, tool_calls=[tool_call(name="add", args={"a": 1, "b": 2}, id="c1")])
    assert one(message) == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": 2}},
        {"type": "tool_call", "id": "c1", "name": "add", "args": {"a": 1, "b": 2}},
        {"type": "function_call", "call_id": "c1", "id": "x", "name": "add", "arguments": {"a": 1, "b": 2}},
    ],
)
def test_tool_calls_in_content_count_once(block: dict[str, Any]) -> None:
    blocks = [{"type": "text", "text": "I add."}, block]
    expected = {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}
    assert one(AIMessage(blocks)) == expected
    assert one(AIMessage(blocks, tool_calls=[tool_call(name="add", args={"a": 1, "b": 2}, id="c1")])) == expected


def test_an_invalid_tool_call_of_the_history_is_the_text_that_it_was() -> None:
    wrong = invalid_tool_call(name="add", args='{"a": ', id="c1", error="cut short")
    assert one(AIMessage("I add.", invalid_tool_calls=[wrong])) == {"role": "assistant", "content": 'I add.\n{"a": '}


def test_a_tool_result_gets_the_name_of_the_tool_that_was_called() -> None:
    asked = AIMessage("", tool_calls=[tool_call(name="add", args={}, id="c1")])
    told = conversation([asked, ToolMessage("3", tool_call_id="c1"), ToolMessage("4", tool_call_id="other")])
    assert told[1]["name"] == "add"
    assert "name" not in told[2]


def test_a_tool_result_in_blocks() -> None:
    content: list[Any] = [{"type": "text", "text": "found "}, {"type": "json", "json": {"n": 1}}]
    assert one(ToolMessage(content, tool_call_id="c1"))["content"] == 'found {"n": 1}'


def test_a_failed_tool_is_told_to_the_model() -> None:
    assert one(ToolMessage("no such city", tool_call_id="c1", status="error"))["content"] == "Error: no such city"
    assert one(ToolMessage("Error: no city", tool_call_id="c1", status="error"))["content"] == "Error: no city"


def test_tool_results_inside_a_user_turn_become_turns_of_their_own() -> None:
    content: list[Any] = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    assert conversation([HumanMessage(content)]) == [
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "Error: no", "tool_call_id": "c2"},
        {"role": "user", "content": "Go on."},
    ]
    assert [message["role"] for message in conversation([HumanMessage(content[:2])])] == ["tool", "tool"]


def test_messages_are_not_changed() -> None:
    messages = convert_to_messages([("system", "s"), ("user", "u"), ("ai", "a")])
    before = [message.model_copy(deep=True) for message in messages]
    conversation(messages)
    assert messages == before
