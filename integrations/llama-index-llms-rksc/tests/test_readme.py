"""What the README shows is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.real
def test_the_readmes_code(run_blocks: Callable[[Path], dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(README)["llm"].close()
    told = capsys.readouterr().out
    assert "completion_tokens" in told
    assert "supported" in told
    assert "name='" in told
