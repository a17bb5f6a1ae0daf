"""Prompts of an exact length that are made of questions alone, not of filler."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rksc_agents.errors import ConfigError
from rksc_agents.model.text import TextCodec
from rksc_agents.questions import Question

Made = tuple[str, tuple[int, ...], int]
"""A text, its tokens, and the number of examples in it."""


def few_shot(codec: TextCodec, questions: Sequence[Question], prefix: int) -> Made:
    """Make a prompt of exactly `prefix` tokens: a question after examples of others with their answers.

    The first question that fits is asked; as many of the others come before it as there is room for. The first of them
    loses as much of its beginning as is too long. Where that leaves a token or two, an example is left out, or another
    question is asked.

    Raises
    ------
    ConfigError
        If the questions cannot make such a prompt.
    """
    lengths = [len(codec.encode(question.text)) for question in questions]
    fitting = [at for at, length in enumerate(lengths) if length <= prefix]
    if not fitting:
        raise ConfigError(
            f"prefix = {prefix}: the shortest question alone makes a prompt of {min(lengths, default=0)} tokens; give "
            "at least that many, or shorter questions"
        )
    for asked in fitting:
        others = [_example(each) for at, each in enumerate(questions) if at != asked and each.answer is not None]
        _, tokens, number = made = _filled(codec, questions[asked].text, others, prefix)
        if len(tokens) == prefix:
            return made
        if number == len(others):
            raise ConfigError(
                f"prefix = {prefix}: all {len(questions)} questions together make a prompt of {len(tokens)} tokens; "
                "give more questions, or a shorter prefix"
            )
        for left_out in range(number):  # another example in its place has another length
            made = _filled(codec, questions[asked].text, others[:left_out] + others[left_out + 1 :], prefix)
            if len(made[1]) == prefix:
                return made
    raise ConfigError(
        f"prefix = {prefix}: no cut of an example gives exactly this many tokens; give another number, or other "
        "questions"
    )


def _filled(codec: TextCodec, text: str, examples: Sequence[str], prefix: int) -> Made:
    """The question with examples before it: of exactly `prefix` tokens, or what can be had below that."""
    made: Made = text, codec.encode(text), 0
    for number, example in enumerate(examples, 1):
        longer = f"{example}\n\n{made[0]}"
        tokens = codec.encode(longer)
        if len(tokens) > prefix:
            cut = _cut(codec, examples[number - 1 :], made[0], prefix)
            return made if cut is None else (*cut, number)
        made = longer, tokens, number
        if len(tokens) == prefix:
            break
    return made


def _cut(codec: TextCodec, examples: Sequence[str], text: str, prefix: int) -> tuple[str, tuple[int, ...]] | None:
    """Put the end of one of the examples before the text, so that it fits exactly; None where none does."""
    for example, starts in ((each, starts) for each in examples for starts in _starts(each)):
        for start in starts:
            whole = f"{example[start:]}\n\n{text}"
            tokens = codec.encode(whole)
            if len(tokens) == prefix:
                return whole, tokens
            if len(tokens) < prefix - _STRAY:
                break
    return None


_STRAY = 8  # tokens that a later cut may still add, as pieces of words take more tokens than words


def _starts(example: str) -> tuple[list[int], list[int]]:
    """Where an example may be cut: before a word, and where no such cut fits, before any other character."""
    words = [match.start() for match in re.finditer(r"\S+", example)]
    return words, sorted(set(range(len(example))) - set(words))


def _example(question: Question) -> str:
    return f"{question.text}\nThe answer is {question.answer}."
