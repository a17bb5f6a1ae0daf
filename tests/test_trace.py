"""Traces: what they record of a run, that they survive JSON, and what their drawings hold."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rksc_agents import BestOfN, ConfigError, SelfConsistency, Trace, TreeOfThought
from rksc_agents.cli import app
from rksc_agents.result import ReasoningResult
from rksc_agents.testing import scripted_reasoner
from rksc_agents.trace import VERSION, KVSample, Span, TraceNode
from rksc_agents.trace.page import page
from rksc_agents.trace.pictures import tree
from rksc_agents.types import KVUsage, SharingRecord, Timings, Usage, Verdict, VerificationUsage, Vote
from rksc_agents.verify.callable_verifier import CallableVerifier

HOSTILE = "</script><img src=x onerror=alert(1)>\"'`{{7*7}}[red]\x1b[2J\u202e--><svg onload=alert(2)>"


def node(index: int, *, parent: int | None = None, said: str = "It is 72.", **changed: Any) -> TraceNode:
    words = [word + " " for word in said.split(" ")]
    values: dict[str, Any] = {
        "text": said,
        "tokens": tuple(range(len(words))),
        "logprobs": tuple(-0.1 for _ in words),
        "confidence": (index % 11) / 10,
        "finish_reason": "eos",
        "answer": "72",
        "parent": parent,
        "state": "finished",
        "pieces": tuple(words),
        "confidences": tuple(at / len(words) for at in range(len(words))),
        "kv_bytes": 46_080 * len(words),
        "start_s": 0.1 * index,
        "end_s": 0.1 * index + 1,
    }
    return TraceNode(index=index, **{**values, **changed})


def trace(*nodes: TraceNode, **changed: Any) -> Trace:
    end = max(one.end_s for one in nodes)
    values: dict[str, Any] = {
        "question": "How many clips?",
        "model": "tiny",
        "strategy": "self-consistency",
        "answer": "72",
        "winner": 0,
        "votes": (Vote(answer="72", weight=float(len(nodes)), branches=tuple(range(len(nodes)))),),
        "prompt_tokens": 1024,
        "depth": 30,
        "spans": (Span(kind="prefill", start_s=0, end_s=0.1), Span(kind="decode", start_s=0.1, end_s=end)),
        "kv_samples": tuple(KVSample(at_s=at / 10, request_bytes=1000 * at, held_bytes=2000 * at) for at in range(9)),
        "kv_limit": 10_000,
        "usage": Usage(
            prompt_tokens=1024,
            prompt_tokens_computed=1024,
            prompt_tokens_reused=0,
            completion_tokens=sum(len(one.tokens) for one in nodes),
            completion_tokens_winner=3,
        ),
        "kv": KVUsage(peak_bytes=8000, bytes_if_copied=64_000),
        "timings": Timings(total_s=end),
    }
    return Trace(nodes=nodes, **{**values, **changed})


def large() -> Trace:
    """20 lines of 6 steps, some verified early."""
    said = "Then she sold half as many clips in May, which is 48 / 2 = 24 <b>clips</b>, so that makes " * 2
    entropies = {layer: 0.69 - 0.02 * layer for layer in range(15, 25)}
    verdict = Verdict(score=0.8, exit_layer=24, layers=24, tokens_computed=20, entropies=entropies)
    nodes = []
    for line in range(20):
        for step in range(6):
            index = len(nodes)
            state = "chosen" if line == 3 else ("pruned" if step == 5 and line % 3 == 0 else "finished")
            answer = str(70 + line) if step == 5 else None
            parent = index - 1 if step else None
            nodes.append(
                node(index, parent=parent, said=said, state=state, answer=answer, depth=step, verdict=verdict,
                     start_s=step * 1.5, end_s=step * 1.5 + 1.4)
            )  # fmt: skip
    return trace(*nodes, winner=23)


class Reading(HTMLParser):
    """The elements, the attributes and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


# -- what a run records -----------------------------------------------------------------------------


VERDICT = "Is the answer above correct? Reply YES or NO."


def ask(answers: Any, **options: Any) -> ReasoningResult:
    with scripted_reasoner({"Q": answers, VERDICT: ["YES", "NO"]}) as reasoner:
        return reasoner.reason("Q", **{"exit": "off", "seed": 1, **options})


def test_a_run_is_recorded() -> None:
    result = ask(["The answer is 4."], strategy=SelfConsistency(branches=3))
    run = result.trace
    assert (run.version, run.question, run.strategy, run.answer) == (VERSION, "Q", "self-consistency", "4")
    assert [one.index for one in run.nodes] == [0, 1, 2]
    for one, branch in zip(run.nodes, result.branches, strict=True):
        assert branch.model_dump().items() <= one.model_dump().items()
        assert len(one.confidences) == len(one.pieces) == len(one.tokens)
        assert "".join(one.pieces) == one.text
        assert 0 <= one.start_s < one.end_s <= run.timings.total_s
        assert one.kv_bytes > 0
    assert [one.state for one in run.nodes].count("chosen") == 1
    assert run.nodes[result.winner].state == "chosen"
    assert (run.votes, run.usage, run.kv, run.timings) == (result.votes, result.usage, result.kv, result.timings)


def test_what_it_waited_for_adds_up_to_the_timings() -> None:
    run = ask(["The answer is 4."], strategy=BestOfN(branches=3, score="verifier")).trace
    assert {span.kind for span in run.spans} == {"prefill", "decode", "verify"}
    for kind, seconds in (("prefill", run.timings.prefill_s), ("decode", run.timings.decode_s)):
        assert sum(s.end_s - s.start_s for s in run.spans if s.kind == kind) == pytest.approx(seconds)
    assert all(0 <= span.start_s <= span.end_s <= run.timings.total_s for span in run.spans)


def test_kv_over_time_peaks_where_the_result_says_and_stays_short() -> None:
    run = ask(["word " * 700 + "The answer is 4."], strategy=SelfConsistency(branches=2), max_tokens=2000).trace
    assert 2 < len(run.kv_samples) <= 257
    assert [s.at_s for s in run.kv_samples] == sorted(s.at_s for s in run.kv_samples)
    # of the samples that were dropped one may have held more: a sample stands for at most 16 steps
    step = 2 * 16 * run.nodes[0].kv_bytes / len(run.nodes[0].tokens)
    most = max(s.request_bytes for s in run.kv_samples)
    assert run.kv.peak_bytes - step <= most <= run.kv.peak_bytes <= run.kv_limit


def test_a_search_records_what_it_gave_up() -> None:
    judge = CallableVerifier(lambda claim: 0.9 if claim.text.startswith("A") else 0.1, "judge", always=True)
    strategy = TreeOfThought(proposals=4, breadth=1, depth=2, verifier=judge)
    result = ask(["A\ngold", "B\ndead"], strategy=strategy)
    chosen = [one for one in result.trace.nodes if one.state == "chosen"]
    assert [one.text.strip() for one in chosen] == [branch.text.strip() for branch in result.line] == ["A", "gold"]
    assert chosen[1].parent == chosen[0].index
    others = [one for one in result.trace.nodes if one.state != "chosen"]
    assert "B" in [one.text.strip() for one in others]
    assert {one.state for one in others} == {"pruned"}


def test_a_decided_vote_leaves_branches_stopped() -> None:
    answers = ["The answer is 4."] * 3 + ["word " * 60 + "The answer is 5."]
    result = ask(answers, strategy=SelfConsistency(branches=8, vote="majority"), seed=3)
    cut = [one for one in result.trace.nodes if one.finish_reason == "cancelled"]
    assert cut
    assert {one.state for one in cut} == {"stopped"}
    for one in cut:
        assert "".join(one.pieces) == one.text


def test_a_result_from_json_has_no_trace_and_says_so() -> None:
    result = ask(["The answer is 4."], strategy=SelfConsistency(branches=2))
    again = ReasoningResult.model_validate_json(result.model_dump_json())
    assert again.model_dump() == result.model_dump()
    assert "trace" not in result.model_dump()
    with pytest.raises(ConfigError, match="save the trace itself"):
        _ = again.trace


def test_an_early_exit_keeps_the_entropy_that_each_layer_saw() -> None:
    strategy = BestOfN(branches=2, score="verifier")
    full = ask(["The answer is 4."], strategy=strategy)
    assert [one.verdict.entropies if one.verdict else None for one in full.trace.nodes] == [{}, {}]


# -- JSON -------------------------------------------------------------------------------------------


def test_json_brings_all_of_it_back(tmp_path: Path) -> None:
    run = large()
    run.save(tmp_path / "run.json")
    assert Trace.load(tmp_path / "run.json") == run
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": VERSION + 1}, "upgrade it"),
        ({"version": "1"}, "upgrade it"),
        ({"version": None}, "upgrade it"),
        ({"winner": 7}, "damaged"),
        ({"nodes": []}, "damaged"),
        ({"surprise": 1}, "damaged"),
    ],
)
def test_what_is_no_trace_of_this_version_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    data = {**json.loads(trace(node(0)).model_dump_json()), **change}
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=said) as caught:
        Trace.load(tmp_path / "run.json")
    assert "run.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": 1}', "\ud800"])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"x\.json"):
        Trace.load(tmp_path / "x.json")


def test_a_parent_comes_before_its_children() -> None:
    with pytest.raises(ValueError, match="parents come first"):
        trace(node(0, parent=1), node(1))


def test_other_names_and_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither \.html nor \.json"):
        trace(node(0)).save(tmp_path / "run.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        Trace.load(tmp_path / "missing.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        trace(node(0)).save(tmp_path / "file" / "run.html")
    trace(node(0)).save(tmp_path / "new" / "run.HTML")
    assert (tmp_path / "new" / "run.HTML").read_text().startswith("<!doctype html>")


# -- in a terminal ----------------------------------------------------------------------------------


def test_printing_draws_the_tree() -> None:
    run = trace(
        node(0, state="chosen", answer=None, said="First half it"),
        node(1, state="pruned", answer="71"),
        node(2, parent=0, state="chosen", verdict=Verdict(score=0.75, exit_layer=12)),
        node(3, parent=0, state="stopped", finish_reason="cancelled", answer=None, said="And so"),
        winner=2,
    )
    lines = str(run).splitlines()
    assert lines[0] == "How many clips?"
    assert lines[1].startswith("self-consistency: 72  prompt 1024 tokens, shared by 4 branches, 1 pruned, 1 stopped")
    assert lines[2:] == [
        "├── ★ 0 (3 tokens, confidence 0.00) First half it",
        "│   ├── ★ 2 = 72 (3 tokens, confidence 0.20, score 0.75, exit at layer 12)",
        "│   └── - 3 (2 tokens, confidence 0.30, stopped) And so",
        "└── × 1 = 71 (3 tokens, confidence 0.10, pruned)",
    ]


def test_the_terminal_shows_hostile_text_as_it_is() -> None:
    run = trace(node(0, said=HOSTILE, answer=HOSTILE), question=HOSTILE, answer=HOSTILE)
    console = Console(width=400, color_system=None)
    with console.capture() as capture:
        console.print(run)
    drawn = capture.get()
    assert "[red]" in drawn
    assert "\x1b" not in drawn
    assert "\u202e" not in drawn


# -- the page ---------------------------------------------------------------------------------------


def test_the_page_of_a_large_run_is_small_and_asks_nobody() -> None:
    html = page(large())
    assert len(html.encode()) < 1_000_000
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#|data:,)""", html)
    assert not re.search(r"url\(|@import|https?:", html)
    read = Reading(html)
    assert sum(name == "data-index" for name, _ in read.attributes) == 120
    (policy,) = [value for name, value in read.attributes if name == "content" and value and "default-src" in value]
    assert policy.startswith("default-src 'none'; img-src data:; script-src 'sha256-")
    assert "unsafe" not in policy


def test_each_branch_has_its_box_its_text_and_its_place() -> None:
    run = large()
    html, picture = page(run), tree(run)
    read = Reading(html)
    assert ("id", "branch-119") in read.attributes
    assert read.text.count("which is 48 / 2 = 24 <b>clips</b>") >= 240
    places = {(box.x, box.y) for box in picture.boxes}
    assert len(places) == 120
    for box in picture.boxes:
        assert 0 < box.x < box.x + picture.box_width <= picture.width
        assert 0 < box.y < box.y + picture.box_height <= picture.height
        if box.node.parent is not None:
            assert box.x - picture.boxes[box.node.parent].x == pytest.approx(200)


def test_a_parent_stands_in_the_middle_and_its_edge_is_as_thick_as_its_lines() -> None:
    run = trace(node(0), node(1, parent=0), node(2, parent=0), node(3), node(4, parent=2))
    boxes = tree(run).boxes
    assert boxes[0].y == (boxes[1].y + boxes[2].y) / 2
    assert boxes[4].y == boxes[2].y
    assert boxes[0].thickness > boxes[1].thickness == boxes[3].thickness
    assert boxes[3].y > boxes[2].y


def test_hostile_text_stays_text() -> None:
    run = trace(
        node(0, said=HOSTILE, answer=HOSTILE, finish_reason="eos"),
        question=HOSTILE,
        model=HOSTILE,
        strategy=HOSTILE,
        rule=HOSTILE,
        answer=HOSTILE,
        votes=(Vote(answer=HOSTILE, weight=1, branches=(0,)),),
    )
    read = Reading(page(run))
    assert "img" not in read.tags
    assert read.tags.count("script") == 1
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert "</script><img src=x onerror=alert(1)>" in read.text
    assert "{{7*7}}" in read.text
    assert "\x1b" not in read.text
    assert "\u202e" not in read.text


def test_a_text_that_is_too_long_is_cut_and_says_so() -> None:
    html = page(trace(*[node(i, said="x" * 100_000) for i in range(8)]))
    assert len(html) < 1_000_000
    assert "50,001 characters more" in html


def test_special_runs_are_drawn() -> None:
    shared = SharingRecord(mode="semantic", sigma=0.97, reused=9)
    html = page(
        trace(node(0, sharing=shared, confidence=-3.5), node(1, confidence=-1.5), node(2, confidence=float("nan")))
    )
    assert "edge lossy" in html
    assert "sigma 0.970" in html
    bare = trace(node(0, tokens=(), logprobs=(), pieces=(), confidences=(), said="", end_s=0.0), kv_samples=(),
                 spans=(), votes=(), answer=None, verification=VerificationUsage())  # fmt: skip
    assert "no answer" in page(bare)
    assert "KV cache over time" not in page(bare)


def test_the_budget_is_drawn_where_it_is_near() -> None:
    assert 'class="limit"' in page(trace(node(0), kv_limit=10_000))
    assert 'class="limit"' not in page(trace(node(0), kv_limit=10**9))


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    run = trace(node(0, said=HOSTILE))
    read = Reading(run._repr_html_())
    assert read.tags == ["iframe"]
    assert dict(read.attributes)["srcdoc"] == page(run)
    assert dict(read.attributes)["sandbox"] == "allow-scripts"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
@pytest.mark.parametrize("run", [large(), trace(node(0, said=HOSTILE, answer=HOSTILE), question=HOSTILE)])
def test_a_real_browser_has_nothing_to_complain_about(tmp_path: Path, run: Trace) -> None:
    run.save(tmp_path / "run.html")
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "run.html").as_uri() + "#branch-0"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    opened = re.search(r'<details id="branch-0"[^>]*>', done.stdout)
    assert opened is not None
    assert "open" in opened.group()  # the script ran


# -- the command ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.html", "run.json"])
def test_ask_keeps_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    with scripted_reasoner({"Q": "The answer is 4."}) as reasoner:
        monkeypatch.setattr("rksc_agents.cli.common.load_reasoner", lambda *_, **__: reasoner)
        done = CliRunner().invoke(app, ["ask", "Q", "--branches", "2", "--report", str(tmp_path / name)])
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "answer: 4")
    kept = (tmp_path / name).read_text()
    assert kept.startswith("<!doctype html>") if name == "run.html" else Trace.parse(kept).answer == "4"


def test_ask_refuses_another_name_before_a_model_is_loaded() -> None:
    done = CliRunner().invoke(app, ["ask", "Q", "--report", "run.txt"])
    assert done.exit_code == 2
    assert "neither .html nor .json" in done.stderr
