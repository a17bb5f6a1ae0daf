"""`rksc bench branches`, `growth`, `accuracy`, `load`: what they hand on, print, and refuse before a model is there."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from bench_units import QUESTIONS
from support import keys_of
from typer.testing import CliRunner, Result

from rksc_agents.bench.peers import SYSTEMS
from rksc_agents.bench.peers.weights import Places
from rksc_agents.bench.ways import WAYS
from rksc_agents.cli import app, common, compare
from rksc_agents.questions import read_questions

MACHINE = {
    "model": "m", "device": "cpu", "dtype": "float32", "parameters": 7, "copies": 2, "cores": 2, "threads": 2,
    "cpu_capability": "AVX2", "torch": "2", "transformers": "5",
}  # fmt: skip
ROW = {
    "system": "rksc", "note": "", "missing": None, "median_s": 1.5, "spread": [1.0, 2.0], "speedup_over_no_kv": 3.0,
    "speedup_spread": [2.5, 3.5], "verified": 2, "tokens_computed": 1234, "kv_bytes": 2048, "passes": 9,
    "prefill_s": 1.0, "decode_s": 0.25, "verify_s": 0.25,
}  # fmt: skip
BRANCHES = {
    "unit": {"prefix": 64, "examples": 2, "branches": 2, "tokens": 4, "verification_tokens": 24, "temperature": 0.7,
             "runs": 3},
    "machine": MACHINE,
    "systems": [ROW, {**dict.fromkeys(ROW), "system": "vllm", "note": "", "missing": "it is not set up"}],
}  # fmt: skip
GROWTH = {
    "unit": {"tokens": 4, "verification_tokens": 24, "temperature": 0.7, "runs": 3},
    "machine": MACHINE,
    "rows": [{"prefix": 256, "branches": 4, "in_flight": 2, "median_s": 2.0, "spread": [1.0, 3.0],
              "prefill_s": 1.0, "decode_s": 0.5, "verify_s": 0.5, "tokens_computed": 99, "kv_bytes": 1024,
              "kv_bytes_copied": 4096}],
}  # fmt: skip
ACCURACY = {
    "model": "m", "questions": 2, "exit": "strict", "branches": 8, "tokens": 256, "temperature": 0.7, "seed": 0,
    "rows": [{"way": "verifier-cgee", "strategy": "self-consistency", "right": 1, "accuracy": 0.5, "low": 0.01,
              "high": 0.99, "generated_tokens": 80.0, "seconds": 1.25, "reference": "verifier", "agreement": 1.0,
              "skip_rate": 0.5, "exits": 0.0}],
}  # fmt: skip


LOAD = {
    "model": "m", "runs": 5, "median_s": 6.0, "spread": [5.0, 7.0], "python_s": 0.5, "import_s": 2.5, "load_s": 2.0,
    "token_s": 1.0,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="rksc")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def documented(command: str) -> set[str]:
    text = run("bench", command, "--help").stdout
    return set(re.findall(r"\w+", text[text.index("of --json") : text.index("Options:")]))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def standing_in(result: dict[str, Any]) -> Callable[..., dict[str, Any]]:
        def measure(*args: Any, **settings: Any) -> dict[str, Any]:
            found.update(args=args, **settings)
            return result

        return measure

    def load(*args: Any, **settings: Any) -> Any:
        found.update(loaded=(args, settings))
        return nullcontext("the reasoner")

    monkeypatch.setattr("rksc_agents.bench.branches.bench_branches", standing_in(BRANCHES))
    monkeypatch.setattr("rksc_agents.bench.load.bench_load", standing_in(LOAD))
    monkeypatch.setattr("rksc_agents.bench.growth.bench_growth", standing_in(GROWTH))
    monkeypatch.setattr("rksc_agents.bench.accuracy.bench_accuracy", standing_in(ACCURACY))
    monkeypatch.setattr(common, "load_reasoner", load)
    for name in ("RKSC_VLLM_PYTHON", "RKSC_LLAMA_CPP", "RKSC_LLAMA_CPP_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text(
        "".join(json.dumps({"question": q.text, "answer": q.answer}) + "\n" for q in QUESTIONS), encoding="utf-8"
    )
    return path


def test_branches_hands_on_its_defaults(called: dict[str, Any]) -> None:
    result = run("bench", "branches")
    assert (result.exit_code, result.stderr) == (0, "")
    assert called == {
        "args": ("smollm2-135m-instruct", read_questions(compare.EXAMPLES)), "systems": list(SYSTEMS), "prefix": 1024,
        "branches": 8, "tokens": 64, "runs": 5, "exit": "strict", "places": Places(), "loading": None, "progress": None,
    }  # fmt: skip
    printed = result.stdout.splitlines()
    assert cells(printed[-2]) == [
        "rksc", "1.50 s", "1.00 to 2.00", "3.00x", "2", "1,234", "2.0 KiB", "9", "1.00", "0.25", "0.25", "",
    ]  # fmt: skip
    assert printed[-1] == "vllm did not run: it is not set up"


def test_branches_hands_on_every_option(called: dict[str, Any], data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSC_LLAMA_CPP", "/bin/server")
    options = "--systems no-kv,rksc --model m --prefix 64 --branches 2 --tokens 4 --runs 1 --exit paper"
    peers = "--vllm-python /v/python --llama-cpp-model w.gguf"
    result = run("bench", "branches", "--data", data, *options.split(), *peers.split(), "--json")
    assert called == {
        "args": ("m", QUESTIONS), "systems": ["no-kv", "rksc"], "prefix": 64, "branches": 2, "tokens": 4, "runs": 1,
        "exit": "paper", "places": Places("/v/python", "/bin/server", "w.gguf"), "loading": None, "progress": None,
    }  # fmt: skip
    assert json.loads(result.stdout) == BRANCHES
    assert set(keys_of(BRANCHES)) <= documented("branches")


def test_growth(called: dict[str, Any], data: Path, tmp_path: Path) -> None:
    result = run("bench", "growth")
    assert (result.exit_code, result.stderr) == (0, "")
    assert called == {
        "args": ("smollm2-135m-instruct", read_questions(compare.EXAMPLES)), "branches": (1, 2, 4, 8, 16, 32),
        "prefix": (256, 1024), "in_flight": (1,), "tokens": 64, "runs": 3, "loading": None, "progress": None,
    }  # fmt: skip
    last = cells(result.stdout.splitlines()[-1])
    assert last == ["256", "2", "4", "2.00 s", "1.00 to 3.00", "0.25 s", "1.0 KiB", "4.0 KiB"]
    options = "--model m --branches 1 --branches 3 --prefix 9 --in-flight 2 --tokens 2 --runs 1 --json"
    drawing = tmp_path / "growth.svg"
    result = run("bench", "growth", "--data", data, *options.split(), "--plot", drawing)
    assert called == {
        "args": ("m", QUESTIONS), "branches": [1, 3], "prefix": [9], "in_flight": [2], "tokens": 2, "runs": 1,
        "loading": None, "progress": None,
    }  # fmt: skip
    assert json.loads(result.stdout) == GROWTH
    assert set(keys_of(GROWTH)) <= documented("growth")
    assert drawing.read_text("utf-8").lstrip().startswith("<?xml")


def test_accuracy(called: dict[str, Any], data: Path, tmp_path: Path) -> None:
    result = run("bench", "accuracy", data)
    assert (result.exit_code, result.stderr) == (0, "")
    assert called == {
        "loaded": (("smollm2-135m-instruct", None), {"exit": "strict"}), "args": ("the reasoner", QUESTIONS),
        "ways": list(WAYS), "branches": 8, "tokens": 256, "temperature": 0.7, "exit": "strict", "seed": 0,
        "resume": None, "progress": None,
    }  # fmt: skip
    assert cells(result.stdout.splitlines()[-1]) == [
        "verifier-cgee", "1", "50.0%", "1.0% to 99.0%", "80", "1.25", "100.0% with verifier", "50.0%", "0.0%",
    ]  # fmt: skip
    options = "--ways direct,majority --model m --gguf-file g --limit 3 --seed 4 --branches 2 --tokens 9 --exit paper"
    drawing, kept = tmp_path / "a.svg", tmp_path / "kept.jsonl"
    more = ("--temperature", "0.5", "--resume", kept, "--plot", drawing, "--json")
    result = run("bench", "accuracy", data, *options.split(), *more)
    asked = called.pop("args")[1]
    assert len(asked) == 3
    assert asked == read_questions(data, limit=3, seed=4)
    assert called == {
        "loaded": (("m", "g"), {"exit": "paper"}), "ways": ["direct", "majority"], "branches": 2, "tokens": 9,
        "temperature": 0.5, "exit": "paper", "seed": 4, "resume": kept, "progress": None,
    }  # fmt: skip
    assert json.loads(result.stdout) == ACCURACY
    assert set(keys_of(ACCURACY)) <= documented("accuracy")
    assert drawing.read_text("utf-8").lstrip().startswith("<?xml")


def test_load(called: dict[str, Any]) -> None:
    result = run("bench", "load")
    assert (result.exit_code, result.stderr) == (0, "")
    assert called == {"args": ("smollm2-135m-instruct",), "runs": 5, "progress": None}
    assert cells(result.stdout.splitlines()[-1]) == ["6.00 s", "5.00 to 7.00", "0.50 s", "2.50 s", "2.00 s", "1.00 s"]
    result = run("bench", "load", "--model", "m", "--runs", "2", "--json")
    assert called == {"args": ("m",), "runs": 2, "progress": None}
    assert json.loads(result.stdout) == LOAD
    assert set(LOAD) <= documented("load")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["load", "--runs", "0"], "'--runs'"),
        (["branches", "--systems", "rksc,nope"], "system 'nope' is unknown: give some of no-kv, transformers"),
        (["branches", "--systems", ","], "no system is named"),
        (["branches", "--runs", "0"], "'--runs'"),
        (["branches", "--prefix", "0"], "'--prefix'"),
        (["branches", "--data", "none.jsonl"], "none.jsonl cannot be read"),
        (["growth", "--branches", "0"], "'--branches'"),
        (["growth", "--tokens", "0"], "'--tokens'"),
        (["accuracy"], "questions"),
        (["accuracy", "half.jsonl"], "question 2 of half.jsonl has no `answer`"),
        (["accuracy", "half.jsonl", "--ways", "nope"], "way 'nope' is unknown"),
        (["accuracy", "half.jsonl", "--limit", "0"], "'--limit'"),
        (["accuracy", "half.jsonl", "--temperature", "-1"], "'--temperature'"),
    ],
)
def test_they_refuse_before_a_model_is_loaded(
    called: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("half.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question": "b"}\n', encoding="utf-8")
    result = run("bench", *args)
    assert (result.exit_code, result.stdout, called) == (2, "", {})
    assert message in " ".join(result.stderr.split())


def test_they_ask_for_what_is_missing(
    called: dict[str, Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "EXAMPLES", tmp_path / "none")
    monkeypatch.setattr("rksc_agents.bench.svg.find_spec", {"matplotlib": None}.get)
    for args, message in (
        (["branches"], "--data is needed outside a checkout"),
        (["growth"], "--data is needed outside a checkout"),
        (["growth", "--plot", "a.svg"], "a plot needs matplotlib"),
        (["accuracy", data, "--plot", "a.svg"], "a plot needs matplotlib"),
    ):
        result = run("bench", *args)
        assert (result.exit_code, called) == (2, {})
        assert message in " ".join(result.stderr.split())


def test_a_terminal_sees_how_far_they_are(called: dict[str, Any], data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    for args in (["branches"], ["growth"], ["accuracy", str(data)], ["load"]):
        with pytest.raises(SystemExit):
            app(["bench", *args], prog_name="rksc")
        assert callable(called["progress"])
        called.clear()
