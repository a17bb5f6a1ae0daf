"""What the tests of all packages use: one reasoner on the default model, examples as modules, code of READMEs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

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


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], ModuleType]:
    """Import a program from its file, as if it stood alone; forgotten after the test."""

    def load(path: Path) -> ModuleType:
        spec = spec_from_file_location(f"example_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # pydantic looks its classes up there
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def run_blocks() -> Callable[[Path], dict[str, object]]:
    """Run the Python blocks of a page, one after the other in one namespace; there is one at least."""

    def run(page: Path) -> dict[str, object]:
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        assert blocks
        names: dict[str, object] = {"__name__": page.stem}
        for block in blocks:
            exec(compile(block, page.name, "exec"), names)
        return names

    return run
