"""A file of questions: every line is answered once, a stopped run goes on, and a killed one leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rksc_agents import ConfigError, RKSCReasoner, SelfConsistency
from rksc_agents.bulk import Bulk, answer_file
from rksc_agents.cli import app
from rksc_agents.journal import Journal
from rksc_agents.testing import scripted_reasoner

HERE = Path(__file__).parent
SCRIPT = {f"How much is {i}?": [f"The answer is {i}.", f"It is {i + 1}."] for i in range(6)}


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted_reasoner(SCRIPT, strategy=SelfConsistency(branches=3), context=256) as made:
        yield made


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": text}) + "\n" for text in SCRIPT))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_question_has_its_line(reasoner: RKSCReasoner, questions: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    done = answer_file(reasoner, questions, tmp_path / "new" / "a.jsonl", progress=lambda *each: told.append(each))
    assert done == Bulk(answered=6, failed=0, resumed=0)
    found = lines(tmp_path / "new" / "a.jsonl")
    assert [row["line"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert [row["question"] for row in found] == list(SCRIPT)
    for at, row in enumerate(found):
        assert row["answer"] in (str(at), str(at + 1))
        assert 2 <= sum(len(vote["branches"]) for vote in row["votes"]) <= row["branches"] == 3
    assert told == [("questions", count, 6) for count in range(7)]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.jsonl"]


def test_questions_have_seeds_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "Q"}\n' * 30)
    with scripted_reasoner({"Q": ["The answer is 1.", "The answer is 2."]}, strategy="direct") as reasoner:
        for seed in (0, 1):
            answer_file(reasoner, tmp_path / "q.jsonl", tmp_path / f"{seed}.jsonl", seed=seed)
    first, second = (["".join(row["answer"] for row in lines(tmp_path / f"{seed}.jsonl"))] for seed in (0, 1))
    assert len(set(first[0])) == 2
    assert first != second


def test_a_question_that_fails_does_not_stop_the_others(reasoner: RKSCReasoner, tmp_path: Path) -> None:
    texts = ["How much is 1?", "long " * 400, "How much is 2?", "Who knows?"]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    done = answer_file(reasoner, tmp_path / "q.jsonl", tmp_path / "a.jsonl")
    assert (done.answered, done.failed) == (2, 2)
    found = lines(tmp_path / "a.jsonl")
    assert found[1]["error"].startswith("PromptTooLongError: ")
    assert found[3]["error"].startswith("EngineError: ")
    assert "answer" in found[2]


@pytest.mark.parametrize("kept", range(8))
def test_a_stopped_run_goes_on_and_gives_the_same_file(
    reasoner: RKSCReasoner, questions: Path, tmp_path: Path, kept: int
) -> None:
    """Whatever part of the last line reached the disk."""
    answer_file(reasoner, questions, tmp_path / "whole.jsonl")

    def stop(_: str, done: int, total: int) -> None:
        if done == min(kept, 5):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_file(reasoner, questions, tmp_path / "a.jsonl", progress=stop)
    partial = tmp_path / "a.jsonl.partial"
    assert not (tmp_path / "a.jsonl").exists()
    torn = partial.read_bytes() + b'{"line": 6, "question": "How mu\xc3'[: 4 * kept]
    partial.write_bytes(torn)
    done = answer_file(reasoner, questions, tmp_path / "a.jsonl")
    assert done == Bulk(answered=6, failed=0, resumed=min(kept, 5))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not partial.exists()


def test_a_run_that_was_killed_before_its_last_step_ends(
    reasoner: RKSCReasoner, questions: Path, tmp_path: Path
) -> None:
    """Between giving the lines their file and removing the journal."""
    out = tmp_path / "a.jsonl"
    answer_file(reasoner, questions, out)
    whole = out.read_bytes()
    with pytest.raises(ConfigError, match="--fresh"):
        answer_file(reasoner, questions, out)
    answer_file(reasoner, questions, out, fresh=True)
    assert out.read_bytes() == whole


def test_another_run_is_not_gone_on_with(reasoner: RKSCReasoner, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"

    def stop(_: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_file(reasoner, questions, out, progress=stop)
    before = out.with_name("a.jsonl.partial").read_bytes()
    others: list[dict[str, Any]] = [{"seed": 1}, {"in_flight": 2}, {"system": "Be brief."}, {"temperature": 0.5},
                                    {"strategy": SelfConsistency(branches=4)}]  # fmt: skip
    for changed in others:
        with pytest.raises(ConfigError, match="other settings"):
            answer_file(reasoner, questions, out, **changed)
    questions.write_text(questions.read_text() + '{"question": "How much is 0?"}\n')
    with pytest.raises(ConfigError, match="other questions"):
        answer_file(reasoner, questions, out)
    assert out.with_name("a.jsonl.partial").read_bytes() == before


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    with Journal(tmp_path / "a", "x"), pytest.raises(ConfigError, match="another run"):
        Journal(tmp_path / "a", "x")
    with Journal(tmp_path / "a", "x") as free:
        free.finish()


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    with Journal(tmp_path / "a", "x") as journal:
        journal.add(1, {"text": "é\ud800"})
        journal.add(2, {})
    partial = tmp_path / "a.partial"
    head, first, second = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(head + b"nonsense\n" + second)
    with pytest.raises(ConfigError, match=r"a\.partial, line 2 is damaged"):
        Journal(tmp_path / "a", "x")
    assert json.loads(first)["text"].startswith("é")


def test_several_in_flight_keep_the_order(reasoner: RKSCReasoner, questions: Path, tmp_path: Path) -> None:
    done = answer_file(reasoner, questions, tmp_path / "a.jsonl", in_flight=4)
    assert done.answered == 6
    assert [row["line"] for row in lines(tmp_path / "a.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_is_killed_twenty_times_gives_the_file_of_an_undisturbed_one(tmp_path: Path) -> None:
    texts = [f"How much is {i}?" for i in range(40)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    done = subprocess.run(
        [sys.executable, HERE / "kill_runs.py", tmp_path, "20"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "killed 20" in done.stdout
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()
    assert len(lines(tmp_path / "killed.jsonl")) == 40
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"questions.jsonl", "killed.jsonl", "undisturbed.jsonl"}


# -- the command ------------------------------------------------------------------------------------


@pytest.fixture
def command(reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setattr("rksc_agents.cli.common.load_reasoner", lambda *_, **__: reasoner)
    return CliRunner()


def test_the_command_writes_the_file(command: CliRunner, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    done = command.invoke(app, ["run", str(questions), "--out", str(out), "--branches", "2"])
    assert (done.exit_code, done.stdout) == (0, "answered: 6, failed 0, done before 0\n")
    assert [row["branches"] for row in lines(out)] == [2] * 6
    again = command.invoke(app, ["run", str(questions), "--out", str(out)])
    assert again.exit_code == 2
    assert "--fresh" in again.stderr


def test_the_command_fails_where_a_question_did(command: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "Who knows?"}\n')
    done = command.invoke(app, ["run", str(tmp_path / "q.jsonl"), "--out", str(tmp_path / "a.jsonl"), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {"answered": 0, "failed": 1, "resumed": 0}


def test_damaged_questions_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "A?"}\n{"frage": "B?"}\n')
    done = CliRunner().invoke(app, ["run", str(tmp_path / "q.jsonl"), "--out", str(tmp_path / "a.jsonl")])
    assert done.exit_code == 2
    assert "line 2" in done.stderr
    assert not list(tmp_path.glob("a.jsonl*"))
