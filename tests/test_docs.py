"""Everything in README and docs that looks like code is run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rksc_agents.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[object]:
    found = []
    for page in PAGES:
        for number, (kind, code) in enumerate(BLOCK.findall(page.read_text())):
            if kind == language:
                found.append(pytest.param(code, id=f"{page.name}-{number}"))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to write to that looks like a checkout."""
    for name in ("tests", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.real
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("code", blocks("python"))
def test_python(code: str) -> None:
    exec(compile(code, "block", "exec"), {"__name__": "block"})


COMMANDS = [line for param in blocks("sh") for line in param.values[0].splitlines()]  # type: ignore[attr-defined]


@pytest.mark.real
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("rksc ")])
def test_command(line: str) -> None:
    result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


@pytest.mark.parametrize("line", [line for line in COMMANDS if not line.startswith("rksc ")])
def test_make_target(line: str) -> None:
    words = shlex.split(line, comments=True)
    assert words[0] == "make", f"{line!r} is not run by any test"
    subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)


def test_every_block_has_a_language_that_is_run() -> None:
    kinds = {kind for page in PAGES for kind, _ in BLOCK.findall(page.read_text())}
    assert kinds <= {"python", "sh", ""}  # "" draws a picture or shows output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
