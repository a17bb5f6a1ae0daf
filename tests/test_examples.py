"""Every example runs on the default model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {"game_of_24.py": ["--limit", "1"]}

pytestmark = pytest.mark.real


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, *ARGUMENTS.get(path.name, [])])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_arguments_are_those_of_examples() -> None:
    assert ARGUMENTS.keys() <= {path.name for path in EXAMPLES.glob("*.py")}
