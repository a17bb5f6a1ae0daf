"""Conformance of an LLM: what it tells of itself, answers, streams."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from conformance_base import (
    HI,
    SIX,
    Conformance,
    Response,
    drained,
    needs,
    text_of,
    user,
)
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse, LLMMetadata
from llama_index.core.llms import LLM, MessageRole
from llama_index.core.llms.function_calling import FunctionCallingLLM

PIRATE = "You are a pirate of the seven seas. Begin each of your answers with the word Arrr."


class Interface(Conformance):
    """What the LLM tells of itself, and what its methods give."""

    area = "interface"

    def test_metadata(self) -> None:
        metadata = self.make_llm().metadata
        assert isinstance(metadata, LLMMetadata)
        assert isinstance(metadata.context_window, int)
        assert metadata.context_window > 0
        assert isinstance(metadata.num_output, int)
        assert 0 < metadata.num_output <= metadata.context_window
        assert metadata.is_chat_model is self.chat_model

    def test_the_model_has_a_name(self) -> None:
        name = self.make_llm().metadata.model_name
        assert isinstance(name, str)
        assert name.strip()
        assert name != "unknown"

    def test_function_calling_is_told(self) -> None:
        llm = self.make_llm()
        assert llm.metadata.is_function_calling_model is self.function_calling
        assert isinstance(llm, FunctionCallingLLM) or not self.function_calling

    def test_class_name(self) -> None:
        llm = self.make_llm()
        assert llm.class_name() == type(llm).class_name()
        assert llm.class_name() not in (LLM.class_name(), FunctionCallingLLM.class_name())

    def test_streams_are_generators(self) -> None:
        llm = self.make_llm()
        for stream in (llm.stream_chat(user(HI)), llm.stream_complete(HI)):
            assert inspect.isgenerator(stream)
            assert len(list(stream)) > 0

    async def test_async_methods_are_awaited(self) -> None:
        llm = self.make_llm()
        assert inspect.iscoroutine(chat := llm.achat(user(HI)))
        assert isinstance(await chat, ChatResponse)
        assert inspect.iscoroutine(complete := llm.acomplete(HI))
        assert isinstance(await complete, CompletionResponse)

    async def test_async_streams_are_awaited_for_a_generator(self) -> None:
        llm = self.make_llm()
        for asked in (llm.astream_chat(user(HI)), llm.astream_complete(HI)):
            assert inspect.iscoroutine(asked)
            stream = await asked
            assert inspect.isasyncgen(stream)
            assert len([chunk async for chunk in stream]) > 0


class Answers(Conformance):
    """Whole answers to texts and conversations."""

    area = "answers"

    def test_complete(self) -> None:
        response = self.make_llm().complete(SIX)
        assert isinstance(response, CompletionResponse)
        assert response.text.strip()
        assert str(response) == response.text

    def test_chat(self) -> None:
        response = self.make_llm().chat(user(SIX))
        assert isinstance(response, ChatResponse)
        assert response.message.role == MessageRole.ASSISTANT
        assert (response.message.content or "").strip()

    async def test_acomplete(self) -> None:
        response = await self.make_llm().acomplete(SIX)
        assert isinstance(response, CompletionResponse)
        assert response.text.strip()

    async def test_achat(self) -> None:
        response = await self.make_llm().achat(user(SIX))
        assert isinstance(response, ChatResponse)
        assert response.message.role == MessageRole.ASSISTANT
        assert (response.message.content or "").strip()

    @needs("deterministic")
    def test_equal_calls_give_equal_answers(self) -> None:
        llm = self.make_llm()
        assert self.ask(llm, SIX) == self.ask(llm, SIX)
        assert llm.complete(SIX).text == llm.complete(SIX).text

    @needs("deterministic")
    async def test_achat_answers_as_chat_does(self) -> None:
        llm = self.make_llm()
        assert text_of(await llm.achat(user(SIX))) == text_of(llm.chat(user(SIX)))

    @needs("deterministic")
    async def test_acomplete_answers_as_complete_does(self) -> None:
        llm = self.make_llm()
        assert (await llm.acomplete(SIX)).text == llm.complete(SIX).text

    @needs("deterministic", "chat_model")
    def test_a_chat_model_is_asked_in_one_user_message(self) -> None:
        llm = self.make_llm()
        assert llm.complete(SIX).text == text_of(llm.chat(user(SIX)))

    def test_the_prompt_is_not_echoed(self) -> None:
        llm = self.make_llm()
        assert not llm.complete(SIX).text.lstrip().startswith(SIX)
        assert not text_of(llm.chat(user(SIX))).lstrip().startswith(SIX)

    @needs("deterministic", "bounds")
    async def test_a_call_bounds_its_answer(self) -> None:
        llm, bound = self.make_llm(), {str(self.bounds): 2}
        whole = self.ask(llm, SIX)
        answers = [
            text_of(llm.chat(user(SIX), **bound)),
            text_of(await llm.achat(user(SIX), **bound)),
            text_of(list(llm.stream_chat(user(SIX), **bound))[-1]),
        ]
        assert len(set(answers)) == 1
        assert len(answers[0]) < len(whole)
        assert self.ask(llm, SIX) == whole

    @needs("deterministic", "stops")
    async def test_a_call_stops_at_its_texts(self) -> None:
        llm = self.make_llm()
        whole = self.ask(llm, SIX)
        stop = whole[1:3]
        expected = whole[: whole.index(stop)]
        assert text_of(llm.chat(user(SIX), **{str(self.stops): [stop]})) == expected
        assert text_of(await llm.achat(user(SIX), **{str(self.stops): [stop]})) == expected
        chunks = list(llm.stream_chat(user(SIX), **{str(self.stops): [stop]}))
        assert text_of(chunks[-1]) == "".join(chunk.delta or "" for chunk in chunks) == expected


def check_growth(chunks: Sequence[Response], kind: type[Response]) -> str:
    """Check that each chunk has the text so far, and as `delta` what is new in it; return the whole text."""
    assert len(chunks) > 0
    text = ""
    for chunk in chunks:
        assert isinstance(chunk, kind)
        text += chunk.delta or ""
        assert text_of(chunk) == text
        assert isinstance(chunk, CompletionResponse) or chunk.message.role == MessageRole.ASSISTANT
    return text


class Streams(Conformance):
    """Answers as they grow."""

    area = "streams"

    def test_stream_chat_grows(self) -> None:
        assert check_growth(list(self.make_llm().stream_chat(user(SIX))), ChatResponse).strip()

    def test_stream_complete_grows(self) -> None:
        assert check_growth(list(self.make_llm().stream_complete(SIX)), CompletionResponse).strip()

    async def test_astream_chat_grows(self) -> None:
        assert check_growth(await drained(self.make_llm().astream_chat(user(SIX))), ChatResponse).strip()

    async def test_astream_complete_grows(self) -> None:
        assert check_growth(await drained(self.make_llm().astream_complete(SIX)), CompletionResponse).strip()

    @needs("deterministic")
    def test_stream_chat_ends_with_the_answer(self) -> None:
        llm = self.make_llm()
        assert text_of(list(llm.stream_chat(user(SIX)))[-1]) == text_of(llm.chat(user(SIX)))

    @needs("deterministic")
    def test_stream_complete_ends_with_the_answer(self) -> None:
        llm = self.make_llm()
        assert list(llm.stream_complete(SIX))[-1].text == llm.complete(SIX).text

    @needs("deterministic")
    async def test_astream_chat_ends_with_the_answer(self) -> None:
        llm = self.make_llm()
        assert text_of((await drained(llm.astream_chat(user(SIX))))[-1]) == text_of(llm.chat(user(SIX)))

    @needs("deterministic")
    async def test_astream_complete_ends_with_the_answer(self) -> None:
        llm = self.make_llm()
        assert (await drained(llm.astream_complete(SIX)))[-1].text == llm.complete(SIX).text

    @needs("deterministic")
    def test_a_system_prompt_holds_for_streams_too(self) -> None:
        llm = self.make_llm(system_prompt=PIRATE)
        assert list(llm.stream_complete(SIX))[-1].text == llm.complete(SIX).text
        assert text_of(list(llm.stream_chat(user(SIX)))[-1]) == text_of(llm.chat(user(SIX)))

    def test_a_stream_can_be_left(self) -> None:
        llm = self.make_llm()
        before = self.ask(llm, HI)
        for stream in (llm.stream_chat(user(SIX)), llm.stream_complete(SIX)):
            assert isinstance(next(stream), ChatResponse | CompletionResponse)
            stream.close()
            after = self.ask(llm, HI)
            assert after == before or not self.deterministic

    async def test_an_async_stream_can_be_left(self) -> None:
        llm = self.make_llm()
        before = text_of(await llm.achat(user(HI)))
        for asked in (llm.astream_chat(user(SIX)), llm.astream_complete(SIX)):
            stream: Any = await asked
            assert isinstance(await anext(stream), ChatResponse | CompletionResponse)
            await stream.aclose()
            after = text_of(await llm.achat(user(HI)))
            assert after == before or not self.deterministic
