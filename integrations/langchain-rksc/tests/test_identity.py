"""What tells two calls apart, and what of a model object is written down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumpd, dumps, load
from langchain_support import HI, SIX, scripted

from langchain_rksc import ChatRKSC
from rksc_agents import (
    BestOfN,
    CallableVerifier,
    ConfigError,
    Direct,
    EngineConfig,
    ExitConfig,
    RKSCReasoner,
    Sampling,
    SelfConsistency,
    Sharing,
)

TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}

DIFFERENT: list[dict[str, Any]] = [
    {"model": "a/b"},
    {"load_kwargs": {"revision": "one"}},
    {"load_kwargs": {"dtype": "float16"}},
    {"temperature": 0.1},
    {"temperature": 0.9},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.5},
    {"repetition_penalty": 1.5},
    {"max_tokens": 5},
    {"stop": ["x"]},
    {"seed": 1},
    {"n": 2},
    {"logprobs": True},
    {"stream_reasoning": True},
    {"strategy": "direct"},
    {"strategy": "self-consistency"},
    {"strategy": SelfConsistency(branches=4)},
    {"strategy": SelfConsistency(branches=4, vote="majority")},
    {"strategy": BestOfN(branches=4)},
    {"strategy": BestOfN(branches=4, score=len)},
    {"strategy": BestOfN(branches=4, score="verifier", verifier=CallableVerifier(lambda _: 1.0))},
    {"strategy": BestOfN(branches=4, score="verifier", verifier=CallableVerifier(lambda _: 0.0))},
    {"sharing": "aligned"},
    {"sharing": Sharing(mode="aligned", first=3)},
    {"exit": "off"},
    {"exit": ExitConfig(confidence=0.9)},
]
CALLS: list[dict[str, Any]] = [
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "any"},
    {"tools": [TOOL], "parallel_tool_calls": False},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {}}}}},
]


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted() as made:
        yield made


# -- the cache's key ----------------------------------------------------------------------------


def test_all_that_answers_depend_on_is_in_the_key() -> None:
    """Case 28."""
    plain = ChatRKSC()
    keys = [plain._get_llm_string()]
    keys += [ChatRKSC(**fields)._get_llm_string() for fields in DIFFERENT]
    keys += [plain._get_llm_string(**call) for call in CALLS]
    assert len(set(keys)) == len(keys)
    assert all(json.loads(key) for key in keys)


def test_the_key_is_the_same_for_the_same_settings() -> None:
    in_constructor = ChatRKSC(temperature=0.3, strategy=SelfConsistency(branches=3), stop=["x"])._get_llm_string()
    settings = {"name": "self-consistency", "branches": 3}
    assert ChatRKSC()._get_llm_string(temperature=0.3, strategy=settings, stop=["x"]) == in_constructor
    assert ChatRKSC(temperature=0.7).model_copy(update={"temperature": 0.3})._get_llm_string() == (
        ChatRKSC(temperature=0.3)._get_llm_string()
    )
    assert ChatRKSC(engine=EngineConfig(max_rows=3))._get_llm_string() == ChatRKSC()._get_llm_string()


def test_the_key_of_an_injected_reasoner_holds_its_own_settings() -> None:
    made: list[dict[str, Any]] = [
        {},
        {"strategy": SelfConsistency(branches=3)},
        {"strategy": Direct()},
        {"sampling": Sampling(temperature=0.1)},
        {"sampling": Sampling(temperature=0.9)},
    ]
    keys = []
    for settings in made:
        with scripted(**settings) as reasoner:
            keys.append(ChatRKSC(reasoner=reasoner)._get_llm_string())
    assert len(set(keys)) == len(keys)


def test_the_key_does_not_change_when_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, reasoner: RKSCReasoner
) -> None:
    monkeypatch.setattr(RKSCReasoner, "from_pretrained", lambda *_, **__: reasoner)
    chat = ChatRKSC(max_tokens=20)
    before = chat._get_llm_string()
    chat.invoke(HI)
    assert chat._get_llm_string() == before


async def test_the_cache_of_langchain(reasoner: RKSCReasoner) -> None:
    cache = InMemoryCache()
    chat = ChatRKSC(reasoner=reasoner, cache=cache, max_tokens=20, strategy="direct", temperature=0.0)
    runner: Any = reasoner._engine.runner
    first = chat.invoke(SIX)
    passes = runner.passes
    assert chat.invoke(SIX).content == first.content
    assert (await chat.ainvoke(SIX)).content == first.content
    assert runner.passes == passes
    assert {chat.invoke(SIX, temperature=1.0, seed=seed).content for seed in range(8)} == {"It is 42.", "It is 41."}
    assert runner.passes > passes


# -- serialization ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
@pytest.mark.parametrize("fields", [*DIFFERENT[:21], {"exit": "off"}, {"sharing": Sharing(mode="semantic")}])
def test_settings_survive_a_round_trip(fields: dict[str, Any]) -> None:
    chat = ChatRKSC(**fields)
    read = load(json.loads(dumps(chat)), valid_namespaces=["langchain_rksc"], allowed_objects=[ChatRKSC])
    assert isinstance(read, ChatRKSC)
    assert read._get_llm_string() == chat._get_llm_string()
    assert read.asdict() == chat.asdict()


def test_what_is_written_down() -> None:
    chat = ChatRKSC(
        strategy=SelfConsistency(branches=3, hints=("Think.",)),
        exit=Path("cert.json"),
        engine={"max_rows": 3},
        load_kwargs={"dtype": "float32", "token": "hf_secret"},
        temperature=0.0,
    )
    written = dumpd(chat)
    assert written["id"] == ["langchain_rksc", "chat_models", "ChatRKSC"]
    assert written["kwargs"] == {
        "model": "smollm2-135m-instruct",
        "strategy": {"name": "self-consistency", "branches": 3, "hints": ["Think."]},
        "exit": "cert.json",
        "engine": {"max_rows": 3},
        "load_kwargs": {"dtype": "float32"},
        "temperature": 0.0,
        "n": 1,
    }


def test_a_secret_is_written_nowhere() -> None:
    chat = ChatRKSC(load_kwargs={"token": "hf_secret"})
    assert all(
        "hf_secret" not in text for text in (dumps(chat), repr(chat), str(chat.asdict()), chat._get_llm_string())
    )
    assert chat.load_kwargs == {"token": "hf_secret"}


def test_dtypes_and_devices_are_written_by_name() -> None:
    import torch

    chat = ChatRKSC(load_kwargs={"dtype": torch.float16, "device": torch.device("cpu")})
    assert dumpd(chat)["kwargs"]["load_kwargs"] == {"dtype": "float16", "device": "cpu"}


def test_no_live_object_is_serialized(reasoner: RKSCReasoner) -> None:
    chat = ChatRKSC(reasoner=reasoner, strategy=BestOfN(branches=2, score=len))
    written = dumpd(chat)
    assert written["kwargs"]["model"] == "scripted"
    assert "shared_engine" not in written["kwargs"]
    assert written["kwargs"]["strategy"]["score"]["type"] == "not_implemented"
    assert json.dumps(written)


def test_identifying_parameters_are_json(reasoner: RKSCReasoner) -> None:
    chat = ChatRKSC(reasoner=reasoner, strategy=BestOfN(branches=2, score=len), exit=Path("x.json"))
    told = json.loads(json.dumps(chat.asdict()))
    assert told["_type"] == "rksc-chat"
    assert told["model_hash"] == "scripted"
    assert told["reasoner"]["sampling"]["temperature"] == 1.0


def test_an_unknown_setting_in_a_serialized_strategy_raises() -> None:
    with pytest.raises(ConfigError, match="brnches"):
        ChatRKSC(strategy={"name": "self-consistency", "brnches": 3})._get_llm_string()
