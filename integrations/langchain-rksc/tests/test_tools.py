"""Tools on a scripted model that writes what a test wants, within what the grammar allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_support import added, essence
from tool_support import FIVE, Person, PersonDict, add, scripted, weather

from langchain_rksc import ChatRKSC
from langchain_rksc.call import Call
from langchain_rksc.tools import openai_tools, schema_of
from rksc_agents import ConfigError, RKSCReasoner
from rksc_agents.adapter.call import choice_of
from rksc_agents.adapter.call import grammar_of as grammar_with
from rksc_agents.form import Form
from rksc_agents.model.grammar import Grammar, JSONSchema, Regex


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted() as made:
        yield made


@pytest.fixture
def chat(reasoner: RKSCReasoner) -> ChatRKSC:
    return ChatRKSC(reasoner=reasoner, max_tokens=200, strategy="direct")


# -- what the core is asked ---------------------------------------------------------------------

TOOLS = openai_tools([add, weather])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        (False, None),
        ("auto", "auto"),
        ("none", "none"),
        ("any", "any"),
        ("required", "any"),
        (True, "any"),
        ("add", "add"),
        ({"type": "function", "function": {"name": "add"}}, "add"),
        ({"type": "tool", "name": "add"}, "add"),
        ({"name": "add"}, "add"),
        ({"type": "any"}, "any"),
        ({"type": "auto"}, "auto"),
    ],
)
def test_every_form_of_tool_choice(choice: Any, expected: str | None) -> None:
    assert choice_of(choice, TOOLS) == expected


@pytest.mark.parametrize("choice", ["subtract", {"name": "subtract"}, {"type": "function"}, {}, 3])
def test_a_choice_that_is_none_raises(choice: Any) -> None:
    if choice == {}:
        assert choice_of(choice, TOOLS) is None
        return
    with pytest.raises(ConfigError, match="the tools are add, weather"):
        choice_of(choice, TOOLS)
    with pytest.raises(ConfigError, match="the tools are add"):
        ChatRKSC().bind_tools([add], tool_choice=choice)


def test_what_is_no_tool_raises() -> None:
    for wrong in ([3], "add", {"name": "add"}, [{"nothing": 1}]):
        with pytest.raises(ConfigError, match=r"no tool|list of tools"):
            ChatRKSC().bind_tools(wrong)


def grammar_of(format_: Any) -> Grammar | None:
    return grammar_with(format_, schema_of)


def options(**given: Any) -> Any:
    return Call.of({}, "m", None, given).options


def test_one_call_where_a_call_is_demanded() -> None:
    def parallel(**given: Any) -> bool:
        asked = options(tools=TOOLS, **given)
        return Form.of(**{name: asked[name] for name in ("tools", *given)}).parallel

    assert parallel()
    assert parallel(tool_choice="auto")
    assert not parallel(tool_choice="any")
    assert not parallel(tool_choice="add")
    assert parallel(tool_choice="any", parallel_tool_calls=True)
    assert not parallel(parallel_tool_calls=False)
    assert "tools" not in options(tools=[])
    assert options(tools=[], tool_choice="none") == {}


def test_tools_of_every_kind_and_strict_ones() -> None:
    def function(a: int) -> int:
        """Do it."""
        return a

    kinds = openai_tools([add, function, Person, PersonDict, TOOLS[1], Person.model_json_schema()])
    assert [kind["function"]["name"] for kind in kinds] == [
        "add",
        "function",
        "Person",
        "PersonDict",
        "weather",
        "Person",
    ]
    assert options(tools=[add], strict=True)["tools"][0]["function"]["parameters"]["additionalProperties"] is False


@pytest.mark.parametrize(
    "format_",
    [
        {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "object", "properties": {}}}},
        {"type": "json_schema", "schema": {"type": "object", "properties": {}}},
        {"type": "object", "properties": {}},
    ],
)
def test_response_formats(format_: Any) -> None:
    grammar = grammar_of(format_)
    assert isinstance(grammar, JSONSchema)
    assert grammar.schema["properties"] == {}


def test_other_response_formats() -> None:
    assert grammar_of(None) is None
    assert grammar_of({"type": "text"}) is None
    assert grammar_of({"type": "json_object"}) == JSONSchema({"type": "object"})
    for schema in (Person, PersonDict):
        grammar = grammar_of(schema)
        assert isinstance(grammar, JSONSchema)
        assert grammar.schema["properties"].keys() == {"name", "age"}
    for wrong in ("json", 3):
        with pytest.raises(ConfigError, match="is no schema"):
            grammar_of(wrong)
    with pytest.raises(ConfigError, match="give one of the two"):
        options(grammar=Regex("a"), response_format={"type": "json_object"})


# -- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [None, "any", "add", True])
async def test_a_call(chat: ChatRKSC, choice: Any) -> None:
    """Cases 1 and 24."""
    bound = chat.bind_tools([add, weather], tool_choice=choice)
    message = bound.invoke("Add.")
    assert message.content == ""
    (made,) = message.tool_calls
    assert (made["name"], made["args"]) == ("add", {"a": 2, "b": 3})
    assert made["id"]
    assert message.response_metadata["finish_reason"] == "tool_calls"
    assert essence(added(bound.stream("Add."))) == essence(message)
    assert essence(await bound.ainvoke("Add.")) == essence(message)
    assert essence(added([chunk async for chunk in bound.astream("Add.")])) == essence(message)


def test_several_calls_text_and_thinking(chat: ChatRKSC) -> None:
    bound = chat.bind_tools([add])
    message = bound.invoke("Add twice.")
    assert [made["args"] for made in message.tool_calls] == [{"a": 1, "b": 1}, {"a": 2, "b": 2}]
    assert len({made["id"] for made in message.tool_calls}) == 2
    assert bound.invoke("Say and add.").content == "I add."
    assert bound.invoke("Just talk.").tool_calls == []
    thought = bound.invoke("Think and add.")
    assert [block["type"] for block in thought.content_blocks] == ["reasoning", "tool_call"]
    for question in ("Add twice.", "Say and add.", "Just talk.", "Think and add."):
        assert essence(added(bound.stream(question))) == essence(bound.invoke(question))
    assert len(chat.bind_tools([add], parallel_tool_calls=False).invoke("Add twice.").tool_calls) == 1


def test_none_makes_no_call(chat: ChatRKSC) -> None:
    assert chat.bind_tools([add], tool_choice="none").invoke("Just talk.").content == "Fine."


def test_the_ids_of_calls_tell_turns_apart(chat: ChatRKSC) -> None:
    bound = chat.bind_tools([add])
    first, again = bound.invoke("Add."), bound.invoke("Add.")
    assert first.tool_calls == again.tool_calls
    later = bound.invoke([HumanMessage("Add."), first, ToolMessage("5", tool_call_id="x"), HumanMessage("Add.")])
    assert later.tool_calls[0]["args"] == first.tool_calls[0]["args"]
    assert later.tool_calls[0]["id"] != first.tool_calls[0]["id"]


@pytest.mark.parametrize("text", ['{"name": "add", "arguments": {"a": 1', '{"name": "x", "arguments": {}}', "<x", "[1"])
def test_text_that_is_no_call_is_not_mended(reasoner: RKSCReasoner, text: str) -> None:
    """LangChain would make a call of it while it adds up chunks."""
    from langchain_rksc.chunks import Chunks
    from langchain_rksc.outputs import message_of, metadata_of
    from rksc_agents.types import InvalidToolCall

    wrong = (InvalidToolCall(text=text, error="cut short", name="add"),)
    result = reasoner.reason("Just talk.", strategy="direct").model_copy(update={"invalid_tool_calls": wrong})
    metadata = metadata_of(result, "m")
    message = message_of(result, metadata, "asked")
    streamed = added(chunk.message for chunk in Chunks(single=True, reasoning=False).end(result, metadata, "asked"))
    assert message.tool_calls == streamed.tool_calls == []
    assert message.invalid_tool_calls[0]["error"] == "cut short"
    assert essence(streamed) == essence(message)


def test_branches_vote_on_calls(chat: ChatRKSC) -> None:
    """`add(2)` and `add(2, 3)` are one call, since 3 is the default."""
    record = {}
    for seed in range(30):
        message = chat.bind_tools([add]).invoke("Vote.", strategy=FIVE, seed=seed)
        record = message.response_metadata["rksc"]
        texts = [vote["answer"] for vote in record["votes"]]
        if len(texts) == 2 and record["agreement"] == 0.8:
            break
    assert record["agreement"] == 0.8
    assert json.loads(record["votes"][0]["answer"])[0]["arguments"] == {"a": 2, "b": 3}
    assert message.tool_calls[0]["args"]["a"] == 2


def test_tools_for_one_call(chat: ChatRKSC) -> None:
    assert chat.invoke("Add.", tools=[add], tool_choice="required").tool_calls[0]["name"] == "add"


def test_a_loop_with_a_tool(chat: ChatRKSC) -> None:
    bound = chat.bind_tools([add])
    question = HumanMessage("Add.")
    message = bound.invoke([question])
    result = add.invoke(message.tool_calls[0])
    assert result.content == "5"
    answer = chat.bind_tools([add]).invoke([question, message, result])
    assert answer.text == "It is 5."
    assert answer.usage_metadata is not None
    assert message.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] >= message.usage_metadata["input_tokens"]
