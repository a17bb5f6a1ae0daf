"""Conformance of an LLM that calls functions. Tools read annotations when they are made, so none are put off here."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import pytest
from conformance_base import ADD, HI, Conformance, drained, needs, text_of, user
from llama_index.core.base.llms.types import ChatResponse, ToolCallBlock
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import FunctionTool


class Unit(StrEnum):
    """A unit of temperature."""

    CELSIUS = "celsius"
    KELVIN = "kelvin"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def weather(city: str, unit: Unit = Unit.CELSIUS, days: list[int] | None = None) -> str:
    """Tell the weather of a city."""
    return f"{city}: 20 {unit}, {days}"


def now() -> str:
    """Tell the time."""
    return "noon"


TOOLS = [FunctionTool.from_defaults(fn=function) for function in (add, weather, now)]
BY_NAME = {str(tool.metadata.name): tool for tool in TOOLS}


class Tools(Conformance):
    """Calls of tools, whole and streamed, and what is done with them."""

    area = "tools"

    def check_calls(self, llm: Any, response: ChatResponse, tools: Sequence[FunctionTool] = TOOLS) -> None:
        """Check that a response has calls, and that each can be made."""
        assert isinstance(response, ChatResponse)
        assert response.message.role == MessageRole.ASSISTANT
        made = llm.get_tool_calls_from_response(response)
        assert len(made) > 0
        for call in made:
            assert isinstance(call, ToolSelection)
            assert call.tool_name in [tool.metadata.name for tool in tools]
            schema = BY_NAME[call.tool_name].metadata.fn_schema
            assert schema is not None
            schema.model_validate(call.tool_kwargs)
            assert set(call.tool_kwargs) <= set(schema.model_fields)

    def required(self, llm: Any, tools: Sequence[FunctionTool] = TOOLS, **asked: Any) -> ChatResponse:
        """A response that has to call a tool."""
        return llm.chat_with_tools(tools, ADD, tool_required=True, **self.room, **asked)  # type: ignore[no-any-return]

    @needs("function_calling")
    def test_chat_with_tools(self) -> None:
        llm = self.make_llm()
        self.check_calls(llm, self.required(llm))

    @needs("function_calling")
    async def test_achat_with_tools(self) -> None:
        llm: Any = self.make_llm()
        response = await llm.achat_with_tools(TOOLS, ADD, tool_required=True, **self.room)
        self.check_calls(llm, response)
        if self.deterministic:
            assert self.calls_of(llm, response) == self.calls_of(llm, self.required(llm))

    @needs("function_calling")
    def test_stream_chat_with_tools(self) -> None:
        llm: Any = self.make_llm()
        chunks = list(llm.stream_chat_with_tools(TOOLS, ADD, tool_required=True, **self.room))
        self.check_calls(llm, chunks[-1])
        if self.deterministic:
            assert self.calls_of(llm, chunks[-1]) == self.calls_of(llm, self.required(llm))

    @needs("function_calling")
    async def test_astream_chat_with_tools(self) -> None:
        llm: Any = self.make_llm()
        chunks = await drained(llm.astream_chat_with_tools(TOOLS, ADD, tool_required=True, **self.room))
        self.check_calls(llm, chunks[-1])
        if self.deterministic:
            assert self.calls_of(llm, chunks[-1]) == self.calls_of(llm, self.required(llm))

    @needs("function_calling")
    def test_each_tool_can_be_called(self) -> None:
        llm = self.make_llm()
        for tool in TOOLS:
            self.check_calls(llm, self.required(llm, [tool]), [tool])

    @needs("function_calling")
    def test_a_call_is_the_models_choice(self) -> None:
        llm: Any = self.make_llm()
        response = llm.chat_with_tools(TOOLS, ADD, **self.room)
        assert response.message.role == MessageRole.ASSISTANT
        if self.calls_of(llm, response):
            self.check_calls(llm, response)
        else:
            assert text_of(response).strip()

    @needs("function_calling")
    def test_calls_have_ids_of_their_own(self) -> None:
        llm: Any = self.make_llm()
        response = self.required(llm, allow_parallel_tool_calls=True)
        ids = [call.tool_id for call in llm.get_tool_calls_from_response(response)]
        assert all(isinstance(id_, str) and id_ for id_ in ids)
        assert len(set(ids)) == len(ids) > 0

    @needs("function_calling")
    def test_no_call_is_an_error_unless_it_is_not(self) -> None:
        llm: Any = self.make_llm()
        response = llm.chat(user(HI))
        with pytest.raises(ValueError, match=r"."):
            llm.get_tool_calls_from_response(response, error_on_no_tool_call=True)
        assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []

    @needs("function_calling")
    async def test_one_call_where_parallel_calls_are_not_allowed(self) -> None:
        llm: Any = self.make_llm()
        asked = {"tool_required": True, "allow_parallel_tool_calls": False, **self.room}
        for response in (
            llm.chat_with_tools(TOOLS, ADD, **asked),
            await llm.achat_with_tools(TOOLS, ADD, **asked),
            list(llm.stream_chat_with_tools(TOOLS, ADD, **asked))[-1],
        ):
            assert len(self.calls_of(llm, response)) == 1

    @needs("function_calling", "deterministic")
    def test_a_question_may_be_a_message_or_history(self) -> None:
        llm: Any = self.make_llm()
        expected = self.calls_of(llm, self.required(llm))
        (message,) = user(ADD)
        for asked in ({"user_msg": message}, {"chat_history": [message]}):
            response = llm.chat_with_tools(TOOLS, tool_required=True, **asked, **self.room)
            assert self.calls_of(llm, response) == expected

    @needs("function_calling")
    def test_predict_and_call(self) -> None:
        llm: Any = self.make_llm()
        response = llm.predict_and_call([BY_NAME["add"]], ADD, tool_required=True, **self.room)
        (source,) = response.sources
        assert not source.is_error
        assert source.tool_name == "add"
        assert source.raw_output == add(**source.raw_input["kwargs"])
        assert str(response) == str(source.raw_output)

    @needs("function_calling")
    async def test_apredict_and_call(self) -> None:
        llm: Any = self.make_llm()
        response = await llm.apredict_and_call([BY_NAME["add"]], ADD, tool_required=True, **self.room)
        (source,) = response.sources
        assert not source.is_error
        assert source.raw_output == add(**source.raw_input["kwargs"])
        assert str(response) == str(source.raw_output)

    @needs("function_calling")
    def test_results_are_read(self) -> None:
        llm: Any = self.make_llm()
        response = self.required(llm, [BY_NAME["add"]])
        (call,) = llm.get_tool_calls_from_response(response)
        answers = [self.answered(llm, response.message, call.tool_id, result) for result in ("5", "five, " * 9)]
        assert all(answer.message.role == MessageRole.ASSISTANT for answer in answers)
        self.check_more_was_read(answers[1], answers[0])

    @needs("function_calling")
    def test_calls_of_others_can_be_history(self) -> None:
        llm: Any = self.make_llm()
        block = ToolCallBlock(tool_call_id="call_1", tool_name="add", tool_kwargs={"a": 2, "b": 3})
        answer = self.answered(llm, ChatMessage(role=MessageRole.ASSISTANT, blocks=[block]), "call_1", "5", **self.room)
        assert answer.message.role == MessageRole.ASSISTANT
        assert text_of(answer).strip() or self.calls_of(llm, answer)

    def answered(self, llm: Any, called: ChatMessage, call_id: str, result: str, **asked: Any) -> ChatResponse:
        """What is said to the result of a call."""
        told = ChatMessage(role=MessageRole.TOOL, content=result, additional_kwargs={"tool_call_id": call_id})
        history = [*user(ADD), called, told]
        return llm.chat_with_tools([BY_NAME["add"]], chat_history=history, **asked)  # type: ignore[no-any-return]
