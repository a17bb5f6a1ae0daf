"""Conformance of an LLM: copies and what is written down, several calls at once, the event loop."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import pytest
from conformance_base import (
    ADD,
    HI,
    QUESTIONS,
    SECRET,
    SIX,
    Conformance,
    Rounds,
    drained,
    needs,
    started,
    text_of,
    user,
)
from conformance_structured import Person, about
from conformance_tools import TOOLS
from llama_index.core.base.llms.types import ChatResponse
from llama_index.core.prompts import PromptTemplate
from llama_index_support import listening


class Copies(Conformance):
    """Copies answer as the LLM does, and what is written down can be read and holds no secret."""

    area = "copies"

    @needs("deterministic")
    def test_pickling(self) -> None:
        llm = self.make_lone_llm(system_prompt="Be kind.")
        twin = pickle.loads(pickle.dumps(llm))
        try:
            assert type(twin) is type(llm)
            assert twin.system_prompt == "Be kind."
            assert twin.metadata == llm.metadata
            assert self.ask(twin, HI) == self.ask(llm, HI)
        finally:
            self.release(llm)
            self.release(twin)

    @needs("deterministic")
    def test_deep_copies(self) -> None:
        llm = self.make_llm(system_prompt="Be kind.")
        twin = copy.deepcopy(llm)
        assert self.ask(twin, HI) == self.ask(llm, HI)
        twin.system_prompt = "Be rude."
        assert llm.system_prompt == "Be kind."

    @needs("deterministic")
    def test_copies_with_other_settings(self) -> None:
        llm = self.make_llm(system_prompt="Be kind.")
        twin = llm.model_copy(update={"system_prompt": "Be rude."})
        assert twin.system_prompt == "Be rude."
        assert llm.system_prompt == "Be kind."
        assert self.ask(twin, HI) == self.ask(self.make_llm(system_prompt="Be rude."), HI)

    def test_what_is_written_down_is_json(self) -> None:
        llm = self.make_lone_llm(system_prompt="Be kind.")
        for written in (json.dumps(llm.to_dict()), llm.to_json(), llm.model_dump_json()):
            read = json.loads(written)
            assert read["class_name"] == llm.class_name()
            assert read["system_prompt"] == "Be kind."

    def test_settings_survive_a_round_trip(self) -> None:
        llm = self.make_lone_llm(system_prompt="Be kind.")
        twin = type(llm).from_dict(json.loads(json.dumps(llm.to_dict())))
        assert twin.to_dict() == llm.to_dict()
        assert type(llm).from_json(llm.to_json()).system_prompt == "Be kind."

    @needs("secret")
    def test_no_secret_is_written_down(self) -> None:
        llm = self.make_lone_llm(**self.secret)
        assert SECRET not in str(llm.to_dict())
        assert SECRET not in llm.model_dump_json()

    @needs("secret")
    def test_no_secret_is_told(self) -> None:
        llm = self.make_lone_llm(**self.secret)
        assert SECRET not in f"{llm!r} {llm}"
        with listening() as listener:
            llm.chat(user(HI))
        self.release(llm)
        (start,) = listener.of("LLMChatStartEvent")
        assert start.model_dict
        assert SECRET not in str(start.model_dict)


class Concurrency(Conformance):
    """Calls at once give what they give alone."""

    area = "concurrency"

    @needs("deterministic")
    def test_threads(self) -> None:
        llm = self.make_llm()
        alone = [self.ask(llm, question) for question in QUESTIONS]
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            assert list(pool.map(lambda question: self.ask(llm, question), QUESTIONS)) == alone

    @needs("deterministic")
    async def test_gathered_calls(self) -> None:
        llm = self.make_llm()
        alone = [self.ask(llm, question) for question in QUESTIONS]
        answers = await asyncio.gather(*(llm.achat(user(question)) for question in QUESTIONS))
        assert [text_of(answer) for answer in answers] == alone

    @needs("deterministic")
    async def test_gathered_completions(self) -> None:
        llm = self.make_llm()
        alone = [llm.complete(question).text for question in QUESTIONS]
        answers = await asyncio.gather(*(llm.acomplete(question) for question in QUESTIONS))
        assert [answer.text for answer in answers] == alone

    @needs("deterministic")
    async def test_gathered_streams(self) -> None:
        llm = self.make_llm()
        alone = [self.ask(llm, question) for question in QUESTIONS]
        streams = await asyncio.gather(*(drained(llm.astream_chat(user(question))) for question in QUESTIONS))
        assert [text_of(chunks[-1]) for chunks in streams] == alone

    @needs("deterministic")
    def test_streams_in_turns(self) -> None:
        llm = self.make_llm()
        alone = [self.ask(llm, question) for question in QUESTIONS[:2]]
        turns = list(zip_longest(*(llm.stream_chat(user(question)) for question in QUESTIONS[:2])))
        ends = [[chunk for chunk in chunks if chunk is not None][-1] for chunks in zip(*turns, strict=True)]
        assert [text_of(end) for end in ends] == alone

    @needs("deterministic")
    async def test_threads_beside_the_event_loop(self) -> None:
        llm = self.make_llm()
        alone = [self.ask(llm, question) for question in QUESTIONS]
        first, second = await asyncio.gather(
            asyncio.to_thread(lambda: [self.ask(llm, question) for question in QUESTIONS[:2]]),
            asyncio.gather(*(llm.achat(user(question)) for question in QUESTIONS[2:])),
        )
        assert first + [text_of(answer) for answer in second] == alone

    def test_one_event_loop_after_another(self) -> None:
        llm = self.make_llm()
        for question in QUESTIONS[:2]:
            answer = asyncio.run(started(llm.achat(user(question))))
            assert text_of(answer) == self.ask(llm, question) or not self.deterministic
            chunks = asyncio.run(drained(llm.astream_chat(user(question))))
            assert text_of(chunks[-1]) == text_of(answer) or not self.deterministic


class EventLoop(Conformance):
    """The event loop goes round while calls are awaited, and calls can be given up."""

    area = "event loop"

    async def check_rounds(self, awaited: Awaitable[Any]) -> None:
        """Check that the loop went round before a call was answered."""
        async with Rounds() as rounds:
            await started(awaited)
        assert rounds.counted == rounds.enough

    async def test_the_loop_goes_on_during_achat(self) -> None:
        await self.check_rounds(self.make_llm().achat(user(SIX)))

    async def test_the_loop_goes_on_during_acomplete(self) -> None:
        await self.check_rounds(self.make_llm().acomplete(SIX))

    async def test_the_loop_goes_on_during_astream_chat(self) -> None:
        await self.check_rounds(self.make_llm().astream_chat(user(SIX)))

    async def test_the_loop_goes_on_during_astream_complete(self) -> None:
        await self.check_rounds(self.make_llm().astream_complete(SIX))

    async def test_the_loop_goes_on_during_prediction(self) -> None:
        await self.check_rounds(self.make_llm().apredict(PromptTemplate(SIX)))

    @needs("function_calling")
    async def test_the_loop_goes_on_during_achat_with_tools(self) -> None:
        llm: Any = self.make_llm()
        await self.check_rounds(llm.achat_with_tools(TOOLS, ADD, tool_required=True, **self.room))

    @needs("structured")
    async def test_the_loop_goes_on_during_structured_prediction(self) -> None:
        asked = self.make_llm().astructured_predict(Person, about(), llm_kwargs={**self.room}, who="Ann")
        await self.check_rounds(asked)

    async def check_cancelling(self, llm: Any, ask: Callable[[], Awaitable[Any]]) -> None:
        """Check that a call can be given up early and later, and that the LLM answers afterwards."""
        before = text_of(await llm.achat(user(HI)))
        for rounds in (1, 8):
            task = asyncio.create_task(started(ask()))
            for _ in range(rounds):
                await asyncio.sleep(0)
            if rounds == 1:
                assert not task.done()
            if task.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await task
            after = text_of(await llm.achat(user(HI)))
            assert after == before or not self.deterministic

    async def test_achat_can_be_cancelled(self) -> None:
        llm = self.make_llm()
        await self.check_cancelling(llm, lambda: llm.achat(user(SIX)))

    async def test_acomplete_can_be_cancelled(self) -> None:
        llm = self.make_llm()
        await self.check_cancelling(llm, lambda: llm.acomplete(SIX))

    async def test_astream_chat_can_be_cancelled(self) -> None:
        llm = self.make_llm()
        await self.check_cancelling(llm, lambda: llm.astream_chat(user(SIX)))

    async def test_a_timeout_ends_achat(self) -> None:
        llm = self.make_llm()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await llm.achat(user(SIX))
        assert isinstance(await llm.achat(user(HI)), ChatResponse)

    async def test_a_timeout_ends_astream_chat(self) -> None:
        llm = self.make_llm()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await drained(llm.astream_chat(user(SIX)))
        assert isinstance(await llm.achat(user(HI)), ChatResponse)
