"""`ChatRKSC` on a scripted model: construction, what a call may change, and what a message tells."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_support import HI, SIX, scripted

from langchain_rksc import ChatRKSC
from rksc_agents import (
    BestOfN,
    ConfigError,
    Direct,
    EngineClosedError,
    EngineConfig,
    ModelLoadError,
    PromptTooLongError,
    RKSCReasoner,
    SelfConsistency,
    Sharing,
)
from rksc_agents.config import DEFAULT_MODEL

THREE = SelfConsistency(branches=3, stop=None)


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted() as made:
        yield made


@pytest.fixture
def chat(reasoner: RKSCReasoner) -> ChatRKSC:
    return ChatRKSC(reasoner=reasoner, max_tokens=20)


# -- construction -------------------------------------------------------------------------------


def test_construction_loads_nothing() -> None:
    code = (
        "import sys; from langchain_rksc import ChatRKSC; chat = ChatRKSC(strategy='direct', temperature=0.0);"
        "chat.bind_tools([]); repr(chat); assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_the_default_model_is_the_cores() -> None:
    assert ChatRKSC().model == DEFAULT_MODEL


@pytest.mark.parametrize("name", ["api_key", "timeout", "temprature"])
def test_an_unknown_argument_raises_and_names_the_known(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"ChatRKSC has no argument '{name}'; it takes .*temperature.*, reasoner"):
        ChatRKSC(**{name: 1})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"n": 0}, "n = 0"),
        ({"sharing": {"mode": "all"}}, "mode"),
        ({"engine": {"rows": 3}}, "rows"),
        ({"engine": 3}, "engine = 3"),
    ],
)
def test_a_value_outside_its_range_raises_at_construction(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ChatRKSC(**arguments)


def test_aliases() -> None:
    chat = ChatRKSC(model_name="a/b", stop_sequences="###")
    assert (chat.model, chat.stop) == ("a/b", ["###"])


def test_an_injected_reasoner_names_the_model_and_takes_no_loading(reasoner: RKSCReasoner) -> None:
    chat = ChatRKSC(reasoner=reasoner)
    assert chat.model == "scripted"
    assert chat.reasoner is reasoner
    assert "reasoner" not in repr(chat)
    with pytest.raises(ConfigError, match="leave model out"):
        ChatRKSC(reasoner=reasoner, model="other")
    with pytest.raises(ConfigError, match="load_kwargs"):
        ChatRKSC(reasoner=reasoner, load_kwargs={"dtype": "float32"})


def test_copies_share_one_engine(reasoner: RKSCReasoner) -> None:
    chat = ChatRKSC(reasoner=reasoner)
    assert chat.model_copy(update={"temperature": 0.3}).reasoner is reasoner
    assert chat.model_copy(deep=True).reasoner is reasoner
    assert chat.model_copy(update={"model": "a/b"})._engine.injected is None
    lazy = ChatRKSC(model="a/b")
    assert lazy.model_copy(update={"temperature": 0.3})._engine is lazy._engine
    assert lazy.model_copy(update={"model": "c/d"})._engine is not lazy._engine


def test_configured_fields_keep_the_engine(reasoner: RKSCReasoner) -> None:
    from langchain_core.runnables import ConfigurableField

    chat = ChatRKSC(reasoner=reasoner, strategy="direct").configurable_fields(max_tokens=ConfigurableField(id="most"))
    assert chat.with_config(configurable={"most": 5}).invoke(HI).content == "Hello"


def test_loading_happens_once_with_what_was_given(monkeypatch: pytest.MonkeyPatch, reasoner: RKSCReasoner) -> None:
    """Case 20: what places or quantizes a model is passed on untouched."""
    seen: list[dict[str, Any]] = []

    def load(model: str, **kwargs: Any) -> RKSCReasoner:
        seen.append({"model": model, **kwargs})
        return reasoner

    monkeypatch.setattr(RKSCReasoner, "from_pretrained", load)
    quantization = object()
    given = {"device_map": "auto", "quantization_config": quantization, "revision": "main", "gguf_file": "x.gguf"}
    chat = ChatRKSC(model="a/b", load_kwargs=given, engine={"max_rows": 8}, max_tokens=20)
    chat.batch([HI] * 4)
    chat.bind(temperature=0.0).invoke(HI)
    assert seen == [{"model": "a/b", "engine": EngineConfig(max_rows=8), **given}]
    assert seen[0]["quantization_config"] is quantization
    assert chat.profile is not None
    assert chat.profile["max_input_tokens"] == 4096


async def test_many_tasks_load_once(monkeypatch: pytest.MonkeyPatch, reasoner: RKSCReasoner) -> None:
    loads, ready = [], threading.Event()

    def load(*_: Any, **__: Any) -> RKSCReasoner:
        loads.append(1)
        assert ready.wait(20)
        return reasoner

    monkeypatch.setattr(RKSCReasoner, "from_pretrained", load)
    chat = ChatRKSC(max_tokens=20, strategy="direct")
    first, *others = [asyncio.create_task(chat.ainvoke(HI)) for _ in range(20)]
    while not loads:
        await asyncio.sleep(0)
    first.cancel()  # one that gives up does not take the model from the others
    with pytest.raises(asyncio.CancelledError):
        await first
    ready.set()
    assert {message.content for message in await asyncio.gather(*others)} == {"Hello there."}
    assert len(loads) == 1


def test_a_failed_load_raises_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reasoner: RKSCReasoner
) -> None:
    chat = ChatRKSC(model=str(tmp_path / "none"), max_tokens=20)
    with pytest.raises(ModelLoadError, match="there is no"):
        chat.invoke(HI)
    monkeypatch.setattr(RKSCReasoner, "from_pretrained", lambda *_, **__: reasoner)
    assert chat.invoke(HI).content == "Hello there."


def test_close_closes_what_was_loaded_here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted() as injected:
        ChatRKSC(reasoner=injected).close()
        assert ChatRKSC(reasoner=injected, max_tokens=20).invoke(HI).content == "Hello there."
    with scripted() as loaded:
        monkeypatch.setattr(RKSCReasoner, "from_pretrained", lambda *_, **__: loaded)
        chat = ChatRKSC(max_tokens=20)
        chat.invoke(HI)
        chat.close()
        chat.close()
        with pytest.raises(EngineClosedError):
            chat.invoke(HI)
        with pytest.raises(EngineClosedError):
            loaded.reason(HI)
    unused = ChatRKSC()
    unused.close()
    with pytest.raises(EngineClosedError):
        unused.invoke(HI)


# -- what a call may change ---------------------------------------------------------------------


def test_a_call_beats_the_constructor(chat: ChatRKSC) -> None:
    """Case 21."""
    assert chat.invoke(HI, max_tokens=5).content == "Hello"
    assert chat.invoke(HI).content == "Hello there."
    assert chat.bind(max_tokens=5).invoke(HI).content == "Hello"
    assert chat.bind(max_tokens=5).invoke(HI, max_tokens=3).content == "Hel"
    assert chat.invoke(HI, max_tokens=None).content == "Hello there."


@pytest.mark.parametrize("strategy", ["direct", Direct(), {"name": "direct"}])
def test_a_strategy_by_name_object_or_settings(chat: ChatRKSC, strategy: Any) -> None:
    record = chat.invoke(HI, strategy=strategy).response_metadata["rksc"]
    assert (record["strategy"], record["branches"]) == ("direct", 1)


def test_a_strategys_settings(chat: ChatRKSC) -> None:
    for given in (THREE, {"name": "self-consistency", "branches": 3, "stop": None}):
        assert chat.invoke(SIX, strategy=given).response_metadata["rksc"]["branches"] == 3
    with pytest.raises(ConfigError, match="'name', one of"):
        chat.invoke(HI, strategy={"branches": 3})
    with pytest.raises(ConfigError, match="brnches"):
        chat.invoke(HI, strategy={"name": "self-consistency", "brnches": 3})
    with pytest.raises(ConfigError, match="strategy = 'vote'"):
        chat.invoke(HI, strategy="vote")


def test_temperature_zero_is_greedy(chat: ChatRKSC) -> None:
    """Case 21: the likeliest answer, whatever the seed."""
    answers = {chat.invoke(SIX, temperature=0, strategy="direct", seed=seed).content for seed in range(8)}
    assert answers == {"It is 42."}
    sampled = {chat.invoke(SIX, strategy="direct", seed=seed).content for seed in range(8)}
    assert sampled == {"It is 42.", "It is 41."}


@pytest.mark.parametrize("where", ["constructor", "call", "bind"])
def test_stop_texts(reasoner: RKSCReasoner, where: str) -> None:
    """Case 8: honoured and stripped."""
    chat = ChatRKSC(reasoner=reasoner, max_tokens=20, strategy="direct")
    match where:
        case "constructor":
            message = chat.model_copy(update={"stop": [" th"]}).invoke(HI)
        case "call":
            message = ChatRKSC(reasoner=reasoner, max_tokens=20, strategy="direct", stop=["e"]).invoke(HI, stop=[" th"])
        case _:
            message = chat.bind(stop=[" th"]).invoke(HI)
    assert message.content == "Hello"
    assert message.response_metadata["finish_reason"] == "stop"


def test_an_unknown_argument_of_a_call_raises(chat: ChatRKSC) -> None:
    for call in (chat.invoke, lambda *a, **k: list(chat.stream(*a, **k)), lambda *a, **k: chat.batch([*a, *a], **k)):
        with pytest.raises(ConfigError, match=r"no argument 'beams', 'temprature'; it takes temperature, top_k"):
            call(HI, temprature=1, beams=2)


def test_another_model_for_one_call_raises(chat: ChatRKSC) -> None:
    assert chat.invoke(HI, model="scripted").content == "Hello there."
    with pytest.raises(ConfigError, match=r"make another ChatRKSC\(model='gpt'\)"):
        chat.invoke(HI, model="gpt")


def test_sharing_and_exit(chat: ChatRKSC) -> None:
    for sharing in ("exact", Sharing(), {"mode": "exact"}):
        assert chat.invoke(HI, sharing=sharing).content == "Hello there."
    best = BestOfN(branches=2, score="verifier")
    for exit_ in ("off", {"source": "off"}):
        assert chat.invoke(HI, strategy=THREE, exit=exit_).content == "Hello there."
    with pytest.raises(ConfigError, match="exit"):
        chat.invoke(HI, strategy=best, exit="never")


# -- the conversation ---------------------------------------------------------------------------


def test_any_end_of_a_conversation(chat: ChatRKSC) -> None:
    """Case 4: the last message need not be the user's."""
    assert chat.invoke([HumanMessage(HI), ToolMessage("x", tool_call_id="1")]).content
    assert chat.invoke([HumanMessage(HI), SystemMessage("Be brief.")]).content
    assert chat.invoke([HumanMessage(HI), AIMessage("Hello")]).content == " there."


def test_prompts_and_pairs(chat: ChatRKSC) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "What is {a} x {b}?")])
    assert (prompt | chat).invoke({"a": 6, "b": 7}).content in ("It is 42.", "It is 41.")
    assert chat.invoke([("system", "Be brief."), ("user", HI)]).content == "Hello there."


def test_a_prompt_that_is_too_long_raises(chat: ChatRKSC) -> None:
    """Case 23: the core's own error, with both numbers."""
    with pytest.raises(PromptTooLongError, match="5003 tokens and the model's context is 4096"):
        chat.invoke("x" * 5000)


# -- what a message tells -----------------------------------------------------------------------


def test_usage(chat: ChatRKSC) -> None:
    """Known values: a token is one byte; the prompt is <|user|>, the question, <|end|> and <|assistant|>."""
    message = chat.invoke(SIX, strategy=THREE)
    prompt, written = len(SIX) + 3, len("It is 42.") + 1
    assert message.usage_metadata == {
        "input_tokens": prompt,
        "output_tokens": 3 * written,
        "total_tokens": prompt + 3 * written,
        "input_token_details": {"cache_read": 0},
        "output_token_details": {"reasoning": 2 * written},
    }
    again = chat.invoke(SIX, strategy=THREE)
    assert again.usage_metadata is not None
    assert again.usage_metadata["input_token_details"] == {"cache_read": prompt - 1}
    assert again.response_metadata["rksc"]["tokens_reused"] == prompt - 1


def test_the_record_of_a_vote(chat: ChatRKSC) -> None:
    votes = {}
    for seed in range(20):
        message = chat.invoke(SIX, strategy=THREE, seed=seed)
        record = message.response_metadata["rksc"]
        winner = record["votes"][0]
        assert message.content == f"It is {winner['answer']}."
        assert record["agreement"] == len(winner["branches"]) / 3
        assert sum(len(vote["branches"]) for vote in record["votes"]) == 3
        votes[record["agreement"]] = record
    assert votes.keys() == {2 / 3, 1.0}
    record = votes[1.0]
    assert record["rule"] == "majority"
    assert record["strategy"] == "self-consistency"
    assert record["verification"] == {"verifier": None, "verified": 0, "skipped": 0, "exited": 0, "score": None}
    assert record["timings"].keys() == {"queue_s", "prefill_s", "decode_s", "verify_s", "total_s"}
    assert record["kv_bytes"] > 0
    assert 0 < record["confidence"] <= 1


def test_metadata_of_a_direct_answer(chat: ChatRKSC) -> None:
    told = chat.invoke(HI, strategy="direct").response_metadata
    assert told["model_name"] == "scripted"
    assert told["model_provider"] == "rksc"
    assert told["finish_reason"] == "stop"
    assert told["rksc"]["agreement"] is None
    assert told["rksc"]["votes"] == []
    assert "logprobs" not in told
    assert chat.invoke(HI, strategy="direct", max_tokens=3).response_metadata["finish_reason"] == "length"


def test_logprobs(chat: ChatRKSC) -> None:
    content = chat.invoke(SIX, strategy="direct", temperature=0, logprobs=True).response_metadata["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == "It is 42.<|end|>"
    assert [item["bytes"] for item in content[:2]] == [[ord("I")], [ord("t")]]
    chances = [math.exp(item["logprob"]) for item in content]
    assert chances[7] == pytest.approx(0.75)  # "2" rather than "1"
    assert chances[:7] == pytest.approx([1.0] * 7)
    assert content[0]["top_logprobs"] == []


def test_thinking_is_a_reasoning_block(chat: ChatRKSC) -> None:
    message = chat.invoke("Think.", strategy="direct", max_tokens=60)
    assert message.text == "It is 5."
    kinds = [(block["type"], block.get("reasoning") or block.get("text")) for block in message.content_blocks]
    assert kinds == [("reasoning", "Hm, so."), ("text", "It is 5.")]
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_token_details"]["reasoning"] == len("<think>\nHm, so.\n</think>\n\n")


def test_output_version_1_is_content_blocks(reasoner: RKSCReasoner) -> None:
    chat = ChatRKSC(reasoner=reasoner, output_version="v1", strategy="direct", max_tokens=20)
    assert chat.invoke(HI).content == [{"type": "text", "text": "Hello there."}]


# -- several answers ----------------------------------------------------------------------------


def test_n_direct_answers_are_branches_of_one_prefill(chat: ChatRKSC) -> None:
    """Case 11 seen from here: one prefill; the first answer is the one that a single call gives."""
    (answers,) = chat.generate([[HumanMessage(SIX)]], n=6, strategy="direct").generations
    assert len(answers) == 6
    assert {answer.text for answer in answers} == {"It is 42.", "It is 41."}
    assert answers[0].text == chat.invoke(SIX, strategy="direct").content
    usage = [answer.message.usage_metadata for answer in answers]
    assert [use["input_tokens"] for use in usage] == [len(SIX) + 3] * 6
    assert usage[0]["output_tokens"] == 60
    assert usage[0]["output_token_details"]["reasoning"] == 0


def test_n_voted_answers_have_seeds_of_their_own(chat: ChatRKSC) -> None:
    (answers,) = chat.generate([[HumanMessage(SIX)]], n=4, strategy=THREE, seed=5).generations
    single = [chat.invoke(SIX, strategy=THREE, seed=5 + more) for more in range(4)]
    assert [answer.text for answer in answers] == [message.content for message in single]
    votes = [answer.message.response_metadata["rksc"]["votes"] for answer in answers]
    assert votes == [message.response_metadata["rksc"]["votes"] for message in single]


async def test_n_answers_without_blocking(chat: ChatRKSC) -> None:
    for strategy in ("direct", THREE):
        sync = chat.generate([[HumanMessage(SIX)]], n=4, strategy=strategy).generations
        found = (await chat.agenerate([[HumanMessage(SIX)]], n=4, strategy=strategy)).generations
        assert [answer.text for answer in found[0]] == [answer.text for answer in sync[0]]


# -- tokens and traces --------------------------------------------------------------------------


def test_tokens_are_the_models_own(chat: ChatRKSC) -> None:
    assert len(chat.get_token_ids("abcé")) == 5
    assert chat.get_num_tokens("abcé") == 5
    assert chat.get_num_tokens_from_messages([HumanMessage(SIX)]) == len(SIX) + 3
    assert chat.model_copy(update={"custom_get_token_ids": lambda _: [1]}).get_token_ids("abc") == [1]


def test_tracing_parameters(chat: ChatRKSC) -> None:
    assert chat._get_ls_params() == {
        "ls_provider": "rksc",
        "ls_model_name": "scripted",
        "ls_model_type": "chat",
        "ls_max_tokens": 20,
    }
    told = chat._get_ls_params(stop=["x"], temperature=0, max_tokens=3, model="other")
    assert (told["ls_stop"], told["ls_temperature"], told["ls_max_tokens"]) == (["x"], 0, 3)
    assert told["ls_model_name"] == "other"


def test_profile(chat: ChatRKSC) -> None:
    assert chat.profile is not None
    assert chat.profile["tool_calling"]
    assert chat.profile["structured_output"]
    assert chat.profile["max_input_tokens"] == 4096
    assert ChatRKSC().profile is not None
    assert "max_input_tokens" not in (ChatRKSC().profile or {})
