"""What the command line prints, where, and with which exit code; the reasoner is scripted."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support import keys_of
from transformers.utils import logging
from typer.testing import CliRunner, Result

from rksc_agents import cli
from rksc_agents.cli import common, housekeeping, plans
from rksc_agents.config import DEFAULT_MODEL, EngineConfig, Sampling, Sharing
from rksc_agents.errors import (
    ConfigError,
    ConversionError,
    EngineError,
    KVBudgetError,
    ModelLoadError,
    PromptTooLongError,
    RKSCError,
)
from rksc_agents.events import Answer, BranchEnd, BranchToken, BranchVerified, Event, VoteChanged
from rksc_agents.model import loader
from rksc_agents.printable import clean, one_line, size
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.reasoning import STRATEGIES, BestOfN, SelfConsistency, Strategy, TreeOfThought
from rksc_agents.report.terminal import BranchView, facts, plain, summary
from rksc_agents.result import ReasoningResult
from rksc_agents.types import (
    Branch,
    KVUsage,
    Quantization,
    SharingRecord,
    Timings,
    Usage,
    Verdict,
    VerificationUsage,
    Vote,
)
from rksc_agents.verify.callable_verifier import CallableVerifier
from rksc_agents.verify.certificate import Certificate
from rksc_agents.verify.checkers import game24
from rksc_agents.verify.gates import PRESETS
from rksc_agents.verify.judge import JudgeVerifier
from rksc_agents.verify.self_verifier import SelfVerifier

HOSTILE = "[red]x[/red] \x1b[2Jgone\x07 \x9b31m\u202eright\rleft"
HARMLESS = "[red]x[/red] [2Jgone 31mrightleft"

RESULT = ReasoningResult(
    answer="72",
    text="April 48.\nMay 24, so 72.",
    strategy="self-consistency",
    branches=(
        Branch(
            text="It is 70.", tokens=(1, 2), logprobs=(-0.5, -0.25), confidence=0.5, finish_reason="eos", answer="70"
        ),
        Branch(
            text="April 48.\nMay 24, so 72.",
            thinking="hm",
            tokens=(3, 4, 5),
            logprobs=(-0.1, -0.2, -0.3),
            confidence=0.9,
            finish_reason="stop",
            answer="72",
        ),
        Branch(text="72", tokens=(6,), logprobs=(-0.1,), confidence=0.8, finish_reason="length", answer="72"),
        Branch(text="?", tokens=(7,), logprobs=(-0.1,), confidence=0.1, finish_reason="cancelled"),
    ),
    winner=1,
    votes=(Vote(answer="72", weight=2, branches=(1, 2)), Vote(answer="70", weight=1, branches=(0,))),
    usage=Usage(
        prompt_tokens=60,
        prompt_tokens_computed=20,
        prompt_tokens_reused=40,
        completion_tokens=7,
        completion_tokens_winner=3,
    ),
    kv=KVUsage(peak_bytes=1 << 20, bytes_if_copied=4 << 20, tokens_shared=180, evicted=2, recomputed=5),
    timings=Timings(queue_s=0.25, prefill_s=0.5, decode_s=1.25, total_s=2.0),
)

_EXACT = SharingRecord(sigma=1.0, reused=20, recomputed=40)
_TAKEN = SharingRecord(mode="semantic", sigma=0.98765, reused=60, recomputed=0, kl=0.25, agreement=0.875)
_VERDICTS = (
    Verdict(score=0.25, layers=30, tokens_computed=21),
    Verdict(score=0.75, exit_layer=12, layers=20, tokens_computed=21),
    Verdict(skipped=True),
    None,
)
TREE = RESULT.model_copy(
    update={
        "quantization": Quantization(layers=211, divergence=0.00447, agreement=0.9485),
        "strategy": "tree-of-thought",
        "rule": "verifier",
        "branches": tuple(
            branch.model_copy(update={"depth": at, "parent": at - 1 if at else None, "sharing": taken, "verdict": said})
            for at, (branch, taken, said) in enumerate(
                zip(RESULT.branches, (_EXACT, _TAKEN, _EXACT, _EXACT), _VERDICTS, strict=True)
            )
        ),
        "verification": VerificationUsage(
            verifier="self",
            exit="certificate",
            verified=2,
            skipped=1,
            exited=1,
            tokens_computed=42,
            layers=50,
            layers_full=60,
        ),
    }
)

EVENTS: tuple[Event, ...] = (
    BranchToken(0, 1, "It is "),
    BranchToken(1, 3, "April 48.\n"),
    BranchToken(0, 2, "70."),
    BranchEnd(0, "eos", "It is 70.", "70"),
    VoteChanged((Vote(answer="70", weight=1, branches=(0,)),)),
    Answer(RESULT),
)


@dataclass
class FakeReasoner:
    """Yields scripted events and remembers how it was called."""

    result: ReasoningResult = RESULT
    events: tuple[Event, ...] = EVENTS
    error: BaseException | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def reason(self, question: Any, *, strategy: Any, **sampling: Any) -> ReasoningResult:
        self.calls.append({"question": question, "strategy": strategy, **sampling})
        if self.error is not None:
            raise self.error
        return self.result

    def stream(self, question: Any, *, strategy: Any, **sampling: Any) -> Iterator[Event]:
        self.calls.append({"question": question, "strategy": strategy, **sampling})
        for event in self.events:
            yield event
            if self.error is not None:
                raise self.error


Install = Callable[..., FakeReasoner]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(**fields: Any) -> FakeReasoner:
        reasoner = FakeReasoner(**fields)

        def load(model: str, gguf_file: str | None, *, engine: Any, exit: Any) -> FakeReasoner:
            engine_given = {"kv_budget": engine.kv_budget, "int8": engine.int8}
            reasoner.calls.append({"model": model, "gguf_file": gguf_file, "exit": exit, **engine_given})
            return reasoner

        monkeypatch.setattr(common, "load_reasoner", load)
        return reasoner

    return install


def run(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli.app, args, input=stdin, prog_name="rksc")


def test_a_pipe_gets_the_same_facts_in_stable_lines(fake: Install) -> None:
    reasoner = fake()
    result = run("ask", "How many?")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "answer: 72",
        "text:",
        "  April 48.",
        "  May 24, so 72.",
        "strategy: self-consistency, branches 4, winner 1",
        "branch 0: eos, tokens 2, confidence 0.5000, answer 70",
        "branch 1: stop, tokens 3, confidence 0.9000, answer 72",
        "branch 2: length, tokens 1, confidence 0.8000, answer 72",
        "branch 3: cancelled, tokens 1, confidence 0.1000, answer none",
        "vote: 72, weight 2, branches 1 2",
        "vote: 70, weight 1, branches 0",
        "tokens: prompt 60 (20 computed, 40 reused), completion 7 (3 by the winner)",
        "kv: peak 1.0 MiB, 4.0 MiB if copied (75% saved), 180 tokens shared, 2 nodes evicted, 5 tokens recomputed",
        "time: 2.00 s in all, 0.25 s queued, prefill 0.50 s, decode 1.25 s, verify 0.00 s",
    ]
    assert reasoner.closed


def test_a_pipe_gets_what_is_special_about_branches_and_verification(fake: Install) -> None:
    fake(result=TREE)
    assert run("ask", "How many?").stdout.splitlines()[4:] == [
        "strategy: tree-of-thought, branches 4, winner 1, rule verifier",
        "branch 0: eos, tokens 2, confidence 0.5000, answer 70",
        "verdict 0: score 0.2500, layers 30, tokens 21",
        "branch 1: stop, tokens 3, confidence 0.9000, answer 72",
        "place 1: depth 1, parent 0",
        "verdict 1: score 0.7500, exit layer 12 of 30, layers 20, tokens 21",
        "sharing 1: semantic, reused 60, recomputed 0, sigma 0.9877, kl 0.2500, agreement 0.8750",
        "branch 2: length, tokens 1, confidence 0.8000, answer 72",
        "place 2: depth 2, parent 1",
        "verdict 2: skipped",
        "branch 3: cancelled, tokens 1, confidence 0.1000, answer none",
        "place 3: depth 3, parent 2",
        "vote: 72, weight 2, branches 1 2",
        "vote: 70, weight 1, branches 0",
        "tokens: prompt 60 (20 computed, 40 reused), completion 7 (3 by the winner)",
        "kv: peak 1.0 MiB, 4.0 MiB if copied (75% saved), 180 tokens shared, 2 nodes evicted, 5 tokens recomputed",
        "verification: self, exit certificate, 2 verified, 1 skipped, 1 exited early, 42 tokens, layers 50 of 60 "
        "(17% saved)",
        "quantization: int8, 211 layers, divergence 0.0045, agreement 0.949",
        "time: 2.00 s in all, 0.25 s queued, prefill 0.50 s, decode 1.25 s, verify 0.00 s",
    ]


def test_an_audit_of_exact_sharing_is_told(fake: Install) -> None:
    record = SharingRecord(sigma=1.0, reused=3, recomputed=1, kl=0.0, agreement=1.0)
    branch = RESULT.branches[0].model_copy(update={"sharing": record})
    fake(result=RESULT.model_copy(update={"branches": (branch,)}))
    assert (
        "sharing 0: exact, reused 3, recomputed 1, sigma 1.0000, kl 0.0000, agreement 1.0000" in run("ask", "q").stdout
    )


def test_a_verifier_without_layers_claims_no_saving(fake: Install) -> None:
    branch = RESULT.branches[0].model_copy(update={"verdict": Verdict(score=1.0)})
    used = VerificationUsage(verifier="f", exit="off", verified=1)
    fake(result=RESULT.model_copy(update={"branches": (branch,), "verification": used}))
    lines = run("ask", "q").stdout.splitlines()
    assert "verdict 0: score 1.0000" in lines
    assert "verification: f, exit off, 1 verified, 0 skipped, 0 exited early, 0 tokens, layers 0 of 0" in lines


def test_json_is_one_object_with_every_fact(fake: Install) -> None:
    fake()
    result = run("ask", "How many?", "--json")
    assert result.stdout.count("\n") == 1
    assert result.stdout.endswith("\n")
    assert json.loads(result.stdout) == RESULT.model_dump(mode="json")


def test_json_keys_are_the_documented_ones(fake: Install) -> None:
    fake(result=TREE)
    found = json.loads(run("ask", "q", "--json").stdout)
    names = set(keys_of(found))
    assert {"answer", "winner", "finish_reason", "prompt_tokens_reused", "bytes_if_copied", "exit_layer"} <= names
    help_text = run("ask", "--help").stdout
    documented = help_text[help_text.index("keys of --json") : help_text.index("Arguments:")]
    assert names | {"ids", "each", "keys", "of", "json", "with"} == set(re.findall(r"\w+", documented))


def test_json_stays_ascii_and_valid_for_hostile_text(fake: Install) -> None:
    fake(result=RESULT.model_copy(update={"text": HOSTILE}))
    out = run("ask", "q", "--json").stdout
    assert out.strip().isprintable()
    assert out.isascii()
    assert json.loads(out)["text"] == HOSTILE


def test_quiet_prints_the_answer_only(fake: Install) -> None:
    fake()
    assert run("ask", "q", "--quiet").stdout == "72\n"


def test_quiet_prints_the_text_where_no_answer_was_found(fake: Install) -> None:
    fake(result=RESULT.model_copy(update={"answer": None}))
    assert run("ask", "q", "-q").stdout == "April 48.\nMay 24, so 72.\n"


def test_hostile_text_reaches_a_pipe_as_harmless_letters(fake: Install) -> None:
    branch = Branch(text=HOSTILE, tokens=(1,), logprobs=(0.0,), confidence=1, finish_reason="eos", answer=HOSTILE)
    changes = {"text": HOSTILE, "answer": HOSTILE, "branches": (branch,)}
    fake(result=RESULT.model_copy(update={**changes, "votes": (Vote(answer=HOSTILE, weight=1, branches=(0,)),)}))
    for flags in ((), ("--quiet",)):
        lines = run("ask", "q", *flags).stdout.splitlines()
        assert "[red]x[/red] [2Jgone 31mright" in lines[0]
        assert all(line.isprintable() and "\u202e" not in line for line in lines)


def test_a_model_cannot_write_a_line_that_reads_like_ours(fake: Install) -> None:
    fake(result=RESULT.model_copy(update={"text": "so\nanswer: 99\rvote: 99", "answer": "72\nvote: 99"}))
    lines = run("ask", "q").stdout.splitlines()
    assert [line for line in lines if line.startswith(("answer:", "vote:"))] == [
        "answer: 72 vote: 99",
        "vote: 72, weight 2, branches 1 2",
        "vote: 70, weight 1, branches 0",
    ]


def test_only_the_sampling_that_was_given_overrides(fake: Install) -> None:
    reasoner = fake()
    assert run("ask", "q").exit_code == 0
    loaded, asked = reasoner.calls
    assert loaded == {
        "model": DEFAULT_MODEL,
        "gguf_file": None,
        "kv_budget": None,
        "int8": False,
        "exit": "auto",
    }
    assert set(asked) == {"question", "strategy"}
    assert asked["question"] == "q"


def test_every_option_arrives(fake: Install) -> None:
    reasoner = fake()
    options = (
        "--model m --gguf-file f.gguf --strategy best-of-n --branches 3 --max-tokens 9 --temperature 0 --top-p 0.9"
    )
    more = "--top-k 5 --min-p 0.1 --seed 7 --kv-budget 1048576 --int8 --system Be-brief --exit off"
    more += " --sharing semantic --audit"
    put = ("--phrasing", "q?", "--phrasing", "q!", "--stop", "Q:", "--stop", "\n\n")
    result = run("ask", "q", *options.split(), *more.split(), *put)
    assert result.exit_code == 0, result.output
    loaded, asked = reasoner.calls
    assert loaded == {"model": "m", "gguf_file": "f.gguf", "kv_budget": 1048576, "int8": True, "exit": "off"}
    plan = asked.pop("strategy")
    assert isinstance(plan, STRATEGIES["best-of-n"])
    assert plan.branches == 3
    assert asked == {
        "question": [{"role": "system", "content": "Be-brief"}, {"role": "user", "content": "q"}],
        "phrasings": [
            [{"role": "system", "content": "Be-brief"}, {"role": "user", "content": "q?"}],
            [{"role": "system", "content": "Be-brief"}, {"role": "user", "content": "q!"}],
        ],
        "sharing": Sharing(mode="semantic", audit=True),
        "max_tokens": 9,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "stop": ("Q:", "\n\n"),
        "seed": 7,
    }


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ("", SelfConsistency()),
        ("--branches 3 --vote mbr --hint a --hint b", SelfConsistency(branches=3, vote="mbr", hints=("a", "b"))),
        ("--vote verifier --verifier judge", SelfConsistency(vote="verifier", verifier=JudgeVerifier())),
        ("--strategy direct", STRATEGIES["direct"]()),
        (
            "--strategy best-of-n --score verifier --verifier self-calibrated",
            BestOfN(score="verifier", verifier=SelfVerifier(calibrated=True)),
        ),
        (
            "--strategy tree-of-thought --proposals 3 --breadth 2 --depth 5 --search dfs --delimiter ;",
            TreeOfThought(proposals=3, breadth=2, depth=5, search="dfs", delimiter=";"),
        ),
        (
            "--strategy tree-of-thought --verifier rksc_agents.verify.checkers:game24",
            TreeOfThought(verifier=CallableVerifier(game24, name="rksc_agents.verify.checkers:game24")),
        ),
        (
            "--strategy beam-search --beams 2 --expansions 3 --depth 6 --delimiter ; --verifier self",
            STRATEGIES["beam-search"](beams=2, expansions=3, depth=6, delimiter=";", verifier=SelfVerifier()),
        ),
    ],
)
def test_options_make_the_strategy(fake: Install, options: str, plan: Strategy) -> None:
    reasoner = fake()
    result = run("ask", "q", *options.split())
    assert result.exit_code == 0, result.output
    assert reasoner.calls[1]["strategy"] == plan


@pytest.mark.parametrize(
    ("options", "sharing"),
    [("--sharing aligned", Sharing(mode="aligned")), ("--audit", Sharing(audit=True)), ("--sharing exact", Sharing())],
)
def test_sharing_is_the_reasoners_own_unless_given(fake: Install, options: str, sharing: Sharing) -> None:
    reasoner = fake()
    assert run("ask", "q", "--phrasing", "p", *options.split()).exit_code == 0
    assert reasoner.calls[1]["phrasings"] == ["p"]
    assert reasoner.calls[1]["sharing"] == sharing


def test_what_help_lists_without_torch_is_what_there_is() -> None:
    assert tuple(STRATEGIES) == plans.STRATEGY_NAMES
    assert plans.Vote == SelfConsistency.model_fields["vote"].annotation
    assert plans.SearchName == TreeOfThought.model_fields["search"].annotation
    assert plans.ScoreName == get_args(BestOfN.model_fields["score"].annotation)[0]
    assert f"[auto|{'|'.join(PRESETS)}|FILE]" in run("ask", "--help").stdout


def test_a_certificate_is_read_before_a_model_is_loaded(fake: Install, tmp_path: Path) -> None:
    made = Certificate(
        model="m",
        model_hash="a",
        prompt_hash="b",
        verifier="self",
        measure="mean-top-probability",
        alpha=0.1,
        delta=0.1,
        n=30,
        errors=0,
        p_value=0.04,
        total_layers=3,
        skip_rate=0.5,
        layers_saved=0.0,
        work_saved=0.5,
        created="2026-01-02T03:04:05+00:00",
    )
    made.save(tmp_path / "made.json")
    reasoner = fake()
    assert run("ask", "q", "--exit", str(tmp_path / "made.json")).exit_code == 0
    assert reasoner.calls[0]["exit"] == made


def test_a_budget_below_one_is_a_share(fake: Install) -> None:
    reasoner = fake()
    run("ask", "q", "--kv-budget", "0.25")
    assert reasoner.calls[0]["kv_budget"] == 0.25


def test_a_dash_reads_the_question_from_standard_input(fake: Install) -> None:
    reasoner = fake()
    assert run("ask", "-", stdin="\ufeffWie viele Äpfel?\n").exit_code == 0
    assert reasoner.calls[1]["question"] == "Wie viele Äpfel?"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["q", "--strategy", "vote"], "--strategy 'vote' is not one of " + ", ".join(STRATEGIES)),
        (["q", "--json", "--quiet"], "--json and --quiet exclude each other"),
        (["  "], "the question is empty"),
        (["-"], "the question is empty"),
        (["q", "--kv-budget", "plenty"], "--kv-budget 'plenty' is no number"),
        (["q", "--branches", "many"], "'--branches'"),
        (["q\udcff"], "QUESTION is not UTF-8 at character 1"),
        (["q", "--system", "\udcff"], "--system is not UTF-8"),
        (["q", "--stop", "a\udcff"], "--stop is not UTF-8 at character 1"),
        (["q", "--no-such-option"], "--no-such-option"),
        (["q", "--phrasing", " "], "--phrasing is empty: give a text"),
        (["q", "--phrasing", "\udcff"], "--phrasing is not UTF-8"),
        (["q", "--hint", "\udcff"], "--hint is not UTF-8"),
        (["q", "--strategy", "beam-search", "--delimiter", "\udcff"], "--delimiter is not UTF-8"),
        (["q", "--vote", "loudest"], "'loudest' is not one of 'auto', 'majority'"),
        (["q", "--sharing", "some"], "'some' is not one of 'exact', 'aligned', 'semantic'"),
        (["q", "--exit", "early"], "--exit 'early' is not one of auto, off, strict, paper, and no such file"),
        (["q", "--vote", "verifier", "--verifier", "me"], "--verifier 'me' is not one of self, judge, self-calibrated"),
        (["q", "--verifier", "self"], "--verifier has no use in self-consistency without --vote verifier"),
        (
            ["q", "--strategy", "best-of-n", "--score", "confidence", "--verifier", "self"],
            "--verifier has no use in best-of-n without --score verifier",
        ),
        (["q", "--strategy", "direct", "--branches", "4"], "--branches is not for --strategy direct"),
        (["q", "--strategy", "direct", "--verifier", "self"], "--strategy direct, which takes no settings"),
        (
            ["q", "--strategy", "best-of-n", "--vote", "mbr", "--hint", "h"],
            "--vote, --hint is not for --strategy best-of-n, which takes --branches, --score, --verifier",
        ),
        (
            ["q", "--branches", "2", "--strategy", "tree-of-thought"],
            "which takes --proposals, --breadth, --search, --depth, --delimiter, --verifier",
        ),
        ([], "question"),
    ],
)
def test_wrong_usage_exits_2_before_a_model_is_loaded(fake: Install, args: list[str], message: str) -> None:
    reasoner = fake()
    result = run("ask", *args)
    assert (result.exit_code, result.stdout, reasoner.calls) == (2, "", [])
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--top-p", "1.5"], "top_p"),
        (["--seed", "-1"], "seed"),
        (["--stop", ""], "stop"),
        (["--kv-budget", "0"], "kv_budget"),
        (["--branches", "0"], "branches"),
        (["--strategy", "tree-of-thought", "--depth", "0"], "depth"),
        (["--vote", "verifier", "--verifier", "no_such_module:f"], "no_such_module"),
        (["--exit", str(Path(__file__))], "is not JSON"),
    ],
)
def test_a_value_out_of_range_is_one_line_before_a_model_is_loaded(
    fake: Install, args: list[str], message: str
) -> None:
    reasoner = fake()
    result = run("ask", "q", *args)
    assert (result.exit_code, result.stdout, reasoner.calls) == (2, "", [])
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_standard_input_that_is_no_text_is_refused(fake: Install) -> None:
    reasoner = fake()
    result = run("ask", "-", stdin=b"ab\xff")
    assert (result.exit_code, reasoner.calls) == (2, [])
    assert "standard input is not UTF-8 at byte 2" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad\nvalue \x1b[1m"), 2),
        (PromptTooLongError(10, 5), 2),
        (KVBudgetError(10, 5), 1),
        (ModelLoadError("no file"), 1),
        (ConversionError("disk full"), 1),
        (EngineError("broken"), 1),
        (RKSCError("anything"), 1),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(fake: Install, error: RKSCError, code: int) -> None:
    reasoner = fake(error=error)
    result = run("ask", "q", "--json")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == f"error: {one_line(str(error))}\n"
    assert "\x1b" not in result.stderr
    assert reasoner.closed


def test_an_interrupt_exits_130_and_closes_the_reasoner(fake: Install) -> None:
    reasoner = fake(error=KeyboardInterrupt())
    result = run("ask", "q")
    assert (result.exit_code, result.output) == (130, "")
    assert reasoner.closed


def test_a_warning_is_one_line_on_stderr(fake: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    reasoner = fake()
    before = warnings.showwarning

    def load(*_: object, **__: object) -> FakeReasoner:
        warnings.simplefilter("always")
        warnings.warn("no chat template", stacklevel=1)
        return reasoner

    monkeypatch.setattr(common, "load_reasoner", load)
    result = run("ask", "q", "-q")
    assert (result.stdout, result.stderr) == ("72\n", "warning: no chat template\n")
    assert warnings.showwarning is before


@pytest.mark.parametrize("watched", [True, False])
def test_progress_of_loading_is_shown_on_stderr_in_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    stderr, hidden = Terminal() if watched else io.StringIO(), []

    def load(model: str, *, gguf_file: str | None, engine: EngineConfig, progress: Any) -> tuple[object, ...]:
        if progress is not None:
            progress(f"loading\n{model} \x1b[2J")
        return model, gguf_file, engine

    monkeypatch.setattr(RKSCReasoner, "from_pretrained", load)
    monkeypatch.setattr(logging, "disable_progress_bar", lambda: hidden.append(True))
    monkeypatch.setattr(sys, "stderr", stderr)
    engine = EngineConfig()
    assert common.load_reasoner("m", "f", engine=engine) == ("m", "f", engine)
    assert stderr.getvalue() == ("loading m [2J\n" if watched else "")
    assert hidden == ([] if watched else [True])


def test_given_sampling_changes_what_the_model_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(generation_config=SimpleNamespace(do_sample=True, temperature=0.3, top_k=20))
    loaded = SimpleNamespace(model=own, tokenizer="tokenizer", name="name")
    called: dict[str, Any] = {}
    monkeypatch.setattr(loader, "load_model", lambda model, **given: called.update(model=model, **given) or loaded)
    monkeypatch.setattr(RKSCReasoner, "from_model", lambda *given, **settings: (given, settings))
    given, settings_ = common.load_reasoner("m", "f", sampling={"max_tokens": 7}, exit="off")
    assert called == {"model": "m", "gguf_file": "f", "progress": None}
    assert given == (own, "tokenizer")
    assert settings_ == {"name": "name", "sampling": Sampling(temperature=0.3, top_k=20, max_tokens=7), "exit": "off"}


def test_progress_bars_are_for_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with common.progress_bars() as show:
        assert show is None
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setattr(sys, "stderr", screen)
    with common.progress_bars() as show:
        assert show is not None
        show("[red]a\n\x1b[2Jb", 2, 5)
        show("second", 1, 3)
        show("second", 3, 3)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "[red]a [2Jb" in drawn
    assert re.search(r"\[red\]a \[2Jb \S+ 2/5 ", drawn)
    assert re.search(r"second +\S+ 3/3 ", drawn)
    assert "\x1b[2Jb" not in screen.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def live(monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str]:
    """Run a command with a terminal as standard output; return its exit code and what was drawn."""
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setattr(sys, "stdout", screen)
    with pytest.raises(SystemExit) as exited:
        cli.app(args, prog_name="rksc")
    return int(exited.value.code or 0), screen.getvalue()


def test_a_terminal_shows_the_branches_and_then_the_evidence(fake: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    reasoner = fake()
    code, drawn = live(monkeypatch, "ask", "q")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    assert code == 0
    assert reasoner.closed
    assert "0 eos           2 = 70 It is 70." in text
    assert "1 writing       1 April 48." in text
    assert "answer  72" in text
    assert "75% saved" in text
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1  # the cursor comes back


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (EngineError("broken"), 1)])
def test_a_terminal_is_left_in_order_when_a_run_breaks(
    fake: Install, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    reasoner = fake(error=error)
    exit_code, drawn = live(monkeypatch, "ask", "q")
    assert exit_code == code
    assert reasoner.closed
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1


def test_a_stream_without_an_answer_is_an_error(
    fake: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(events=EVENTS[:-1])
    assert live(monkeypatch, "ask", "q")[0] == 1
    assert capsys.readouterr().err.startswith("error: the run ended without an answer")


@pytest.mark.parametrize("flag", ["--json", "--quiet"])
def test_a_terminal_gets_no_drawing_where_none_is_wanted(
    fake: Install, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    fake()
    code, drawn = live(monkeypatch, "ask", "q", flag)
    assert code == 0
    assert "\x1b" not in drawn


def render(view: Any, width: int = 60) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


def test_the_view_starts_with_the_prompt() -> None:
    assert render(BranchView()) == ["reading the prompt"]


def test_the_view_shows_votes_first_and_a_line_per_branch() -> None:
    view = BranchView()
    for event in EVENTS:
        view.feed(event)
    assert [line.rstrip() for line in render(view)] == [
        "votes: 70 (1)",
        "0 eos           2 = 70 It is 70.",
        "1 writing       1 April 48.",
    ]


def test_the_view_shows_verdicts_as_they_arrive() -> None:
    view = BranchView()
    for index, (reason, verdict) in enumerate(
        [("unsure", Verdict(score=0.123, layers=3)), ("eos", Verdict(skipped=True))],
    ):
        view.feed(BranchEnd(index, reason, "so", "72"))
        view.feed(BranchVerified(index, verdict))
    assert [line.rstrip() for line in render(view)] == [
        "0 unsure        0 = 72 (0.12) so",
        "1 eos           0 = 72 (skipped) so",
    ]


@settings(deadline=None)
@given(st.text(max_size=200), st.integers(30, 120))
def test_a_branch_takes_one_line_whatever_it_writes(text: str, width: int) -> None:
    view = BranchView()
    view.feed(BranchToken(3, 1, text))
    lines = render(view, width)
    assert len(lines) == 1
    assert "\x1b" not in lines[0]


def test_a_long_branch_shows_its_end() -> None:
    view = BranchView()
    view.feed(BranchToken(0, 1, "start " + "x" * 1000 + " the end"))
    (line,) = render(view, 40)
    assert line.endswith("xx the end")
    assert len(line) == 40


def test_the_view_and_the_summary_take_hostile_text_as_letters() -> None:
    view = BranchView()
    view.feed(BranchToken(0, 1, HOSTILE[: HOSTILE.index("\x1b") + 1]))  # a sequence split between tokens
    view.feed(BranchToken(0, 1, HOSTILE[HOSTILE.index("\x1b") + 1 :]))
    view.feed(VoteChanged((Vote(answer=HOSTILE, weight=1, branches=(0,)),)))
    votes = (Vote(answer=HOSTILE, weight=1, branches=(0,)),)
    result = RESULT.model_copy(update={"text": HOSTILE, "answer": HOSTILE, "votes": votes})
    for lines, places in ((render(view, 120), 2), (render(summary(result), 120), 3)):
        assert sum("[red]x[/red] [2Jgone 31mright" in line for line in lines) == places
        assert all(line.isprintable() and "\u202e" not in line for line in lines)


def test_the_summary_draws_bars_in_proportion() -> None:
    lines = render(summary(RESULT), 100)
    assert [line.count("█") for line in lines if "█" in line] == [24, 12]


def test_the_summary_tells_the_rule_and_what_is_special_about_branches() -> None:
    lines = [line.rstrip() for line in render(summary(TREE), 120)]
    assert "answer        72  by verifier" in lines
    assert "branch 1      place: depth 1, parent 0" in lines
    assert "branch 1      verdict: score 0.7500, exit layer 12 of 30, layers 20, tokens 21" in lines
    assert "branch 2      verdict: skipped" in lines
    assert sum(line.startswith("branch") and "sharing: " in line for line in lines) == 1
    assert any(line.startswith("verification  self, exit certificate, 2 verified") for line in lines)
    lone = RESULT.branches[0].model_copy(update={"parent": 0, "depth": 1})
    lines = [line.rstrip() for line in render(summary(RESULT.model_copy(update={"branches": (lone,) * 11})), 120)]
    assert "branch 10  place: depth 1, parent 0" in lines
    assert "answer     72" in lines
    assert not [line for line in render(summary(RESULT), 120) if line.startswith(("branch", "verification"))]


def test_no_share_is_claimed_where_nothing_was_held() -> None:
    lines = list(plain(RESULT.model_copy(update={"kv": KVUsage()})))
    assert "kv: peak 0 B, 0 B if copied, 0 tokens shared, 0 nodes evicted, 0 tokens recomputed" in lines


@settings(deadline=None)
@given(st.text())
def test_clean_keeps_text_and_drops_control(text: str) -> None:
    cleaned = clean(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", cleaned)
    assert clean(cleaned) == cleaned
    kept = [c for c in text if c.isprintable()]
    assert [c for c in cleaned if c.isprintable()] == kept
    assert "\n" not in one_line(text)


def test_clean_keeps_joined_emoji_and_drops_what_moves_the_cursor() -> None:
    assert clean("👩\u200d🚀 é\tб\n") == "👩\u200d🚀 é\tб\n"
    assert one_line(HOSTILE) == "[red]x[/red] [2Jgone 31mright left"
    assert clean("\udcff-\u200f-") == "-\u200f-"  # half a character goes, the mark of right-to-left text stays
    assert clean(HOSTILE) == HARMLESS


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
    ],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_facts_flatten_and_clean() -> None:
    found = facts({"device": "cpu", "torch": {"threads": 2, "isa": ["avx2", "f\x1b16c"]}, "amx": False, "model": None})
    assert list(found) == ["device: cpu", "torch.threads: 2", "torch.isa: avx2, f16c", "amx: no", "model: none"]


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"device": "cpu", "features": {"bf16": False}}
    monkeypatch.setattr(housekeeping, "examine", lambda: found)
    assert run("doctor").stdout == "device: cpu\nfeatures.bf16: no\n"
    assert json.loads(run("doctor", "--json").stdout) == found


def test_cache_show_and_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        SimpleNamespace(
            name="smol", path=Path("/c/smol"), bytes=2048, created=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
        ),
        SimpleNamespace(
            name="other", path=Path("/c/other"), bytes=1024, created=datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC)
        ),
    ]
    monkeypatch.setattr(housekeeping, "copies", lambda: SimpleNamespace(entries=lambda: entries, clear=lambda: 3072))
    assert run("cache", "show").stdout.splitlines() == [
        "smol: 2.0 KiB, 2026-01-02T03:04:05+00:00, /c/smol",
        "other: 1.0 KiB, 2026-01-02T03:04:06+00:00, /c/other",
        "total: 3.0 KiB in 2 converted copies",
    ]
    shown = json.loads(run("cache", "show", "--json").stdout)
    assert shown["bytes"] == 3072
    assert shown["entries"][0] == {
        "name": "smol",
        "path": "/c/smol",
        "bytes": 2048,
        "created": "2026-01-02T03:04:05+00:00",
    }
    assert run("cache", "clear").stdout == "freed: 3.0 KiB\n"
    assert json.loads(run("cache", "clear", "--json").stdout) == {"bytes_freed": 3072}


def test_version_and_help_name_what_there_is() -> None:
    assert re.fullmatch(r"rksc \d+\.\d+\.\d+\S*\n", run("--version").stdout)
    listed = run("--help").stdout
    for command in ("ask", "calibrate", "doctor", "cache", "bench"):
        assert re.search(rf"^  {command}\b", listed, re.M)
    assert f"[{'|'.join(STRATEGIES)}]" in run("ask", "--help").stdout


def test_a_closed_pipe_leaves_no_traceback() -> None:
    lines = (
        "from rksc_agents import cli; from rksc_agents.cli import housekeeping; "
        "housekeeping.examine = lambda: {i: 'x' * 99 for i in range(9999)}; cli.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", lines, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"0: x")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1
