"""Streams: text and delta, thinking apart, events of branches, leaving early; the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType, TokenCountingHandler
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index_support import FIVE, HI, SIX, Gate, Ticks, essence, listening, scripted, until, user

from llama_index.llms.rksc import RKSC
from rksc_agents import BestOfN, Branch, EngineError, PromptTooLongError, RKSCReasoner, SelfConsistency


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted() as made:
        yield made


@pytest.fixture
def llm(reasoner: RKSCReasoner) -> RKSC:
    return RKSC(reasoner=reasoner, strategy="direct", max_tokens=400)


async def collected(stream: Any) -> list[Any]:
    return [response async for response in await stream]


# -- text and delta -----------------------------------------------------------------------------


@pytest.mark.parametrize("question", [HI, SIX, "Think.", "Long?"])
@pytest.mark.parametrize("strategy", ["direct", FIVE])
async def test_a_stream_adds_up_to_the_answer(llm: RKSC, question: str, strategy: Any) -> None:
    whole = llm.chat(user(question), strategy=strategy)
    streams = [
        list(llm.stream_chat(user(question), strategy=strategy)),
        await collected(llm.astream_chat(user(question), strategy=strategy)),
    ]
    for responses in streams:
        assert essence(responses[-1]) == essence(whole)
        assert "".join(response.delta for response in responses) == whole.message.content
        text = ""
        for response in responses:
            text += response.delta
            assert (response.message.content or "") == text
        thought = "".join(response.additional_kwargs.get("thinking_delta", "") for response in responses)
        assert thought == whole.result.thinking
    assert essence(await llm.achat(user(question), strategy=strategy)) == essence(whole)


@pytest.mark.parametrize("strategy", ["direct", FIVE])
async def test_a_stream_of_a_text_adds_up(llm: RKSC, strategy: Any) -> None:
    whole = llm.complete(SIX, strategy=strategy)
    for responses in (
        list(llm.stream_complete(SIX, strategy=strategy)),
        await collected(llm.astream_complete(SIX, strategy=strategy)),
    ):
        assert essence(responses[-1]) == essence(whole)
        assert "".join(response.delta for response in responses) == whole.text
    assert essence(await llm.acomplete(SIX, strategy=strategy)) == essence(whole)


def test_direct_streams_tokens_and_several_branches_their_winner(llm: RKSC) -> None:
    assert len(list(llm.stream_complete(HI))) > 5
    assert [response.text for response in llm.stream_complete(HI, strategy=FIVE)] == ["Hello there."]


def test_thinking_is_a_block_of_its_own(llm: RKSC) -> None:
    response = llm.chat(user("Think."))
    assert [block.block_type for block in response.message.blocks] == ["thinking", "text"]
    assert response.message.blocks[0].content == "Hm, so."
    assert response.message.content == "It is 5."
    assert response.message.blocks[0].num_tokens == response.result.usage.completion_tokens_thinking > 0


def test_thinking_is_not_told_again(llm: RKSC, reasoner: RKSCReasoner) -> None:
    message = llm.chat(user("Think.")).message
    later = llm.chat([*user("Think."), message, *user(HI)])
    told = reasoner.count_prompt_tokens(
        [
            {"role": "user", "content": "Think."},
            {"role": "assistant", "content": "It is 5."},
            {"role": "user", "content": HI},
        ]
    )
    assert later.raw["usage"]["prompt_tokens"] == told


async def test_predict_and_stream(llm: RKSC) -> None:
    prompt = PromptTemplate("Say {what}.")
    assert llm.predict(prompt, what="hi") == await llm.apredict(prompt, what="hi") == "Hello there."
    assert "".join(llm.stream(prompt, what="hi")) == "Hello there."
    assert "".join([piece async for piece in await llm.astream(prompt, what="hi")]) == "Hello there."


# -- leaving ------------------------------------------------------------------------------------


def gave_up(reasoner: RKSCReasoner) -> bool:
    """Whether what ran was ended long before its 400 tokens, and nothing of it is left."""
    runner: Any = reasoner._engine.runner
    before = runner.passes
    ended = until(lambda: not reasoner._engine.inspect(lambda scheduler: scheduler.busy))
    reasoner.clear_cache()
    return ended and runner.passes - before < 100 and reasoner.kv_bytes == 0


async def test_leaving_a_stream_frees_its_rows(llm: RKSC, reasoner: RKSCReasoner) -> None:
    """Case 14."""
    for response in llm.stream_chat(user("Long?")):
        assert response.delta
        break
    assert gave_up(reasoner)
    stream = await llm.astream_chat(user("Long?"))
    await anext(stream)
    await stream.aclose()
    assert await asyncio.to_thread(gave_up, reasoner)
    async for _ in await llm.astream_complete("Long?"):
        break
    assert await asyncio.to_thread(gave_up, reasoner)
    assert llm.complete(HI).text == "Hello there."


@pytest.mark.parametrize("strategy", ["direct", FIVE])
async def test_cancelling_and_timeouts_free_their_rows(llm: RKSC, reasoner: RKSCReasoner, strategy: Any) -> None:
    for ask in (llm.achat(user("Long?"), strategy=strategy), drained(llm.astream_complete("Long?", strategy=strategy))):
        task = asyncio.create_task(ask)
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gave_up, reasoner)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await llm.achat(user("Long?"), strategy=strategy)
    assert await asyncio.to_thread(gave_up, reasoner)


# -- the event loop -----------------------------------------------------------------------------


async def test_the_event_loop_goes_on(reasoner: RKSCReasoner) -> None:
    """Case 2: the loop goes round while branches wait for a slow extractor, which only a tick lets go on."""
    for strategy in ("achat", "astream_chat", "acomplete"):
        gate = Gate()
        llm = RKSC(reasoner=reasoner, strategy=SelfConsistency(branches=2, stop=None, extract=gate), max_tokens=40)
        async with Ticks() as ticks:
            asked = SIX if strategy == "acomplete" else user(SIX)
            task = asyncio.create_task(drained(getattr(llm, strategy)(asked)))
            await asyncio.to_thread(gate.reached.wait, 20)
            before = ticks.count
            while ticks.count < before + 20:  # would never end if the call held the loop
                await asyncio.sleep(0.001)
            assert not task.done()
            gate.open.set()
            await task


async def drained(awaited: Any) -> None:
    found = await awaited
    if isinstance(found, AsyncIterator):
        async for _ in found:
            pass


# -- several at once ----------------------------------------------------------------------------


async def test_concurrent_calls_are_answered_each(llm: RKSC) -> None:
    """Cases 12 and 13."""
    answers = await asyncio.gather(*(llm.acomplete(f"Question {i}?") for i in range(16)))
    assert [answer.text for answer in answers] == [f"Answer {i}." for i in range(16)]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = llm.complete(f"Question {i}?").text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: f"Answer {i}." for i in range(8)}


def test_questions_at_once_run_as_one_batch(llm: RKSC, reasoner: RKSCReasoner) -> None:
    passes = reasoner._engine.inspect(lambda scheduler: scheduler.runner.passes)

    async def ask() -> list[Any]:
        return list(await asyncio.gather(*(llm.acomplete(f"Question {i}?") for i in range(10, 26))))

    answers = asyncio.run(ask())
    longest = max(answer.raw["usage"]["completion_tokens"] for answer in answers)
    assert reasoner._engine.inspect(lambda scheduler: scheduler.runner.passes) - passes <= 3 * longest


# -- events -------------------------------------------------------------------------------------


async def test_what_branches_do_is_told(llm: RKSC) -> None:
    strategy = BestOfN(branches=3, score="verifier", verifier=Liking())
    with listening() as sync:
        whole = llm.chat(user(SIX), strategy=strategy, exit="off")
    with listening() as streamed:
        list(llm.stream_chat(user(SIX), strategy=strategy, exit="off"))
    with listening() as awaited:
        await llm.achat(user(SIX), strategy=strategy, exit="off")
    with listening() as astreamed:
        await collected(llm.astream_chat(user(SIX), strategy=strategy, exit="off"))
    for listener in (sync, streamed, awaited, astreamed):
        ends = listener.of("rksc_branch_end")
        assert sorted(event.branch for event in ends) == [0, 1, 2]
        assert {event.answer for event in ends} <= {"42", "41"}
        verdicts = listener.of("rksc_branch_verified")
        scores = {event.branch: event.score for event in verdicts}
        assert scores == {i: branch.verdict.score for i, branch in enumerate(whole.result.branches)}
        start, end = listener.of("LLMChatStartEvent"), listener.of("LLMChatEndEvent")
        assert len(start) == len(end) == 1
        assert {event.span_id for event in (*ends, *verdicts)} == {start[0].span_id}
        names = listener.names()
        assert names.index("LLMChatStartEvent") < names.index("rksc_branch_end") < names.index("LLMChatEndEvent")


class Liking:
    """Finds 42 right."""

    name = "liking"

    async def verify(self, session: Any, claims: Any, exit_rule: Any) -> Any:
        from rksc_agents import Verdict

        return [Verdict(score=1.0 if claim.answer == "42" else 0.25) for claim in claims]


def test_votes_are_told(llm: RKSC) -> None:
    with listening() as listener:
        response = llm.chat(user(SIX), strategy=FIVE)
    votes = listener.of("rksc_votes")
    assert votes[-1].votes == response.raw["rksc"]["votes"]
    assert not listener.of("nothing")
    with listening() as quiet:
        llm.chat(user(SIX))
    assert not [name for name in quiet.names() if name.startswith("rksc")]


def test_a_failure_is_told(llm: RKSC) -> None:
    manager = CallbackManager([counter := TokenCountingHandler(tokenizer=llm.tokenizer)])
    llm = RKSC(reasoner=llm.reasoner, strategy="direct", callback_manager=manager)
    llm.complete(HI)
    assert counter.total_llm_token_count == llm.complete(HI).raw["usage"]["total_tokens"]
    with pytest.raises(EngineError):
        llm.complete("Nobody knows.")


def test_callbacks_hear_start_and_end(reasoner: RKSCReasoner) -> None:
    from llama_index.core.callbacks import LlamaDebugHandler

    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = RKSC(reasoner=reasoner, strategy="direct", callback_manager=CallbackManager([debug]), max_tokens=40)
    llm.chat(user(HI))
    list(llm.stream_chat(user(HI)))
    pairs = debug.get_event_pairs(CBEventType.LLM)
    assert [len(pair) for pair in pairs] == [2, 2]
    assert pairs[0][1].payload["response"].message.content == "Hello there."
    assert pairs[0][0].payload["serialized"]["model_name"] == "scripted"


# -- limits -------------------------------------------------------------------------------------


async def test_a_prompt_that_is_too_long_is_refused_before_the_run(llm: RKSC) -> None:
    """Case 23."""
    long = "word " * 2000
    for attempt in (lambda: llm.complete(long), lambda: list(llm.stream_complete(long))):
        with pytest.raises(PromptTooLongError, match=r"100\d\d.*4096"):
            attempt()
    with pytest.raises(PromptTooLongError):
        await llm.achat([ChatMessage(long)])


def test_the_prompt_is_not_echoed(llm: RKSC) -> None:
    """Case 7."""
    assert HI not in llm.complete(HI).text


def test_the_budget_bounds_the_answer(llm: RKSC) -> None:
    bounded = RKSC(reasoner=llm.reasoner, strategy="direct", max_tokens=7)
    response = bounded.complete("Long?")
    assert bounded.metadata.num_output == response.raw["usage"]["completion_tokens"] == len(response.text) == 7
    assert response.raw["finish_reason"] == "length"


def test_branches_are_there_in_the_result(llm: RKSC) -> None:
    response = llm.chat(user(SIX), strategy=FIVE)
    assert all(isinstance(branch, Branch) for branch in response.result.branches)
    assert len(response.result.branches) == 5
