"""One reasoner on the default model for all tests that need it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from rksc_agents import EngineConfig, RKSCReasoner
from rksc_agents.config import DEFAULT_MODEL


@pytest.fixture(scope="session")
def real_reasoner() -> Iterator[RKSCReasoner]:
    """The default model, or the one that RKSC_TEST_MODEL names, loaded once; tests say what strategy they mean."""
    model = os.environ.get("RKSC_TEST_MODEL", DEFAULT_MODEL)
    with RKSCReasoner.from_pretrained(model, dtype=torch.float32, engine=EngineConfig(kv_budget=2**30)) as reasoner:
        yield reasoner


@pytest.fixture(autouse=True)
def _untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reports to a tracing service."""
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2", "LANGSMITH_API_KEY", "LC_OUTPUT_VERSION"):
        monkeypatch.delenv(name, raising=False)
