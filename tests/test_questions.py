"""Files of questions: what is read from a line, which lines are taken, and what is wrong is told by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rksc_agents.errors import ConfigError
from rksc_agents.questions import Question, read_questions


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "questions.jsonl"


def numbered(file: Path, count: int) -> list[str]:
    texts = [f"What is {i} + {i}?" for i in range(count)]
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


@pytest.mark.parametrize(
    ("line", "question"),
    [
        ('{"question": "Wie viele Äpfel?"}', Question("Wie viele Äpfel?")),
        ('{"question": "q", "answer": "72", "id": 7, "source": null}', Question("q", "72")),
        ('{"question": "q", "answer": 72}', Question("q", "72")),
        ('{"question": "q", "answer": 0}', Question("q", "0")),
        ('{"question": "q", "answer": null, "choices": [], "prompts": null}', Question("q")),
        (
            '{"question": "Which?", "choices": ["red", "blue", "red"], "answer": "B"}',
            Question("Which?\nA. red\nB. blue\nC. red\nAnswer with the letter of the right choice.", "B"),
        ),
        ('{"question": "q", "prompts": ["Tell me: q", "q, please"]}', Question("q", None, ("Tell me: q", "q, please"))),
    ],
)
def test_a_line_is_a_question(file: Path, line: str, question: Question) -> None:
    file.write_text(line, encoding="utf-8")
    assert read_questions(file) == [question]
    assert read_questions(str(file)) == [question]


def test_blank_lines_are_passed_over_and_the_order_stays(file: Path) -> None:
    file.write_text('\n{"question": "first"}\r\n   \n{"question": "second"}\n\n', encoding="utf-8")
    assert [question.text for question in read_questions(file)] == ["first", "second"]


def test_a_limit_takes_the_first(file: Path) -> None:
    texts = numbered(file, 5)
    for limit, taken in ((1, 1), (3, 3), (5, 5), (9, 5)):
        assert [question.text for question in read_questions(file, limit=limit)] == texts[:taken]


def test_a_limit_with_a_seed_draws_others_and_the_same_again(file: Path) -> None:
    texts = numbered(file, 50)
    drawn = [tuple(question.text for question in read_questions(file, limit=10, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] != tuple(texts[:10])
    assert all(len(set(some)) == 10 and set(some) <= set(texts) for some in drawn)


def test_a_seed_without_need_of_a_draw_keeps_the_order(file: Path) -> None:
    texts = numbered(file, 5)
    for limit in (None, 5, 6):
        assert [question.text for question in read_questions(file, limit=limit, seed=3)] == texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no questions: write one JSON object with a question per line"),
        (" \n\n", "holds no questions"),
        ('{"question": "q"}\n\n{"question"', "line 3 is not JSON"),
        ('{"question": "q"}\n[1]', 'line 2 has no text "question"'),
        ('{"text": "q"}', 'line 1 has no text "question"'),
        ('{"question": 5}', 'line 1 has no text "question"'),
        ('{"question": "q", "choices": "red"}', "line 1: 'choices' is 'red', and must be a list of texts"),
        ('{"question": "q", "choices": ["red", 5]}', "line 1: 'choices' is ['red', 5], and must be a list of texts"),
        ('{"question": "q", "prompts": {"a": "b"}}', "line 1: 'prompts' is {'a': 'b'}, and must be a list of texts"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(file: Path, text: str, message: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_questions(file, limit=1)  # a fault behind the limit is told too
    assert message in str(raised.value)
    assert str(file) in str(raised.value)


def test_a_file_that_cannot_be_read_is_told(file: Path) -> None:
    for path in (file, file.parent):  # missing, and a folder
        with pytest.raises(ConfigError, match=r"cannot be read \(.*give a JSONL file in UTF-8"):
            read_questions(path)
    file.write_bytes(b'{"question": "\xff"}')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_questions(file)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused_before_anything_is_read(file: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match=f"limit = {limit}: give a number of questions, at least 1"):
        read_questions(file, limit=limit)


@given(st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=8))
def test_what_is_written_as_json_is_read(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    lines = [json.dumps({"question": text, "answer": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines), encoding="utf-8", newline="")
    assert read_questions(path) == [Question(text, text) for text in texts]


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"question": "Why?"}\n')
    assert read_questions(path) == [Question("Why?")]


def test_more_choices_than_letters_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": "Which?", "choices": [str(i) for i in range(27)]}))
    with pytest.raises(ConfigError, match="line 1 has 27 choices: give at most 26"):
        read_questions(path)
