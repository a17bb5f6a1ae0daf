"""Streams: tokens, progress, several branches, and what is left when one stops listening."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.messages import AIMessageChunk, message_chunk_to_message
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_support import HI, SIX, AsyncRecorder, Recorder, added, essence, scripted, until

from langchain_rksc import ChatRKSC
from langchain_rksc.events import Progress
from rksc_agents import ConfigError, RKSCReasoner, SelfConsistency
from rksc_agents.adapter.progress import Grown

THREE = SelfConsistency(branches=3, stop=None)
CASES = [
    (HI, {"strategy": "direct"}),
    (SIX, {"strategy": THREE}),
    (SIX, {"strategy": "best-of-n", "logprobs": True}),
    (SIX, {"strategy": {"name": "tree-of-thought", "evaluator": "confidence"}, "max_tokens": 40}),
    ("Think.", {"strategy": "direct", "max_tokens": 60}),
    ("Think.", {"strategy": THREE, "max_tokens": 60}),
    ("Think.", {"strategy": THREE, "max_tokens": 60, "stream_reasoning": True}),
    ("Think.", {"strategy": "direct", "max_tokens": 60, "stream_reasoning": True}),
    (SIX, {"strategy": THREE, "stream_reasoning": True, "stop": [" is"]}),
    ("Long?", {"strategy": "direct", "max_tokens": 7, "logprobs": True}),
]


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted() as made:
        yield made


@pytest.fixture
def chat(reasoner: RKSCReasoner) -> ChatRKSC:
    return ChatRKSC(reasoner=reasoner, max_tokens=20)


# -- chunks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("question", "options"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
async def test_chunks_add_up_to_the_message(chat: ChatRKSC, question: str, options: Any, seed: int) -> None:
    options = {**options, "seed": seed}
    message = chat.invoke(question, **options)
    streamed = added(chat.stream(question, **options))
    assert essence(streamed) == essence(message)
    assert essence(message_chunk_to_message(streamed)) == essence(message)
    assert essence(await chat.ainvoke(question, **options)) == essence(message)
    assert essence(added([chunk async for chunk in chat.astream(question, **options)])) == essence(message)


def test_direct_streams_tokens(chat: ChatRKSC) -> None:
    chunks = list(chat.stream(HI, strategy="direct"))
    assert [chunk.content for chunk in chunks] == [*"Hello", " t", *"here.", ""]
    assert [chunk.chunk_position for chunk in chunks] == [None] * 11 + ["last"]
    assert all(chunk.usage_metadata is None and not chunk.response_metadata for chunk in chunks[:-1])


def test_thinking_streams_before_the_answer(chat: ChatRKSC) -> None:
    chunks = list(chat.stream("Think.", strategy="direct", max_tokens=60))
    kinds = [block["type"] for chunk in chunks for block in chunk.content_blocks]
    assert kinds == sorted(kinds)
    assert kinds.count("reasoning") > 3
    assert kinds.count("text") > 3


def test_several_branches_bring_the_winner_at_the_end(chat: ChatRKSC) -> None:
    chunks = list(chat.stream(SIX, strategy=THREE))
    assert [chunk.content for chunk in chunks] == [chat.invoke(SIX, strategy=THREE).content, ""]


def test_reasoning_is_streamed_by_branch(chat: ChatRKSC, reasoner: RKSCReasoner) -> None:
    chunks = list(chat.stream(SIX, strategy=THREE, stream_reasoning=True))
    result = reasoner.reason(SIX, strategy=THREE, max_tokens=20)
    *branches, answer = added(chunks).content
    assert [block["extras"]["branch"] for block in branches] == [0, 1, 2]
    assert [block["reasoning"] for block in branches] == [branch.text for branch in result.branches]
    assert answer["text"] == result.text
    order = [chunk.content[0]["index"] for chunk in chunks if chunk.content]
    assert order[:4] != sorted(order[:4])  # the branches grow together
    assert order[-1] == 3


def test_a_thinking_branch_shows_both(chat: ChatRKSC) -> None:
    content = added(chat.stream("Think.", strategy=THREE, max_tokens=60, stream_reasoning=True)).content
    assert content[0]["reasoning"] == "Hm, so.\n\nIt is 5."


def test_usage_can_be_left_out(chat: ChatRKSC) -> None:
    assert added(chat.stream(HI, stream_usage=False)).usage_metadata is None


def test_several_answers_are_not_streamed(chat: ChatRKSC) -> None:
    assert [chunk.content for chunk in chat.stream(SIX, n=2, strategy="direct")] == ["It is 42."]
    with pytest.raises(ConfigError, match="n = 2: several answers are not streamed"):
        list(chat._stream([], n=2))


@given(st.lists(st.text(alphabet="ab \n", max_size=4), max_size=8), st.booleans())
def test_a_growing_text_adds_up(pieces: list[str], trimmed: bool) -> None:
    grown, whole = Grown(), "".join(pieces)
    whole = whole.rstrip() if trimmed else whole
    assert "".join([grown.push(piece) for piece in pieces]) + grown.rest(whole) == whole


# -- callbacks ----------------------------------------------------------------------------------

Ways = ["invoke", "stream", "ainvoke", "astream", "chain"]


async def ask(chat: Any, way: str, question: str, config: Any, **options: Any) -> None:
    match way:
        case "invoke":
            chat.invoke(question, config, **options)
        case "stream":
            list(chat.stream(question, config, **options))
        case "ainvoke":
            await chat.ainvoke(question, config, **options)
        case "astream":
            [chunk async for chunk in chat.astream(question, config, **options)]
        case _:
            chain = ChatPromptTemplate.from_template("{q}") | chat.bind(**options)
            [chunk async for chunk in chain.astream({"q": question}, config)]


@pytest.mark.parametrize("way", Ways)
async def test_progress_comes_under_the_one_run(chat: ChatRKSC, way: str) -> None:
    recorder, other = Recorder(), AsyncRecorder()
    await ask(chat, way, SIX, {"callbacks": [recorder, other]}, strategy=THREE)
    assert len(recorder.starts) == len(recorder.ends) == 1
    assert {run_id for _, _, run_id in recorder.custom} == {recorder.starts[0]}
    names = [name for name, _, _ in recorder.custom]
    assert names.count("rksc_branch_end") == 3
    assert names.count("rksc_votes") == 3
    assert other.custom == recorder.custom
    ends = [data for name, data, _ in recorder.custom if name == "rksc_branch_end"]
    assert {end["branch"] for end in ends} == {0, 1, 2}
    assert all(end["text"] == f"It is {end['answer']}." and end["finish_reason"] == "eos" for end in ends)
    last = [data for name, data, _ in recorder.custom if name == "rksc_votes"][-1]
    assert sum(vote["weight"] for vote in last["votes"]) == 3


async def test_handlers_that_do_not_listen_are_left_alone(chat: ChatRKSC) -> None:
    class Deaf(Recorder):
        ignore_custom_event = True

    deaf, silent = Deaf(), BaseCallbackHandler()
    for way in Ways:
        await ask(chat, way, SIX, {"callbacks": [deaf, silent]}, strategy=THREE)
    assert len(deaf.starts) == len(Ways)
    assert deaf.custom == []
    assert Progress(uuid4(), [silent, Recorder(), AsyncCallbackHandler()]).listeners[0].__class__ is Recorder


async def test_a_run_id_of_the_config_holds(chat: ChatRKSC) -> None:
    for way in ("invoke", "stream", "astream"):
        recorder, run_id = Recorder(), uuid4()
        await ask(chat, way, SIX, {"callbacks": [recorder], "run_id": run_id}, strategy=THREE)
        assert recorder.starts == [run_id]
        assert {told for _, _, told in recorder.custom} == {run_id}


@pytest.mark.parametrize("way", Ways)
async def test_a_constructors_handler_hears_each_event_once(reasoner: RKSCReasoner, way: str) -> None:
    recorder = Recorder()
    chat = ChatRKSC(reasoner=reasoner, max_tokens=20, callbacks=[recorder])
    await ask(chat, way, SIX, None, strategy=THREE)
    assert [name for name, _, _ in recorder.custom].count("rksc_branch_end") == 3
    assert {run_id for _, _, run_id in recorder.custom} == set(recorder.starts)
    assert len(recorder.starts) == len(recorder.ends) == 1


@pytest.mark.parametrize("way", ["stream", "astream"])
async def test_verdicts_are_told(chat: ChatRKSC, way: str) -> None:
    from rksc_agents import BestOfN, CallableVerifier

    checked = BestOfN(branches=3, score="verifier", verifier=CallableVerifier(lambda claim: claim.answer == "42"))
    recorder = Recorder()
    await ask(chat, way, SIX, {"callbacks": [recorder]}, strategy=checked)
    told = {data["branch"]: data["score"] for name, data, _ in recorder.custom if name == "rksc_branch_verified"}
    texts = {data["branch"]: data["text"] for name, data, _ in recorder.custom if name == "rksc_branch_end"}
    assert told == {branch: float(text == "It is 42.") for branch, text in texts.items()}


@pytest.mark.parametrize("way", Ways)
async def test_a_direct_answer_has_tokens_and_no_progress(chat: ChatRKSC, way: str) -> None:
    recorder = Recorder()
    await ask(chat, way, HI, {"callbacks": [recorder]}, strategy="direct")
    assert recorder.custom == []
    assert "".join(recorder.tokens) == ("" if way in ("invoke", "ainvoke") else "Hello there.")
    assert len(recorder.starts) == 1


def test_the_private_stream_tells_its_run_manager(chat: ChatRKSC) -> None:
    from langchain_core.callbacks import CallbackManagerForLLMRun
    from langchain_core.messages import HumanMessage

    recorder = Recorder()
    manager = CallbackManagerForLLMRun(run_id=uuid4(), handlers=[recorder], inheritable_handlers=[])
    list(chat._stream([HumanMessage(HI)], run_manager=manager, strategy="direct"))
    assert "".join(recorder.tokens) == "Hello there."


async def test_stream_events(chat: ChatRKSC) -> None:
    chain = ChatPromptTemplate.from_template("{q}") | chat.bind(strategy=THREE)
    events = [event async for event in chain.astream_events({"q": SIX}, version="v2")]
    starts = [event for event in events if event["event"] == "on_chat_model_start"]
    customs = [event for event in events if event["event"] == "on_custom_event"]
    assert len(starts) == 1
    assert [event["name"] for event in customs].count("rksc_branch_end") == 3
    assert {event["run_id"] for event in customs} == {starts[0]["run_id"]}
    assert [event["event"] for event in events].count("on_chat_model_end") == 1


async def test_stream_events_of_a_model_that_a_function_invokes(chat: ChatRKSC) -> None:
    """As agents do: the call is an `ainvoke`, and the listener wants tokens."""

    async def node(question: str) -> str:
        return (await chat.ainvoke(question, strategy=THREE)).text

    events = [event async for event in RunnableLambda(node).astream_events(SIX, version="v2")]
    kinds = [event["event"] for event in events]
    assert kinds.count("on_chat_model_start") == 1
    assert kinds.count("on_chat_model_stream") >= 2
    assert [event["name"] for event in events].count("rksc_branch_end") == 3


def test_usage_is_counted_once(chat: ChatRKSC) -> None:
    with get_usage_metadata_callback() as counted:
        message = chat.invoke(SIX, strategy=THREE)
        list(chat.stream(HI, strategy="direct"))
    assert message.usage_metadata is not None
    assert counted.usage_metadata["scripted"]["output_tokens"] == message.usage_metadata["output_tokens"] + 13


def test_an_error_reaches_the_handlers_unchanged(chat: ChatRKSC) -> None:
    recorder = Recorder()
    with pytest.raises(ConfigError, match="strategy = 'vote'") as raised:
        list(chat.stream(HI, {"callbacks": [recorder]}, strategy="vote"))
    assert recorder.errors == [raised.value]


# -- giving up ----------------------------------------------------------------------------------


def gave_up(reasoner: RKSCReasoner) -> bool:
    """Whether what ran was ended long before its 400 tokens, and nothing of it is left."""
    runner: Any = reasoner._engine.runner
    before = runner.passes
    ended = until(lambda: not reasoner._engine.inspect(lambda scheduler: scheduler.busy))
    reasoner.clear_cache()
    return ended and runner.passes - before < 100 and reasoner.kv_bytes == 0


@pytest.mark.parametrize("strategy", ["direct", THREE])
async def test_leaving_a_stream_frees_its_rows(reasoner: RKSCReasoner, strategy: Any) -> None:
    """Case 14."""
    chat = ChatRKSC(reasoner=reasoner, max_tokens=400, strategy=strategy, stream_reasoning=True)
    for _ in chat.stream("Long?"):
        break
    assert gave_up(reasoner)
    async with aclosing(chat.astream("Long?")) as stream:
        async for _ in stream:
            break
    assert await asyncio.to_thread(gave_up, reasoner)
    async for _ in chat.astream("Long?"):
        break
    assert await asyncio.to_thread(gave_up, reasoner)


@pytest.mark.parametrize("strategy", ["direct", THREE])
async def test_cancelling_frees_its_rows(reasoner: RKSCReasoner, strategy: Any) -> None:
    chat = ChatRKSC(reasoner=reasoner, max_tokens=400, strategy=strategy)
    for options in ({}, {"n": 3}):
        task = asyncio.create_task(chat.ainvoke("Long?", **options))
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gave_up, reasoner)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await chat.ainvoke("Long?")
    assert await asyncio.to_thread(gave_up, reasoner)


async def chunks_of(stream: AsyncIterator[AIMessageChunk]) -> list[AIMessageChunk]:
    return [chunk async for chunk in stream]


async def test_streams_at_the_same_time(chat: ChatRKSC) -> None:
    """Each stream has its own answer and its own run."""
    recorders = [Recorder() for _ in range(10)]
    streams = [
        chunks_of(chat.astream(f"Question {i}?", {"callbacks": [recorders[i]]}, strategy=THREE)) for i in range(10)
    ]
    found = [added(chunks).content for chunks in await asyncio.gather(*streams)]
    assert found == [f"Answer {i}." for i in range(10)]
    assert all(len(recorder.custom) == 6 for recorder in recorders)
