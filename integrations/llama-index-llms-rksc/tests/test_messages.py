"""LlamaIndex messages as the core's conversations."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index_support import HI, scripted

from llama_index.llms.rksc import RKSC
from llama_index.llms.rksc.messages import conversation
from rksc_agents import ConfigError

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("chatbot", "assistant"),
        ("model", "assistant"),
        ("tool", "tool"),
        ("function", "tool"),
    ],
)
def test_roles(role: str, expected: str) -> None:
    assert conversation([ChatMessage(role=MessageRole(role), content="x")])[0] == {"role": expected, "content": "x"}


def test_every_role_has_its_place() -> None:
    assert {role.value for role in MessageRole} == {
        "system", "developer", "user", "assistant", "chatbot", "model", "tool", "function",
    }  # fmt: skip


def test_blocks_of_text_are_joined_as_content_joins_them() -> None:
    message = ChatMessage(blocks=[TextBlock(text="a"), TextBlock(text="b")])
    assert conversation([message])[0]["content"] == message.content == "a\nb"
    cited = ChatMessage(
        blocks=[
            CitableBlock(title="t", source="s", content=[TextBlock(text="c")]),
            CitationBlock(cited_content=TextBlock(text="d"), source="s", title="t", additional_location_info={}),
            CachePoint(cache_control=CacheControl(type="ephemeral")),
        ]
    )
    assert conversation([cited])[0]["content"] == "c\nd"
    assert conversation([ChatMessage()])[0] == {"role": "user", "content": ""}


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_call_id="1", tool_name="add", tool_kwargs={"a": 2})]),
        ChatMessage(
            role="assistant", blocks=[ToolCallBlock(tool_call_id="1", tool_name="add", tool_kwargs='{"a": 2}')]
        ),
        ChatMessage(role="assistant", additional_kwargs={"tool_calls": [CALL]}),
        ChatMessage(
            role="assistant",
            additional_kwargs={"tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
        ),
        ChatMessage(
            role="assistant",
            additional_kwargs={
                "tool_calls": [SimpleNamespace(id="1", function=SimpleNamespace(name="add", arguments='{"a": 2}'))]
            },
        ),
        ChatMessage(
            role="assistant", additional_kwargs={"tool_calls": [{"id": "1", "name": "add", "arguments": {"a": 2}}]}
        ),
        ChatMessage(
            role="assistant",
            blocks=[
                ThinkingBlock(content="Hm."),
                ToolCallBlock(tool_call_id="1", tool_name="add", tool_kwargs={"a": 2}),
            ],
            additional_kwargs={"tool_calls": [CALL]},
        ),
    ],
)
def test_calls_and_their_results(message: ChatMessage) -> None:
    result = ChatMessage(role="tool", content="5", additional_kwargs={"tool_call_id": "1"})
    assert conversation([message, result]) == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "1", "name": "add"},
    ]


def test_arguments_that_are_none_do_not_break_the_history() -> None:
    message = ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_name="add", tool_kwargs='{"a": ')])
    assert conversation([message])[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}


def test_the_name_of_a_tool_is_kept() -> None:
    named = ChatMessage(role="tool", content="5", additional_kwargs={"name": "add", "tool_call_id": "9"})
    assert conversation([named])[0]["name"] == "add"


def test_what_the_model_cannot_read_raises() -> None:
    with pytest.raises(ConfigError, match=r"a user message holds a block of type 'image'.*put what it says into words"):
        conversation([ChatMessage(blocks=[TextBlock(text="Look."), ImageBlock(url="http://nowhere/x.png")])])
    wrong: Any
    for wrong in ("text", ChatMessage("x"), 3, None):
        with pytest.raises(ConfigError, match="list of ChatMessage"):
            conversation(wrong)
    with pytest.raises(ConfigError, match="give ChatMessage objects"):
        conversation(["text"])


def test_a_system_text_of_ones_own_is_kept() -> None:
    own = ChatMessage(role="system", content="Own.")
    assert conversation([own], "Other.") == [{"role": "system", "content": "Own."}]
    assert conversation([ChatMessage("x")], "Other.")[0] == {"role": "system", "content": "Other."}


@pytest.mark.parametrize(
    "messages",
    [
        [ChatMessage(role="user", content="a"), ChatMessage(role="user", content=HI)],
        [ChatMessage(role="assistant", content="a"), ChatMessage(role="user", content=HI)],
        [ChatMessage(role="user", content=HI), ChatMessage(role="tool", content="5")],
        [ChatMessage(role="system", content="a"), ChatMessage(role="user", content=HI)],
        [ChatMessage(role="user", content=HI), ChatMessage(role="system", content="late")],
        [ChatMessage(role="user", content=HI), ChatMessage(role="assistant", content="Hel")],
    ],
)
def test_any_order_is_answered_and_nothing_is_changed(messages: list[ChatMessage]) -> None:
    """Cases 4 and 5."""
    before = copy.deepcopy(messages)
    with scripted() as reasoner:
        response = RKSC(reasoner=reasoner, strategy="direct", max_tokens=40).chat(messages)
    assert response.message.content
    assert messages == before
