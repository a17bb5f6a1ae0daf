"""Files of questions, one JSON object per line: `question`, and where known `answer` and `choices`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from rksc_agents.errors import ConfigError
from rksc_agents.types import Prompt


@dataclass(frozen=True, slots=True)
class Question:
    """A line of a file.

    Attributes
    ----------
    text : str
        The question, its choices listed by letter.
    answer : str or None
        The right answer; of a choice its letter.
    prompts : tuple of str
        Other ways to put it (`prompts` in the file).
    """

    text: str
    answer: str | None = None
    prompts: tuple[str, ...] = ()


def conversation_of(question: str, system: str | None) -> Prompt:
    """A question, behind a system message where there is one."""
    if system is None:
        return question
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def read_questions(path: Path | str, *, limit: int | None = None, seed: int | None = None) -> list[Question]:
    """Read a file of questions.

    Parameters
    ----------
    path : Path or str
        JSONL. Every line is an object with the text `question`; others may be `answer`, `choices` (a list of texts)
        and `prompts` (a list of texts); more is ignored.
    limit : int or None
        Questions at most.
    seed : int or None
        With a limit: draw them at random instead of taking the first.

    Raises
    ------
    ConfigError
        If the file or a line cannot be read; the message names the line.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit = {limit!r}: give a number of questions, at least 1")
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the questions {path} cannot be read ({error}): give a JSONL file in UTF-8") from error
    found = [_question(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"{path} holds no questions: write one JSON object with a question per line")
    if limit is not None and seed is not None and limit < len(found):
        return random.Random(seed).sample(found, limit)
    return found[:limit]


def _question(where: str, line: str) -> Question:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}): write one JSON object per line") from error
    if not isinstance(record, dict) or not isinstance(record.get("question"), str):
        raise ConfigError(f'{where} has no text "question": write {{"question": "...", "answer": "..."}}')
    answer = record.get("answer")
    return Question(
        text=_with_choices(where, record["question"], _texts(where, record, "choices")),
        answer=None if answer is None else str(answer),
        prompts=tuple(_texts(where, record, "prompts")),
    )


def _texts(where: str, record: dict[str, Any], name: str) -> Sequence[str]:
    value = record.get(name) or []
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"{where}: {name!r} is {value!r}, and must be a list of texts")
    return value


def _with_choices(where: str, question: str, choices: Sequence[str]) -> str:
    if not choices:
        return question
    if len(choices) > len(ascii_uppercase):
        raise ConfigError(f"{where} has {len(choices)} choices: give at most {len(ascii_uppercase)}, one per letter")
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))
    return f"{question}\n{listed}\nAnswer with the letter of the right choice."
