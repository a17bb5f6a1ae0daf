"""Every example runs on the default model."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from rksc_agents import Trace

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {"04_game_of_24.py": ["--limit", "1"]}

pytestmark = pytest.mark.real


# LlamaIndex's agents use what pydantic and its own workflows have deprecated
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
@pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning")
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, *ARGUMENTS.get(path.name, [])])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_arguments_are_those_of_examples() -> None:
    assert ARGUMENTS.keys() <= {path.name for path in EXAMPLES.glob("*.py")}


def test_every_example_has_its_line() -> None:
    listed = re.findall(r"^\| \[(.*?)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert listed == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


def test_the_notebook_runs_and_shows_the_page() -> None:
    """Its cells one after the other, in this process: a kernel of its own would need sockets."""
    shown: list[object] = []
    notebook = json.loads((EXAMPLES / "look_at_a_run.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "cell", "exec"), names)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
    (run,) = [each for each in shown if isinstance(each, Trace)]
    assert run._repr_html_().startswith("<iframe ")
