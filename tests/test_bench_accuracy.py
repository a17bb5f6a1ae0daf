"""`bench_accuracy` on scripted models: what is counted, what agrees, and how it goes on after it was stopped."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rksc_agents.bench.accuracy import _identified, bench_accuracy, lines
from rksc_agents.bench.accuracy_plot import front, plot
from rksc_agents.bench.accuracy_record import Answered, Record, key_of
from rksc_agents.bench.ways import WAYS, ways_of
from rksc_agents.config import Sampling
from rksc_agents.errors import ConfigError
from rksc_agents.questions import Question
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.reasoning import Direct
from rksc_agents.testing import scripted_reasoner
from rksc_agents.verify.intervals import clopper_pearson

ASKED = "Is the answer above correct? Reply YES or NO."
SCRIPT: dict[str, Any] = {
    "How many?": {"The answer is 4.": 9.0, "The answer is 5.": 1.0},
    "How much?": "The answer is 7.",
    ASKED: {"YES": 3.0, "NO": 1.0},
}
QUESTIONS = [Question("How many?", "4"), Question("How much?", "8")]
ANSWER = len("The answer is 7.") + 1
"""Tokens of an answer, one per letter, with the end token."""


def reasoner() -> RKSCReasoner:
    return scripted_reasoner(SCRIPT, context=1024)


def measured(model: RKSCReasoner, **settings: Any) -> dict[str, dict[str, Any]]:
    settings = {"branches": 4, "tokens": 40, "temperature": 1.0, **settings}
    found = bench_accuracy(model, QUESTIONS, **settings)
    return {row["way"]: row for row in found["rows"]}


def test_right_answers_and_tokens_are_counted_in_every_way() -> None:
    with reasoner() as model:
        rows = measured(model)
    assert list(rows) == list(WAYS)
    low, high = clopper_pearson(1, 2)
    for name, row in rows.items():
        assert (row["right"], row["accuracy"]) == (1, 0.5), name
        assert (row["low"], row["high"]) == (low, high)
        assert row["seconds"] > 0
    assert rows["direct"]["generated_tokens"] == ANSWER
    for name in ("majority", "verifier", "best-of-n"):
        assert rows[name]["generated_tokens"] == 4 * ANSWER
    assert {row["strategy"] for row in rows.values()} == {"direct", "self-consistency", "best-of-n"}


def test_agreement_is_with_the_same_way_without_shortcuts() -> None:
    with reasoner() as model:
        rows = measured(model)
        alone = measured(model, ways=["verifier-cgee"])
    for name, way in WAYS.items():
        assert rows[name]["reference"] == way.reference
        assert rows[name]["agreement"] == (None if way.reference is None else 1.0)
    assert (alone["verifier-cgee"]["reference"], alone["verifier-cgee"]["agreement"]) == (None, None)


def test_a_decisively_confident_branch_spares_verification_where_that_may_be() -> None:
    with reasoner() as model:
        rows = measured(model, ways=["best-of-n", "best-of-n-cgee", "direct"])
    # "How much?" has one answer, so all are sure and none has a rival
    assert rows["best-of-n"]["skip_rate"] == 0.0
    assert rows["best-of-n"]["exits"] == 0.0
    assert rows["best-of-n-cgee"]["skip_rate"] >= 0.5
    assert (rows["direct"]["skip_rate"], rows["direct"]["exits"]) == (0.0, None)


def test_disagreement_and_exits_are_shares(tmp_path: Path) -> None:
    """What the file holds is taken as answered."""
    path = tmp_path / "kept.jsonl"
    with reasoner() as model:
        measured(model, ways=["verifier", "verifier-cgee"], resume=path)
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert len(rows) == 4
        rows[1].update(answer="5", right=False, verified=4, exited=3, skipped=False)
        rows[3].update(verified=0, exited=0, skipped=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        found = measured(model, ways=["verifier", "verifier-cgee"], resume=path)["verifier-cgee"]
    assert (found["agreement"], found["exits"], found["skip_rate"], found["right"]) == (0.5, 0.75, 0.5, 0)


def test_it_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "kept.jsonl"
    asked: list[str] = []
    told: list[tuple[int, int]] = []

    with reasoner() as model:
        ask = model.reason

        def counted(question: Any, **options: Any) -> Any:
            if len(asked) == 3:
                raise KeyboardInterrupt
            asked.append(question)
            return ask(question, **options)

        monkeypatch.setattr(model, "reason", counted)
        with pytest.raises(KeyboardInterrupt):
            measured(model, ways=["direct", "majority"], resume=path)
        with path.open("a", encoding="utf-8") as file:
            file.write('{"key": "half a li')  # the power went
        asked.clear()
        whole = measured(
            model, ways=["direct", "majority"], resume=path, progress=lambda done, total: told.append((done, total))
        )
        assert asked == ["How much?"]
        assert told == [(done, 4) for done in range(1, 5)]
        asked.clear()
        assert measured(model, ways=["direct", "majority"], resume=path) == whole
        assert asked == []
        measured(model, ways=["direct"], resume=path, tokens=30)
        assert asked == ["How many?", "How much?"]


def test_every_way_begins_with_nothing_cached_and_has_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[Any] = []
    with reasoner() as model:
        ask, clear = model.reason, model.clear_cache

        def told(question: Any, **options: Any) -> Any:
            did.append((question, options["temperature"], options["exit"], options["seed"]))
            return ask(question, **options)

        monkeypatch.setattr(model, "reason", told)
        monkeypatch.setattr(model, "clear_cache", lambda: (did.append("cleared"), clear()))
        measured(model, ways=["direct", "verifier", "verifier-cgee"], exit="paper", seed=3)
    one = [("How many?", 0.0, "off", 3), ("How many?", 1.0, "off", 3), ("How many?", 1.0, "paper", 3)]
    assert did[0::2] == ["cleared"] * 6
    assert did[1:6:2] == one


def test_another_sampling_of_the_model_asks_again(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    for top_k, kept in ((0, 2), (5, 4), (5, 4)):
        with scripted_reasoner(SCRIPT, context=1024, sampling=Sampling(top_k=top_k)) as model:
            measured(model, ways=["direct"], resume=path)
        assert len(path.read_text("utf-8").splitlines()) == kept


def test_another_certificate_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "certificate.json"
    monkeypatch.setattr("rksc_agents.bench.accuracy.stored_path", lambda model, prompt: path)
    with reasoner() as model:
        for exit_ in (str(path), "auto"):
            path.write_text("1", encoding="utf-8")
            before = _identified(exit_, model, Direct())
            path.write_text("2", encoding="utf-8")
            assert before != _identified(exit_, model, Direct()) != exit_
        assert _identified("strict", model, Direct()) == "strict"
        path.unlink()
        assert _identified("auto", model, Direct()) == "auto"


def test_keys_depend_on_every_setting() -> None:
    assert key_of(a=1, b="x") == key_of(b="x", a=1)
    assert len({key_of(a=1, b="x"), key_of(a=2, b="x"), key_of(a=1, b="y")}) == 3


@pytest.mark.parametrize("text", ["no json\n", "[1]\n", '{"key": "k", "answer": "1"}\n', '{"answer": "1"}\n'])
def test_another_file_is_not_taken_for_a_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    good = {"key": "k", **{field.name: 0 for field in fields(Answered)}}
    path.write_text(json.dumps(good) + "\n" + text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 2 of .* is no answer of this command"):
        Record(path)
    assert path.read_text("utf-8").endswith(text)


def test_a_record_that_cannot_be_read_or_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Record(tmp_path)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        Record(tmp_path / "file" / "a.jsonl").add("k", Answered(None, False, 0, 0.0, 0, 0, False))


def test_the_result_is_json_and_a_table() -> None:
    with reasoner() as model:
        found = bench_accuracy(model, QUESTIONS, ways=["verifier", "verifier-cgee"], branches=2, tokens=40)
    assert json.loads(json.dumps(found)) == found
    assert {name: found[name] for name in found if name != "rows"} == {
        "model": "scripted", "questions": 2, "exit": "strict", "branches": 2, "tokens": 40, "temperature": 0.7,
        "seed": 0,
    }  # fmt: skip
    text = list(lines(found))
    assert sum(line.startswith("| ") for line in text) == 4
    assert "% with verifier |" in text[-1]


def test_the_picture_has_a_mark_for_every_way(tmp_path: Path) -> None:
    with reasoner() as model:
        found = bench_accuracy(model, QUESTIONS, branches=2, tokens=40)
    path = tmp_path / "new" / "accuracy.svg"
    plot(found, path)
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    named = {group.get("id") for group in root.iter("{http://www.w3.org/2000/svg}g")}
    assert {*WAYS, "front"} <= named
    before = path.read_bytes()
    plot(found, path)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="cannot be written"):
        plot(found, path / "below.svg")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rksc_agents.bench.svg.find_spec", {"matplotlib": None}.get)
    with pytest.raises(ConfigError, match=r"rksc-agents\[plot\]"):
        plot({"rows": []}, tmp_path / "a.svg")


def test_the_line_goes_through_what_nothing_quicker_equals() -> None:
    rows = [
        {"way": name, "seconds": seconds, "accuracy": accuracy}
        for name, seconds, accuracy in (("d", 4, 0.9), ("a", 1, 0.5), ("b", 2, 0.5), ("c", 3, 0.4), ("e", 1, 0.3))
    ]
    assert [row["way"] for row in front(rows)] == ["a", "d"]


@pytest.mark.parametrize(
    ("names", "message"),
    [(["nope"], "way 'nope' is unknown"), (["direct", "direct"], "twice"), ([], "no way is named")],
)
def test_wrong_names_raise(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ways_of(names)


@pytest.mark.parametrize(
    ("questions", "message"), [([Question("Who?")], "question 1 has no answer"), ([], "no questions")]
)
def test_questions_need_answers(questions: list[Question], message: str) -> None:
    with reasoner() as model, pytest.raises(ConfigError, match=message):
        bench_accuracy(model, questions)


def test_every_reference_is_a_way_without_shortcuts() -> None:
    for way in WAYS.values():
        if way.reference is not None:
            assert WAYS[way.reference].reference is None
            assert not WAYS[way.reference].early
