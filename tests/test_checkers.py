"""Checking the Game of 24 by program."""

from __future__ import annotations

import random
import re
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rksc_agents.errors import ConfigError
from rksc_agents.verify.checkers import game24, puzzle_numbers
from rksc_agents.verify.verifier import Claim


def claim(text: str, question: Any = "1 1 4 6", *, answer: str | None = None, finished: bool = True) -> Claim:
    return Claim(question, text, answer, cast(Any, None), finished)


@pytest.mark.parametrize(
    ("question", "numbers"),
    [
        ("1 1 4 6", (1, 1, 4, 6)),
        ("1 1 11 11\n", (1, 1, 11, 11)),
        ("Use the numbers 1, 1, 4 and 6 to make 24.", (1, 1, 4, 6)),
        ("Game of 24. Input: 4 4 6 8\nAnswer: (4 + 8) * (6 - 4) = 24\nInput: 1 1 4 6", (1, 1, 4, 6)),
        ("Make 24 of [1,1,4,6]", (1, 1, 4, 6)),
        ("Step 1 of 3: with 1 1 4 6.", (1, 1, 4, 6)),
        ("The cards are 1; 1; 4; 6, and you must make 24", (1, 1, 4, 6)),
        ([{"role": "user", "content": "2 3 4 5"}, {"role": "user", "content": "1 1 4 6"}], (1, 1, 4, 6)),
    ],
)
def test_the_four_numbers_of_a_question(question: Any, numbers: tuple[int, ...]) -> None:
    assert puzzle_numbers(claim("", question).asked) == numbers


@pytest.mark.parametrize("question", ["Make 24 of 1 2 3", "Who wrote Faust?", "1.5 2.5 3.5 4.5", "9" * 5000])
def test_a_question_without_four_numbers_is_refused(question: str) -> None:
    with pytest.raises(ConfigError, match=r"1 1 4 6"):
        game24(claim("6 * 4 * 1 * 1", question))


@pytest.mark.parametrize(
    "text",
    [
        "6 * 4 * 1 * 1",
        "6*4*1*1 = 24",
        "Answer: 6 × 4 ÷ 1 ÷ 1 = 24.",
        "The answer is (6 * 4) * (1 / 1) = 24!",
        "So **6 * 4 + 1 − 1 = 24**",
        "$6 \\times 4 \\times \\left(1 \\div 1\\right) = 24$",
        "24 = [6 + 1 - 1] * 4",
        "(6 * 4 * 1 * 1 = 24)",
        "6 * 4 * 1 * 1 = 24 * 1 = 24.0",
        "6 + 4 + 1 + 1 = 12\nThat is not it.\n- 6 * 4 * 1 * 1 = 24\nIt uses 1, 1, 4 and 6.",
        "6/1 * 4/1 = 24",
        "1. 6 * 4 = 24\n2. So 6 * 4 * 1 * 1 = 24 (left: 24)\nCheck: 6 * 4 = 24",
        "Step 1: 1 * 1 = 1 (left: 1 4 6)\nStep 2: 1 * 4 = 4 (left: 4 6)\nStep 3: 4 * 6 = 24 (left: 24)",
        "1 * 1 = 1\n1 * 4 = 4\n4 * 6 = 24",
    ],
)
def test_a_solved_puzzle(text: str) -> None:
    assert game24(claim(text)) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "24",
        "6 * 4 = 24",
        "6 * 4 * 1 = 24",  # a number is missing
        "6 * 4 * 1 * 1 * 1 = 24",
        "6 * 4 * 1 * 2 / 2 = 24",
        "6 * 4 + 1 + 1 = 24",
        "6 * 4 * 1 * 1 = 25",
        "25 = 6 * 4 * 1 * 1 = 24",
        "6 * 4 * 1 ** 1 = 24",
        "6 * 4 // 1 * 1 = 24",
        "sqrt(6 * 4 * 1 * 1) = 24",
        "2^6 * 4 * 1 * 1 = 24",
        "0.6 * 4 * 1 * 1 = 24",
        "6 * 4 * 1 * 1! = 24",
        "6 * 4 * 1 / (1 - 1) = 24",
        "64 * 1 * 1 - 40 = 24",
        "6 * 4 * 1 * 1 = 24\nNo, better: 6 * 4 + 1 + 1 = 24",  # the last attempt counts
        "1 * 1 = 1\n1 * 4 = 4\n4 + 6 = 24",
        "1 * 1 = 1 (left: 1 4 6)\n1 * 4 = 4 (left: 4 6)",
        "6 * 4 * 1 * 1 = 24 = 24 +",
        "6 4 1 1",
    ],
)
def test_an_unsolved_puzzle(text: str) -> None:
    assert game24(claim(text)) == 0.0


def test_brackets_and_fractions_are_exact() -> None:
    assert game24(claim("8 / (3 - 8 / 3) = 24", "3 3 8 8")) == 1.0
    assert game24(claim("8 / (3 - 8 / 3.0) = 24", "3 3 8 8")) == 1.0
    assert game24(claim("8 / 3 = 8/3\n3 - 8/3 = 1/3 (left: 8, 1/3)\n8 / (1/3) = 24", "3 3 8 8")) == 1.0
    assert game24(claim("8 / 3 = 2.67", "3 3 8 8", finished=False)) == 0.0


def test_the_answer_is_enough() -> None:
    assert game24(claim("It can be done.", answer="(6 - 1 + 1) * 4")) == 1.0
    assert game24(claim("6 * 4 * 1 * 1 = 24", answer="24")) == 1.0
    assert game24(claim("It can be done.", answer="(6 - 1 - 1) * 4")) == 0.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("", 0.5),
        ("Let me think about 6 * 4.", 0.5),
        ("6 - 1 = 5 (left: 1 4 5)", 0.5),
        ("6 - 1 = 5 (left: 1 4 5)\nGood.\n1 + 5 = 6 (left: 4 6)", 0.5),
        ("6 - 1 = 5 (left: 1 4 5)\n1 + 5 = 6 (left: 4 6)\n4 * 6 = 24 (left: 24)", 1.0),
        ("6 - 1 = 5\n- 1 + 5 = 6\n3. 4 * 6 = 24", 1.0),
        ("4 - 6 = -2 (left: -2 1 1)\n1 - (-2) = 3 (left: 1 3)", 0.5),
        ("4 - 6 = -2\n-2 + 1 = -1", 0.5),
        ("6 - 1 = 5 (left: 1 4 5)\n1 + 5 = 6 (left: 4 6)\n4 + 6 = 10 (left: 10)", 0.0),  # another last number
        ("6 - 1 = 4 (left: 1 4 4)", 0.0),
        ("6 - 2 = 4 (left: 1 4 4)", 0.0),
        ("6 - 1 = 5 (left: 1 4 6)", 0.0),
        ("4 * 4 = 16", 0.0),  # there is one 4 only
        ("6 - 1 = 5\n6 * 4 = 24", 0.0),  # the 6 is used up
        ("6 / 0 = 0", 0.0),
        ("6 * 4 = 24/0", 0.0),
    ],
)
def test_an_unfinished_line_is_checked_step_by_step(text: str, score: float) -> None:
    assert game24(claim(text, finished=False)) == score


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000 + "6*4*1*1" + ")" * 100_000,
        "(" * 90 + "6*4*1*1" + ")" * 90,
        "-" * 100_000 + "6*4*1*1",
        "1+" * 100_000,
        "1*1*1=" * 50_000,
        "9" * 100_000 + "*9*9*9",
        "9" * 4400 + " + 1 = 2",
        "9**9**9**9 = 24",
        "1 + 1 = 2\n" * 20_000,
        "(1 " * 50_000,
        " " * 100_000 + "=",
        "sqrt" * 50_000,
        "1 + 1 = 2" + " " * 100_000 + "(" + " " * 100_000,
        "1 + 1 = 2 (left: " + "2 " * 50_000,
    ],
    ids=lambda text: text[:12],
)
@pytest.mark.timeout(20)
def test_hostile_text_is_no_solution(text: str) -> None:
    assert game24(claim(text)) == 0.0
    assert game24(claim(text, answer=text, finished=False)) in {0.0, 0.5}


def derivation(seed: int) -> tuple[list[int], str, list[str]]:
    """Split 24 into four whole numbers at random: the numbers, the expression, the steps."""
    draw = random.Random(seed)
    tree: dict[int, tuple[int, str, int]] = {}  # from a leaf to its two parts
    values, open_leaves = [24], [0]
    for _ in range(3):
        leaf = open_leaves.pop(draw.randrange(len(open_leaves)))
        value = values[leaf]
        other = draw.randint(1, 12)
        choices = [("-", value + other, other), ("/", value * other, other)]
        if value > other:
            choices.append(("+", value - other, other))
        if value % other == 0:
            choices.append(("*", value // other, other))
        sign, a, b = draw.choice(choices)
        tree[leaf] = (len(values), sign, len(values) + 1)
        open_leaves += [len(values), len(values) + 1]
        values += [a, b]
    left = [values[leaf] for leaf in open_leaves]
    numbers = draw.sample(left, 4)
    steps = []
    for leaf, (a, sign, b) in reversed(tree.items()):
        left.remove(values[a])
        left.remove(values[b])
        left.append(values[leaf])
        steps.append(f"{values[a]} {sign} {values[b]} = {values[leaf]} (left: {' '.join(map(str, left))})")

    def written(leaf: int) -> str:
        if leaf not in tree:
            return str(values[leaf])
        a, sign, b = tree[leaf]
        return f"({written(a)} {sign} {written(b)})"

    return numbers, written(0), steps


@given(st.integers(0, 2**32), st.integers(1, 9), st.data())
def test_a_right_derivation_scores_one_and_a_changed_number_none(seed: int, change: int, data: st.DataObject) -> None:
    numbers, expression, steps = derivation(seed)
    question = " ".join(map(str, numbers))
    text = "\n".join(steps)
    assert game24(claim(f"{expression} = 24", question)) == 1.0
    assert game24(claim(text, question)) == 1.0
    for done in range(3):
        assert game24(claim("\n".join(steps[:done]), question, finished=False)) == 0.5
    assert game24(claim(text, question, finished=False)) == 1.0

    where = data.draw(st.integers(0, 3))
    changed = [number + change * (k == where) for k, number in enumerate(numbers)]
    other_question = " ".join(map(str, changed))
    assert game24(claim(expression, other_question)) == 0.0
    assert game24(claim(text, other_question)) == 0.0
    assert game24(claim(text, other_question, finished=False)) == 0.0

    number = data.draw(st.sampled_from(list(re.finditer("[0-9]+", text))))
    altered = text[: number.start()] + str(int(number.group()) + change) + text[number.end() :]
    assert game24(claim(altered, question)) == 0.0
    assert game24(claim(altered, question, finished=False)) == 0.0
