"""`rksc calibrate` and `rksc bench`: what they hand on, what they print, what they refuse before a model is loaded."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support import keys_of
from tiny_models import tiny_model
from typer.testing import CliRunner, Result

from rksc_agents import BestOfN, EngineConfig, RKSCReasoner, SelfConsistency
from rksc_agents.calibrator import Calibration
from rksc_agents.cli import app, calibration, common
from rksc_agents.config import DEFAULT_MODEL, Sampling
from rksc_agents.questions import Question
from rksc_agents.testing import scripted_tokenizer
from rksc_agents.verify.calibration import Point
from rksc_agents.verify.certificate import Certificate, Labelled
from rksc_agents.verify.judge import JudgeVerifier
from rksc_agents.verify.lens import FittedLens
from rksc_agents.verify.self_verifier import SelfVerifier
from rksc_agents.verify.verifier import ProbingVerifier

LENS = {"layers": [1], "width": 1, "weights": "AAAAAA==", "bias": [0.0], "error": [1.0], "scale": 1.0, "fitted_on": 9}
CERTIFICATE = Certificate(
    model="tiny",
    model_hash="abc",
    prompt_hash="def",
    verifier="self",
    measure="mean-top-probability",
    strategy={"strategy": "self-consistency", "branches": 8, "temperature": 0.7, "max_tokens": 256},
    alpha=0.01,
    delta=0.05,
    n=300,
    errors=0,
    p_value=0.049,
    confidence=0.91234,
    gap=0.125,
    margin=2.5,
    lens=LENS,
    total_layers=3,
    skip_rate=0.25,
    risk_among_skipped=0.015,
    layers_saved=0.2,
    work_saved=0.4,
    curve=(Point(confidence=None, gap=0, margin=None, errors=0, risk=0, skip_rate=0, work_saved=0.5, accepted=True),),
    created="2026-01-02T03:04:05+00:00",
    labelled=Labelled(
        questions=450,
        verifier_auc=0.515,
        accuracy={"majority": 0.4, "verifier": 0.35},
        recommendation="do not verify with it",
    ),
)
OFF = CERTIFICATE.model_copy(
    update={"confidence": None, "gap": 0.0, "margin": None, "lens": None, "risk_among_skipped": None, "labelled": None}
)

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, *records: Any) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return written


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="rksc")


def many(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(start, start + count)]


def documented(*command: str) -> set[str]:
    text = run(*command, "--help").stdout
    return set(re.findall(r"\w+", text[text.index("of --json") : text.index("Options:")]))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# -- calibrate ----------------------------------------------------------------------------------


class Calibrating:
    """Stands in for the load of a model and for calibration, and remembers what they were called with."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.called: dict[str, Any] = {}
        self.found = Calibration(CERTIFICATE, Path("/c/a.json"), 0)

    def load(self, model: str, gguf_file: str | None, **settings: Any) -> Any:
        self.loaded = {"model": model, "gguf_file": gguf_file, **settings}
        return nullcontext("the reasoner")

    def certify(self, reasoner: Any, questions: list[str], **settings: Any) -> Calibration:
        self.called = {"reasoner": reasoner, "questions": questions, **settings}
        if (progress := settings["progress"]) is not None:
            progress(1, 2)
        return self.found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Calibrating:
    made = Calibrating()
    monkeypatch.setattr(common, "load_reasoner", made.load)
    monkeypatch.setattr(importlib.import_module("rksc_agents.calibrator"), "calibrate", made.certify)
    return made


def test_calibrate_hands_on_its_defaults(fake: Calibrating, write: Write) -> None:
    result = run("calibrate", "--data", write("a.jsonl", *many(2)), "--data", write("b.jsonl", *many(1, 2)))
    assert result.exit_code == 0, result.output
    assert fake.loaded == {"model": DEFAULT_MODEL, "gguf_file": None, "sampling": {}, "exit": "off"}
    assert fake.called == {
        "reasoner": "the reasoner",
        "questions": ["What is 0 + 0?", "What is 1 + 1?", "What is 2 + 2?"],
        "answers": ["0", "2", "4"],
        "strategy": SelfConsistency(vote="verifier", verifier=SelfVerifier()),
        "alpha": 0.01,
        "delta": 0.05,
        "seed": 0,
        "save": True,
        "progress": None,
    }


def test_calibrate_hands_on_every_option(fake: Calibrating, write: Write, tmp_path: Path) -> None:
    data = write("a.jsonl", {"question": "p"}, *many(1))
    options = "--model m --gguf-file f --strategy best-of-n --branches 3 --max-tokens 9 --temperature 0.5"
    more = "--verifier judge --alpha 0.1 --delta 0.2 --seed 4"
    out = tmp_path / "out.json"
    result = run("calibrate", "--data", data, *options.split(), *more.split(), "--out", out)
    assert result.exit_code == 0, result.output
    sampling = {"max_tokens": 9, "temperature": 0.5}
    assert fake.loaded == {"model": "m", "gguf_file": "f", "sampling": sampling, "exit": "off"}
    assert fake.called["answers"] is None  # one question has none
    assert fake.called["strategy"] == BestOfN(score="verifier", branches=3, verifier=JudgeVerifier())
    assert [fake.called[name] for name in ("alpha", "delta", "seed", "save")] == [0.1, 0.2, 4, out]


def test_a_limit_draws_from_all_files_together(fake: Calibrating, write: Write) -> None:
    files = ("--data", write("a.jsonl", *many(20)), "--data", write("b.jsonl", *many(20, 20)))
    drawn = []
    for seed in (0, 0, 1):
        assert run("calibrate", *files, "--limit", 10, "--seed", seed).exit_code == 0
        drawn.append(fake.called["questions"])
        pairs = [
            (question.split()[2], answer) for question, answer in zip(drawn[-1], fake.called["answers"], strict=True)
        ]
        assert all(int(answer) == 2 * int(number) for number, answer in pairs)
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 10
    assert {int(question.split()[2]) < 20 for question in drawn[0]} == {True, False}


def test_calibrate_prints_what_was_found(fake: Calibrating, write: Write, tmp_path: Path) -> None:
    drawing = tmp_path / "risk.svg"
    result = run("calibrate", "--data", write("a.jsonl", *many(3)), "--plot", drawing)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "certificate: /c/a.json",
        f"plot: {drawing}",
        "model: tiny, verifier self",
        "level 1: confidence 0.9123, gap 0.1250",
        "level 2: margin 2.5000",
        "test: 300 questions, 0 decisions differ, p-value 0.0490, alpha 0.01, delta 0.05",
        "skip rate: 25.0%, risk among skipped 1.50%",
        "saved: layers 20.0%, work 40.0%",
        "missing: none, there are questions enough for this alpha",
        "labelled: 450 questions, AUC of the verifier 0.515",
        "accuracy: majority 40.0%",
        "accuracy: verifier 35.0%",
        "recommendation: do not verify with it",
    ]
    assert drawing.read_text("utf-8").lstrip().startswith("<?xml")


def test_calibrate_says_what_is_missing(fake: Calibrating, write: Write) -> None:
    fake.found = Calibration(OFF, Path("/c/a\x1b[1m.json"), 280)
    lines = run("calibrate", "--data", write("a.jsonl", *many(2), {"question": "q"})).stdout.splitlines()
    assert [line for line in lines if not line.startswith(("model", "test", "saved"))] == [
        "certificate: /c/a[1m.json",
        "level 1: off, every branch is verified",
        "level 2: off, full depth",
        "skip rate: 25.0%, none was skipped",
        "missing: 280 more questions in the test before any saving can be certified",
        "labelled: no, 2 of 3 questions have an answer",
    ]


def test_calibrate_says_where_the_verifier_could_not_be_rated(fake: Calibrating, write: Write) -> None:
    report = Labelled(questions=2, verifier_auc=None, recommendation="take other questions")
    fake.found = Calibration(CERTIFICATE.model_copy(update={"labelled": report}), None, 0)
    assert (
        "labelled: 2 questions, AUC of the verifier unknown"
        in run("calibrate", "--data", write("a.jsonl", *many(2))).stdout
    )


def test_calibrate_gives_json_with_documented_keys(fake: Calibrating, write: Write) -> None:
    result = run("calibrate", "--data", write("a.jsonl", *many(2)), "--json")
    found = json.loads(result.stdout)
    assert result.stdout.isascii()
    assert result.stdout.count("\n") == 1
    assert (found.pop("path"), found.pop("questions_missing")) == ("/c/a.json", 0)
    assert found == CERTIFICATE.model_dump(mode="json")
    rules = {"majority", "verifier"}
    assert {*keys_of(found), "path", "questions_missing"} - rules <= documented("calibrate")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--alpha 1", "alpha = 1.0, delta = 0.05: give both between 0 and 1"),
        ("--delta 0", "delta = 0.0"),
        ("--limit 0", "--limit 0: give a number of questions, at least 1"),
        ("--strategy direct", "--strategy 'direct' is not one of self-consistency, best-of-n"),
        ("--verifier rksc_agents.verify.checkers:game24", "is not one of self, judge, self-calibrated"),
        ("--branches 0", "branches"),
        ("--max-tokens 0", "max_tokens"),
        ("--temperature -1", "temperature"),
        ("--seed -1", "'--seed'"),
        ("--data no-such-file.jsonl", "no-such-file.jsonl cannot be read"),
    ],
)
def test_calibrate_refuses_before_a_model_is_loaded(
    fake: Calibrating, write: Write, options: str, message: str
) -> None:
    result = run("calibrate", "--data", write("a.jsonl", *many(2)), *options.split())
    assert (result.exit_code, result.stdout, fake.loaded) == (2, "", {})
    assert message in " ".join(result.stderr.split())


def test_calibrate_asks_for_a_file_and_for_matplotlib(
    fake: Calibrating, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("calibrate", "--alpha", "0.1")
    assert (result.exit_code, "--data" in result.stderr) == (2, True)
    monkeypatch.setattr(calibration, "find_spec", {"matplotlib": None}.get)
    result = run("calibrate", "--data", write("a.jsonl", *many(2)), "--plot", "a.svg")
    assert (result.exit_code, fake.loaded) == (2, {})
    assert "--plot needs matplotlib" in result.stderr


def test_a_terminal_sees_how_far_calibration_is(
    fake: Calibrating, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(SystemExit):
        app(["calibrate", "--data", str(write("a.jsonl", *many(2)))], prog_name="rksc")
    assert "questions" in screen.getvalue()
    assert "1/2" in screen.getvalue()


def test_calibration_end_to_end_on_a_tiny_model(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = scripted_tokenizer()
    model = tiny_model("Llama", vocab_size=len(tokenizer), num_hidden_layers=2)

    def load(name: str, gguf_file: str | None, *, sampling: dict[str, Any], exit: str) -> RKSCReasoner:
        engine = EngineConfig(kv_budget=2**26, fast_linears=False)
        drawn = Sampling(seed=3, **sampling)
        return RKSCReasoner.from_model(model, tokenizer, name=name, sampling=drawn, exit=exit, engine=engine)

    monkeypatch.setattr(common, "load_reasoner", load)
    data, out = write("a.jsonl", *many(24)), tmp_path / "out.json"
    options = ("--branches", 4, "--max-tokens", 3, "--alpha", 0.2, "--delta", 0.1, "--out", out, "--json")
    result = run("calibrate", "--data", data, "--model", "tiny", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    saved = Certificate.load(out)
    assert found.pop("path") == str(out)
    assert found.pop("questions_missing") == 0  # 16 questions test, and 11 without error would do
    assert found == saved.model_dump(mode="json")
    assert (saved.n, saved.total_layers, saved.model) == (16, 2, "tiny")
    told = {"strategy": "self-consistency", "vote": "verifier", "branches": 4, "temperature": 0.7, "max_tokens": 3}
    assert told.items() <= saved.strategy.items()
    assert {"top_p", "hints", "stop"} <= saved.strategy.keys()
    assert saved.labelled is not None
    assert saved.labelled.questions == 24


# -- bench --------------------------------------------------------------------------------------

SHARING = {
    "model": "m",
    "pairs": 2,
    "rows": [
        {"mode": "semantic", "reused": 1.0, "over_exact": 70.0, "kl_mean": 0.2, "kl_p95": 0.5, "agreement": 0.8,
         "same_answer": 0.5, "same_verdict": 1.0},
    ],
    "predictors": {"sigma": -0.25},
    "sigma_range": [0.95, 0.99],
}  # fmt: skip
RATE = {"errors": 1, "calls": 9, "error_rate": 1 / 9, "low": 0.0, "high": 0.4, "layers_saved": 0.3}
EXITS = {
    "model": "m",
    "verifier": "self",
    "depth": 3,
    "calls": 18,
    "yes": 0.5,
    "auc": {"a": 0.5},
    "level1": [
        {"gate": "strict", "confidence": 0.9, "gap": 0.1, "tasks": {"a": 0.5}, "skip_rate": 0.5, "skipped": 4,
         "best_of_n_errors": 1, "vote_errors": 0, "problems": 8},
    ],
    "raw": [{"theta": 0.3, "epsilon": 0.05, **RATE}],
    "fitted": [{"margin": 2.0, "exits": 0.5, **RATE, "layers_saved_by_pass": 0.1}],
    "certificates": [
        {"alpha": 0.05, "made_on": 4, "n": 3, "missing_for_alpha": 56, "confidence": None, "gap": 0.0, "margin": None,
         "work_saved": 0.0, "held_out": 4, "errors": 0, "error_rate": 0.0, "low": 0.0, "high": 0.6, "skip_rate": 0.0},
    ],
    "time": {"margin": 2.0, "questions": 3, "ratio": 1.1, "ratio_low": 1.0, "ratio_high": 1.2},
}  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    called: dict[str, Any] = {}

    def standing_in(result: dict[str, Any]) -> Callable[..., dict[str, Any]]:
        def measure(*args: Any, **settings: Any) -> dict[str, Any]:
            called.update(args=args, **settings)
            return result

        return measure

    monkeypatch.setattr("rksc_agents.bench.sharing.bench_sharing", standing_in(SHARING))
    monkeypatch.setattr("rksc_agents.bench.exits.bench_exits", standing_in(EXITS))
    return called


def phrased(count: int) -> list[dict[str, Any]]:
    return [{"question": f"q{i}", "prompts": [f"q{i}?", f"tell me: q{i}"]} for i in range(count)]


def test_bench_sharing(measured: dict[str, Any], write: Write) -> None:
    data = write("a.jsonl", *phrased(3))
    result = run("bench", "sharing", "--data", data)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "| semantic | 100.0% | +70.0 pp | 0.2000 | 0.5000 | 0.800 | 0.500 | 1.000 |" in result.stdout.splitlines()
    asked = [Question(f"q{i}", None, (f"q{i}?", f"tell me: q{i}")) for i in range(3)]
    assert measured == {"args": (DEFAULT_MODEL, asked), "firsts": (0, 4, 8, 16), "tokens": 64, "progress": None}
    options = "--model m --limit 2 --first 0 --first 5 --tokens 7 --json"
    found = json.loads(run("bench", "sharing", "--data", data, *options.split()).stdout)
    assert measured == {"args": ("m", asked[:2]), "firsts": [0, 5], "tokens": 7, "progress": None}
    assert found == SHARING
    assert set(keys_of(found)) - {"sigma"} <= documented("bench", "sharing")


def test_bench_exits(measured: dict[str, Any], write: Write) -> None:
    files = ("--data", write("a.jsonl", *many(30)), "--data", write("b.jsonl", *many(3)))
    result = run("bench", "exits", *files)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "| strict | 50.0% | 50.0% | 1 of 4 | 0 of 4 |" in result.stdout.splitlines()
    model, tasks = measured.pop("args")
    assert (model, {name: len(found) for name, found in tasks.items()}) == (DEFAULT_MODEL, {"a": 30, "b": 3})
    assert isinstance(measured["verifier"], ProbingVerifier)
    assert measured == {"verifier": SelfVerifier(), "branches": 4, "tokens": 48, "temperature": 0.7, "progress": None}
    options = "--model m --limit 5 --seed 2 --verifier self-calibrated --branches 2 --tokens 7 --temperature 0.2 --json"
    found = json.loads(run("bench", "exits", *files, *options.split()).stdout)
    model, drawn = measured.pop("args")
    asked = {"verifier": SelfVerifier(calibrated=True), "branches": 2, "tokens": 7, "temperature": 0.2}
    assert measured == {**asked, "progress": None}
    assert (model, drawn["b"]) == ("m", tasks["b"])
    assert len(drawn["a"]) == 5
    assert drawn["a"] != tasks["a"][:5]
    assert found == EXITS
    assert set(keys_of(found)) - {"a"} <= documented("bench", "exits")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["sharing", "--data", "a.jsonl"], "question 2 of a.jsonl has 1 `prompts`: give each question a list of two"),
        (["sharing", "--data", "b.jsonl", "--first", "-1"], "'--first'"),
        (["sharing", "--data", "b.jsonl", "--tokens", "0"], "'--tokens'"),
        (["sharing"], "--data"),
        (["exits", "--data", "a.jsonl", "--data", "c/a.jsonl"], "two files are called 'a', and results go by name"),
        (["exits", "--data", "a.jsonl", "--verifier", "me"], "--verifier 'me' is not one of self, judge"),
        (["exits", "--data", "a.jsonl", "--branches", "0"], "'--branches'"),
        (["exits", "--data", "a.jsonl", "--limit", "0"], "limit = 0"),
    ],
)
def test_bench_refuses_before_a_model_is_loaded(
    measured: dict[str, Any],
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    write("a.jsonl", phrased(1)[0], {"question": "q", "prompts": ["alone"]})
    write("b.jsonl", *phrased(1))
    monkeypatch.chdir(tmp_path)
    result = run("bench", *args)
    assert (result.exit_code, result.stdout, measured) == (2, "", {})
    assert message in " ".join(result.stderr.split())


def test_bench_shows_its_progress_in_a_terminal(
    measured: dict[str, Any], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    for name, records in (("sharing", phrased(2)), ("exits", many(2))):
        with pytest.raises(SystemExit):
            app(["bench", name, "--data", str(write("a.jsonl", *records))], prog_name="rksc")
        assert callable(measured["progress"])


def test_a_lens_of_a_certificate_is_one() -> None:
    assert FittedLens.from_json(LENS).layers == (1,)
