"""Text in, text out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumpd, load
from langchain_support import HI, SIX, Recorder, scripted
from test_batch import ANSWERS, EIGHT, QUESTIONS, Held, few_passes

from langchain_rksc import RKSCLLM, ChatRKSC
from rksc_agents import ConfigError, PromptTooLongError, RKSCReasoner


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted(strategy="direct") as made:
        yield made


@pytest.fixture
def llm(reasoner: RKSCReasoner) -> RKSCLLM:
    return RKSCLLM(reasoner=reasoner)


def test_the_answer_alone(llm: RKSCLLM) -> None:
    assert llm.invoke(HI) == "Hello there."


async def test_every_way_to_ask_gives_the_same(llm: RKSCLLM) -> None:
    answers = [llm.invoke(question) for question in (HI, SIX)]
    assert llm.batch([HI, SIX]) == answers
    assert await llm.abatch([HI, SIX]) == answers
    assert [await llm.ainvoke(question) for question in (HI, SIX)] == answers
    assert ["".join(llm.stream(question)) for question in (HI, SIX)] == answers
    assert ["".join([piece async for piece in llm.astream(question)]) for question in (HI, SIX)] == answers


def test_it_answers_as_the_chat_model_does(llm: RKSCLLM, reasoner: RKSCReasoner) -> None:
    chat = ChatRKSC(reasoner=reasoner)
    for seed in range(5):
        assert llm.invoke(SIX, seed=seed) == chat.invoke(SIX, seed=seed).content


def test_several_prompts_and_answers_at_once(llm: RKSCLLM) -> None:
    result = llm.generate([HI, SIX], n=3)
    assert [len(answers) for answers in result.generations] == [3, 3]
    assert {answer.text for answer in result.generations[0]} == {"Hello there."}
    infos = [answers[0].generation_info for answers in result.generations]
    assert result.llm_output is not None
    for kind in ("input_tokens", "output_tokens"):
        each = [info["usage_metadata"][kind] for info in infos if info is not None]
        assert min(each) > 0
        assert result.llm_output["token_usage"][kind] == sum(each)


def test_what_a_call_says_beats_the_constructor(reasoner: RKSCReasoner) -> None:
    llm = RKSCLLM(reasoner=reasoner, stop=["there"], max_tokens=40)
    assert llm.invoke(HI) == "Hello "
    assert llm.invoke(HI, stop=["lo"]) == "Hel"
    assert llm.invoke(HI, max_tokens=2) == "He"
    with pytest.raises(ConfigError, match="temprature"):
        llm.invoke(HI, temprature=1)


def test_what_has_no_place_in_a_text_is_refused(llm: RKSCLLM, reasoner: RKSCReasoner) -> None:
    tool = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    with pytest.raises(ConfigError, match="tools"):
        llm.invoke(HI, tools=[tool])
    for name in ("streaming", "stream_reasoning"):
        with pytest.raises(ConfigError, match=name):
            RKSCLLM(reasoner=reasoner, **{name: True})
    with pytest.raises(ConfigError, match="several answers are not streamed"):
        list(llm.stream(HI, n=2))


def test_thinking_is_no_text(llm: RKSCLLM) -> None:
    assert llm.invoke("Think.") == "It is 5."
    recorder = Recorder()
    assert "".join(llm.stream("Think.", config={"callbacks": [recorder]})) == "It is 5."
    assert "".join(recorder.tokens) == "It is 5."
    assert "" not in recorder.tokens[:-1]


def test_many_texts_are_one_batch_of_the_engine(reasoner: RKSCReasoner) -> None:
    held = Held(reasoner, 16)
    assert RKSCLLM(reasoner=reasoner, strategy=EIGHT).batch(QUESTIONS) == ANSWERS
    assert few_passes(held)


async def test_so_are_they_asynchronously(reasoner: RKSCReasoner) -> None:
    held = Held(reasoner, 16)
    assert await RKSCLLM(reasoner=reasoner, strategy=EIGHT).abatch(QUESTIONS) == ANSWERS
    assert few_passes(held)


async def test_an_error_is_the_cores_own(llm: RKSCLLM) -> None:
    with pytest.raises(PromptTooLongError):
        llm.generate([HI, "x" * 5000])
    with pytest.raises(PromptTooLongError):
        await llm.agenerate([HI, "x" * 5000])


async def test_the_cache_tells_calls_apart(reasoner: RKSCReasoner) -> None:
    """Case 28: all that an answer depends on is in the key, from the constructor and from the call."""
    cache = InMemoryCache()
    llm = RKSCLLM(reasoner=reasoner, cache=cache)
    settings: list[dict[str, Any]] = [
        {}, {"temperature": 0.1}, {"temperature": 0.9}, {"seed": 4}, {"stop": ["there"]}, {"max_tokens": 4}, {"n": 2},
        {"strategy": "self-consistency"}, {"strategy": {"name": "self-consistency", "branches": 3}},
        {"logprobs": True},
    ]  # fmt: skip
    for given in settings:
        llm.invoke(HI, **given)
        await llm.ainvoke(HI, **given)
    assert len(cache._cache) == len(settings)
    stopped = RKSCLLM(reasoner=reasoner, cache=cache, stop=["lo"])
    assert stopped.invoke(HI) == "Hel"
    assert llm.invoke(HI) == "Hello there."
    assert len(cache._cache) == len(settings) + 1


def test_a_vote_underneath(reasoner: RKSCReasoner) -> None:
    result = RKSCLLM(reasoner=reasoner, strategy={"name": "self-consistency", "branches": 8}).generate([SIX])
    info = result.generations[0][0].generation_info
    assert info is not None
    assert info["rksc"]["strategy"] == "self-consistency"
    assert info["rksc"]["votes"][0]["answer"] in ("42", "41")


async def test_tokens_reach_the_handlers(llm: RKSCLLM) -> None:
    recorder = Recorder()
    pieces = list(llm.stream(HI, config={"callbacks": [recorder]}))
    assert "".join(recorder.tokens) == "".join(pieces) == "Hello there."
    recorder = Recorder()
    assert "".join([piece async for piece in llm.astream(HI, config={"callbacks": [recorder]})]) == "Hello there."
    assert "".join(recorder.tokens) == "Hello there."


def test_the_last_piece_tells_what_a_whole_answer_tells(llm: RKSCLLM) -> None:
    *_, last = llm._stream(HI)
    whole = llm.generate([HI]).generations[0][0].generation_info
    assert last.generation_info is not None
    assert whole is not None
    for info in (last.generation_info, whole):
        assert (info["model_name"], info["finish_reason"]) == ("scripted", "stop")
        assert info["usage_metadata"]["output_tokens"] == len("Hello there.") + 1


def test_a_stream_that_is_left_frees_its_rows(llm: RKSCLLM, reasoner: RKSCReasoner) -> None:
    stream = llm.stream("Long?", max_tokens=300)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.invoke(HI) == "Hello there."
    reasoner.clear_cache()
    assert reasoner.kv_bytes == 0


async def test_so_does_an_asynchronous_one(llm: RKSCLLM, reasoner: RKSCReasoner) -> None:
    stream = llm.astream("Long?", max_tokens=300)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert await llm.ainvoke(HI) == "Hello there."
    reasoner.clear_cache()
    assert reasoner.kv_bytes == 0


def test_its_own_tokenizer_counts(llm: RKSCLLM) -> None:
    assert llm.get_token_ids("abc") == [97 - 33, 98 - 33, 99 - 33]
    assert llm.get_num_tokens("abcd") == 4
    counted = llm.model_copy(update={"custom_get_token_ids": lambda text: [len(text)]})
    assert counted.get_token_ids("abcd") == [4]


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
def test_what_is_written_down(llm: RKSCLLM) -> None:
    assert llm._llm_type == "rksc"
    assert llm.get_lc_namespace() == ["langchain_rksc", "llms"]
    written = dumpd(RKSCLLM(strategy="direct", temperature=0.3))
    assert written["id"] == ["langchain_rksc", "llms", "RKSCLLM"]
    assert written["kwargs"]["temperature"] == 0.3
    assert "reasoner" not in str(written["kwargs"])
    read = load(written, valid_namespaces=["langchain_rksc"], allowed_objects=[RKSCLLM])
    assert isinstance(read, RKSCLLM)
    assert (read.strategy, read.temperature) == ("direct", 0.3)
    assert llm._get_ls_params(stop=["x"]) == {
        "ls_provider": "rksc", "ls_model_name": "scripted", "ls_model_type": "llm", "ls_stop": ["x"]
    }  # fmt: skip
    assert RKSCLLM(temperature=0.1)._identifying_params != RKSCLLM(temperature=0.9)._identifying_params
