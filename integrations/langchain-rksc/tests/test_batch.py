"""Many questions at once: one batch of the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_support import HI, Recorder, scripted

from langchain_rksc import ChatRKSC
from rksc_agents import ConfigError, PromptTooLongError, RKSCReasoner, SelfConsistency

EIGHT = SelfConsistency(branches=8, stop=None)
QUESTIONS = [f"Question {i}?" for i in range(16)]
ANSWERS = [f"Answer {i}." for i in range(16)]
LONGEST = 11 + 1  # "Answer 10." and what ends it, with the prefill's pass


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted() as made:
        yield made


@pytest.fixture
def chat(reasoner: RKSCReasoner) -> ChatRKSC:
    return ChatRKSC(reasoner=reasoner, max_tokens=20, strategy=EIGHT)


class Held:
    """Holds the engine until enough requests wait for it, so that a count of passes does not depend on the clock."""

    def __init__(self, reasoner: RKSCReasoner, requests: int) -> None:
        self.runner: Any = reasoner._engine.runner
        self.submitted = 0
        self._enough = threading.Event()
        engine = reasoner._engine
        submit, forward = engine.submit, self.runner.forward

        def counted(solve: Any) -> Any:
            future = submit(solve)
            self.submitted += 1
            if self.submitted == requests:
                self._enough.set()
            return future

        def held(runs: Any) -> Any:
            assert self._enough.wait(30), f"{self.submitted} of {requests} requests were submitted at once"
            return forward(runs)

        engine.submit = counted
        self.runner.forward = held


def few_passes(held: Held) -> bool:
    """Less than 1.3 times the passes of the longest row, beside the first prefill, which ran alone."""
    return bool(held.runner.passes - 1 < 1.3 * LONGEST)


def test_a_batch_of_a_chain_is_one_batch_of_the_engine(chat: ChatRKSC, reasoner: RKSCReasoner) -> None:
    held = Held(reasoner, 16)
    chain = ChatPromptTemplate.from_template("{q}") | chat | StrOutputParser()
    assert chain.batch([{"q": question} for question in QUESTIONS]) == ANSWERS
    assert few_passes(held)


@pytest.mark.parametrize("way", ["batch", "abatch", "as_completed", "generate", "agenerate", "agenerate_prompt"])
async def test_all_ways_ask_at_once(chat: ChatRKSC, reasoner: RKSCReasoner, way: str) -> None:
    held = Held(reasoner, 16)
    messages = [[HumanMessage(question)] for question in QUESTIONS]
    match way:
        case "batch":
            found = [message.content for message in await asyncio.to_thread(chat.batch, QUESTIONS)]
        case "abatch":
            found = [message.content for message in await chat.abatch(QUESTIONS)]
        case "as_completed":
            pairs = await asyncio.to_thread(lambda: dict(chat.batch_as_completed(QUESTIONS)))
            found = [pairs[i].content for i in range(16)]
        case "generate":
            result = await asyncio.to_thread(chat.generate, messages)
            found = [answers[0].text for answers in result.generations]
        case _:
            found = [answers[0].text for answers in (await chat.agenerate(messages)).generations]
    assert found == ANSWERS
    assert few_passes(held)


def test_max_concurrency_holds(chat: ChatRKSC, reasoner: RKSCReasoner) -> None:
    running, most, lock = 0, 0, threading.Lock()
    reason = reasoner.reason

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return reason(*args, **options)
        finally:
            with lock:
                running -= 1

    reasoner.reason = counted
    chat.batch(QUESTIONS, {"max_concurrency": 2})
    assert most <= 2
    chat.batch(QUESTIONS, [{"max_concurrency": 2}] * 16)
    assert most <= 2


def test_config_and_callbacks_of_each_question(chat: ChatRKSC) -> None:
    recorders = [Recorder() for _ in range(4)]
    runs = [uuid4() for _ in range(4)]
    configs: list[Any] = [
        {"callbacks": [recorder], "run_id": run} for recorder, run in zip(recorders, runs, strict=True)
    ]
    chat.batch(QUESTIONS[:4], configs)
    assert [recorder.starts for recorder in recorders] == [[run] for run in runs]
    assert all({run_id for _, _, run_id in rec.custom} == {run} for rec, run in zip(recorders, runs, strict=True))


def test_generate_tells_one_run_for_each(chat: ChatRKSC) -> None:
    recorder, first = Recorder(), uuid4()
    messages = [[HumanMessage(question)] for question in QUESTIONS[:3]]
    result = chat.generate(messages, callbacks=[recorder], run_id=first)
    assert result.run is not None
    assert result.run[0].run_id == first
    assert sorted(map(str, recorder.starts)) == sorted(str(run.run_id) for run in result.run)
    assert len(recorder.starts) == len(recorder.ends) == 3
    assert chat.generate([]).generations == []


async def test_errors_in_a_batch(chat: ChatRKSC) -> None:
    questions = [HI, "x" * 5000, HI]
    for found in (
        chat.batch(questions, return_exceptions=True),
        await chat.abatch(questions, return_exceptions=True),
    ):
        assert [getattr(answer, "content", None) for answer in found] == ["Hello there.", None, "Hello there."]
        assert isinstance(found[1], PromptTooLongError)
    with pytest.raises(PromptTooLongError):
        chat.batch(questions)
    with pytest.raises(PromptTooLongError):
        chat.generate([[HumanMessage(question)] for question in questions])
    with pytest.raises(ConfigError):
        await chat.abatch(questions, beams=3)


def test_many_threads(chat: ChatRKSC) -> None:
    """Cases 12 and 13, seen from here."""
    found: dict[int, Any] = {}

    def ask(index: int) -> None:
        found[index] = chat.invoke(QUESTIONS[index]).content

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(8)] == ANSWERS[:8]


async def test_many_tasks_and_a_heartbeat(chat: ChatRKSC) -> None:
    """Case 2: calls never block the loop, which goes round many times while they run."""
    beats = 0

    async def heart() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    beating = asyncio.create_task(heart())
    found = await asyncio.gather(*(chat.ainvoke(QUESTIONS[i % 16]) for i in range(20)))
    beating.cancel()
    assert [message.content for message in found] == [ANSWERS[i % 16] for i in range(20)]
    assert beats > 100


async def test_the_rate_limiter_of_langchain(reasoner: RKSCReasoner) -> None:
    class Counting(InMemoryRateLimiter):
        taken = 0

        def acquire(self, *, blocking: bool = True) -> bool:
            self.taken += 1
            return True

        async def aacquire(self, *, blocking: bool = True) -> bool:
            self.taken += 1
            return True

    limiter = Counting()
    chat = ChatRKSC(reasoner=reasoner, max_tokens=20, strategy="direct", rate_limiter=limiter)
    chat.invoke(HI)
    await chat.ainvoke(HI)
    list(chat.stream(HI))
    chat.batch([HI, HI])
    assert limiter.taken == 5
