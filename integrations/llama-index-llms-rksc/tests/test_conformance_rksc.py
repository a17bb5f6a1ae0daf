"""RKSC passes the conformance suite: on a scripted model, and on the default model with one branch and with three.

On the default model the areas run that depend on it most; with RKSC_TEST_CONFORMANCE=all in the environment all do.
"""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar

import pytest
import torch
from conformance import SECRET, LLMConformance
from conformance_base import ADD, ANN, GREETING, HI, QUESTIONS, SIX, Conformance
from conformance_chat import Answers, Streams
from conformance_running import Concurrency
from llama_index.core.llms import LLM
from llama_index_support import called

from llama_index.llms.rksc import RKSC
from rksc_agents import EngineError, PromptTooLongError, RKSCReasoner, SelfConsistency
from rksc_agents.testing import scripted_reasoner

PERSON: dict[str, Any] = {"name": "Ann", "age": 33}
PET: dict[str, Any] = {"owner": PERSON, "colour": "red", "toys": ["blue"], "tame": True}

SCRIPT: dict[str, Any] = {
    SIX: {"It is 42.": 3, "It is 41.": 2},
    HI: "Hello there.",
    GREETING: "Grüße zurück nach 東京 🙂!",
    ADD: {called("add", a=2, b=3): 4, called("weather", city="Rome"): 1, called("now"): 1},
    ANN: [json.dumps(PERSON), json.dumps(PET), called("Person", **PERSON), called("Pet", **PET)],
    "<tool_response>": "It is 5.",
    **{question: f"It is {number + 1}." for number, question in enumerate(QUESTIONS)},
}


ALL = os.environ.get("RKSC_TEST_CONFORMANCE") == "all"


class Standard(Conformance):
    """What all have in common."""

    function_calling = True
    counts_tokens = True
    bounds = "max_tokens"
    stops = "stop"
    secret: ClassVar = {"load_kwargs": {"token": SECRET}}
    settings: ClassVar[dict[str, Any]]
    reasoner: RKSCReasoner

    def make_llm(self, **settings: Any) -> LLM:
        return RKSC(reasoner=self.reasoner, **self.settings, **settings)

    def release(self, llm: LLM) -> None:
        assert isinstance(llm, RKSC)
        llm.close()


class Scripted(Standard, LLMConformance):
    room: ClassVar = {"max_tokens": 300}

    @pytest.fixture(autouse=True)
    def _scripted(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """What is loaded is the script, too."""
        monkeypatch.setattr(RKSCReasoner, "from_pretrained", lambda *_, **__: scripted_reasoner(SCRIPT))
        with scripted_reasoner(SCRIPT) as self.reasoner:
            yield

    def make_lone_llm(self, **settings: Any) -> LLM:
        return RKSC(model="scripted", **self.settings, **settings)

    def make_failing(self, **settings: Any) -> tuple[LLM, str, type[Exception]]:
        return self.make_llm(**settings), "Nobody knows.", EngineError


class TestRKSCScripted(Scripted):
    settings: ClassVar = {"strategy": "direct", "temperature": 0, "max_tokens": 200}


class TestRKSCScriptedBranches(Scripted):
    settings: ClassVar = {"strategy": SelfConsistency(branches=3), "max_tokens": 200}


@pytest.mark.real
class Real(Standard):
    room: ClassVar = {"max_tokens": 96}

    @pytest.fixture(autouse=True)
    def _loaded(self, real_reasoner: RKSCReasoner) -> None:
        self.reasoner = real_reasoner

    def make_lone_llm(self, **settings: Any) -> LLM:
        load = {"dtype": torch.float32, **settings.pop("load_kwargs", {})}
        return RKSC(model=self.reasoner.name, load_kwargs=load, **self.settings, **settings)

    def make_failing(self, **settings: Any) -> tuple[LLM, str, type[Exception]]:
        return self.make_llm(**settings), "word " * 10000, PromptTooLongError


class TestRKSC(Real, *((LLMConformance,) if ALL else (Answers, Streams, Concurrency))):  # type: ignore[misc]
    settings: ClassVar = {"strategy": "direct", "temperature": 0, "max_tokens": 5}


class TestRKSCBranches(Real, *((LLMConformance,) if ALL else (Answers, Streams))):  # type: ignore[misc]
    settings: ClassVar = {"strategy": SelfConsistency(branches=3), "max_tokens": 5}
