"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.real
def test_the_readmes_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) == 4
    names: dict[str, object] = {"__name__": "readme"}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    names["llm"].close()
    told = capsys.readouterr().out
    assert "completion_tokens" in told
    assert "supported" in told
    assert "name='" in told
