"""Tools on a scripted model that writes what a test wants, within what the grammar allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program import FunctionCallingProgram
from llama_index_support import ADD, FIVE, WEATHER, Person, essence, scripted, user

from llama_index.llms.rksc import RKSC
from llama_index.llms.rksc.tools import openai_tools, schema_of
from rksc_agents import ConfigError, RKSCReasoner


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted() as made:
        yield made


@pytest.fixture
def llm(reasoner: RKSCReasoner) -> RKSC:
    return RKSC(reasoner=reasoner, strategy="direct", max_tokens=200)


def selected(llm: RKSC, response: Any) -> list[tuple[str, dict[str, Any]]]:
    calls = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    return [(call.tool_name, call.tool_kwargs) for call in calls]


@pytest.mark.parametrize("asked", [{}, {"tool_required": True}, {"tool_choice": "add"}, {"tool_choice": "required"}])
async def test_a_call(llm: RKSC, asked: Any) -> None:
    """Cases 1 and 24."""
    tools = [ADD, WEATHER]
    response = llm.chat_with_tools(tools, "Add.", **asked)
    assert selected(llm, response) == [("add", {"a": 2, "b": 3})]
    assert response.message.content is None
    assert response.raw["finish_reason"] == "tool_calls"
    assert essence(list(llm.stream_chat_with_tools(tools, "Add.", **asked))[-1]) == essence(response)
    assert essence(await llm.achat_with_tools(tools, "Add.", **asked)) == essence(response)
    stream = await llm.astream_chat_with_tools(tools, "Add.", **asked)
    assert essence([chunk async for chunk in stream][-1]) == essence(response)


def test_a_choice_among_tools(llm: RKSC) -> None:
    tools = [ADD, WEATHER]
    (made,) = selected(llm, llm.chat_with_tools(tools, "Add.", tool_choice="weather"))
    assert made[0] == "weather"
    assert selected(llm, llm.chat_with_tools(tools, "Just talk.", tool_choice="none", tool_required=True)) == []
    (made,) = selected(llm, llm.chat_with_tools(tools, "Just talk.", tool_required=True))
    assert made[0] in ("add", "weather")
    with pytest.raises(ConfigError, match="the tools are add, weather"):
        llm.chat_with_tools(tools, "Add.", tool_choice="subtract")


def test_parallel_calls_only_where_they_are_allowed(llm: RKSC) -> None:
    both = selected(llm, llm.chat_with_tools([ADD], "Add twice.", allow_parallel_tool_calls=True))
    assert both == [("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 2})]
    assert selected(llm, llm.chat_with_tools([ADD], "Add twice.")) == both[:1]
    ids = [call.tool_id for call in llm.get_tool_calls_from_response(llm.chat_with_tools([ADD], "Add."))]
    assert ids == [call.tool_id for call in llm.get_tool_calls_from_response(llm.chat_with_tools([ADD], "Add."))]


def test_text_beside_a_call_and_text_alone(llm: RKSC) -> None:
    response = llm.chat_with_tools([ADD], "Say and add.")
    assert response.message.content == "I add."
    assert [block.block_type for block in response.message.blocks] == ["text", "tool_call"]
    plain = llm.chat_with_tools([ADD], "Just talk.")
    assert plain.message.content == "Fine."
    assert llm.get_tool_calls_from_response(plain, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match=r"called no tool and wrote 'Fine\.'.*tool_required=True"):
        llm.get_tool_calls_from_response(plain)


def test_calls_are_found_where_other_libraries_put_them(llm: RKSC) -> None:
    legacy = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    response = llm.chat(user("Just talk.")).model_copy(
        update={"message": ChatMessage(role="assistant", additional_kwargs={"tool_calls": [legacy]})}
    )
    assert llm.get_tool_calls_from_response(response) == [
        ToolSelection(tool_id="1", tool_name="add", tool_kwargs={"a": 2})
    ]
    ours = llm.chat_with_tools([ADD], "Add.").message.additional_kwargs["tool_calls"]
    assert json.loads(ours[0]["function"]["arguments"]) == {"a": 2, "b": 3}


def test_branches_vote_on_calls(llm: RKSC) -> None:
    """`add(2)` and `add(2, 3)` are one call, since 3 is the default."""
    for seed in range(30):
        response = llm.chat_with_tools([ADD], "Vote.", strategy=FIVE, seed=seed)
        if response.raw["rksc"]["agreement"] == 0.8:
            break
    assert response.raw["rksc"]["agreement"] == 0.8
    ((name, arguments),) = selected(llm, response)
    assert (name, arguments["a"]) == ("add", 2)


async def test_tools_are_run(llm: RKSC) -> None:
    assert str(llm.predict_and_call([ADD], "Add.")) == "5"
    assert str(await llm.apredict_and_call([ADD], "Add.")) == "5"
    both = llm.predict_and_call([ADD], "Add twice.", allow_parallel_tool_calls=True)
    assert [source.raw_output for source in both.sources] == [2, 4]
    assert str(llm.predict_and_call([ADD], "Just talk.", error_on_no_tool_call=False)) == "Fine."


@pytest.mark.parametrize("legacy", [False, True])
def test_the_second_turn_computes_its_new_tokens(llm: RKSC, legacy: bool) -> None:
    question = ChatMessage("Add.")
    first = llm.chat_with_tools([ADD], question)
    message = first.message
    if legacy:
        message = ChatMessage(role="assistant", additional_kwargs=message.additional_kwargs)
    call_id = llm.get_tool_calls_from_response(first)[0].tool_id
    result = ChatMessage(role="tool", content="5", additional_kwargs={"tool_call_id": call_id})
    second = llm.chat_with_tools([ADD], chat_history=[question, message, result])
    assert second.message.content == "It is 5."
    reused = second.raw["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused >= first.raw["usage"]["prompt_tokens"] + first.raw["usage"]["completion_tokens"] - 2


@pytest.mark.parametrize("max_tokens", [8, 20])
def test_calls_are_complete_or_refused(llm: RKSC, max_tokens: int) -> None:
    """A forced call that cannot fit is refused before the run."""
    with pytest.raises(ConfigError, match=rf"max_tokens = {max_tokens} leaves no room"):
        llm.chat_with_tools([ADD], "Add.", tool_required=True, max_tokens=max_tokens)


def test_a_call_that_was_cut_short_is_told(llm: RKSC, reasoner: RKSCReasoner) -> None:
    from llama_index.llms.rksc.responses import raw_of, response_of
    from rksc_agents.types import InvalidToolCall

    wrong = (InvalidToolCall(text='{"name": "add"', error="cut short", name="add"),)
    result = reasoner.reason("Just talk.", strategy="direct").model_copy(update={"invalid_tool_calls": wrong})
    assert raw_of(result, "m")["invalid_tool_calls"] == [
        {"text": '{"name": "add"', "error": "cut short", "name": "add"}
    ]
    assert llm.get_tool_calls_from_response(response_of(result, "m", "asked"), error_on_no_tool_call=False) == []


def test_what_is_no_tool_raises(llm: RKSC) -> None:
    wrong: Any
    for wrong in ([3], "add", {"name": "add"}, [len]):
        with pytest.raises(ConfigError, match=r"is no tool|list of tools"):
            openai_tools(wrong)
    with pytest.raises(ConfigError, match="is no tool"):
        llm.chat_with_tools([3], "Add.")  # type: ignore[list-item]
    assert openai_tools([{"name": "x"}]) == [{"name": "x"}]


def test_long_descriptions_are_no_matter(llm: RKSC) -> None:
    from llama_index.core.tools import FunctionTool

    long = FunctionTool.from_defaults(fn=lambda a: a, name="add", description="long " * 400)
    assert openai_tools([long])[0]["function"]["name"] == "add"


# -- programs -----------------------------------------------------------------------------------


async def test_programs_call_their_tool(llm: RKSC) -> None:
    program: Any = FunctionCallingProgram.from_defaults(Person, "{what}", llm=llm)
    ann = Person(name="Ann", age=33)
    assert program(what="Person?") == ann
    assert await program.acall(what="Person?") == ann
    assert list(program.stream_call(what="Person?"))[-1] == ann
    assert [part async for part in await program.astream_call(what="Person?")][-1] == ann


async def test_programs_call_their_tool_also_where_the_model_would_talk(llm: RKSC) -> None:
    """LlamaIndex does not say that a call is required where it streams."""
    program: Any = FunctionCallingProgram.from_defaults(Person, "{what}", llm=llm)
    for found in (
        program(what="Just talk."),
        list(program.stream_call(what="Just talk."))[-1],
        [part async for part in await program.astream_call(what="Just talk.")][-1],
    ):
        assert isinstance(found, Person)


def test_schemas() -> None:
    assert schema_of(Person)["properties"].keys() == {"name", "age"}
    assert schema_of({"type": "object"}) == {"type": "object"}
    wrong: Any
    for wrong in (3, "Person", Person(name="a", age=1), int):
        with pytest.raises(ConfigError, match="is no schema"):
            schema_of(wrong)
