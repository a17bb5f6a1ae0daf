"""Functions for `CallableVerifier` that check a claim by program."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from operator import add, mul, sub, truediv
from types import MappingProxyType

from rksc_agents.errors import ConfigError
from rksc_agents.verify.verifier import Claim

TARGET = 24

_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = MappingProxyType(
    {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
)
_SYMBOLS: Mapping[str, type[ast.operator]] = MappingProxyType({"+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div})
_SIGNS = str.maketrans("×∗⋅·÷∕−–[]{}", "****//--()()")
_LATEX = (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\\left", ""), ("\\right", ""))
_LONGEST = 200  # characters of an expression; more is none
_DEEPEST = 40  # brackets

_WHOLE = r"(?<![\w.])[0-9]{1,9}(?!\w|\.[0-9])"
_BETWEEN = r"(?:[ \t]*,[ \t]*(?:and[ \t]+)?|[ \t]+and[ \t]+|[ \t]+)"
_RUN = re.compile(rf"{_WHOLE}(?:{_BETWEEN}{_WHOLE})*")
_GOAL = re.compile(rf"(?:\b(?:make|makes|get|gets|reach|equals?|obtain|of|to)|=)[ \t]*{TARGET}\b", re.IGNORECASE)

# Characters that are no part of the language but may stand in an expression are taken with it, so that it is refused.
_CANDIDATE = re.compile(r"([^\W\d_]?)([0-9()+\-*/=.%^! \t]+)(?=([^\W\d_]?))")
_PREFIX = r"[ \t]*(?:[-*•][ \t]+|[0-9]{1,3}[.)][ \t]+|[Ss]tep[ \t]*[0-9]{1,3}[ \t]*[:.)][ \t]*)?"
_ITEM = re.compile(_PREFIX)
_NUMBER = r"-?[0-9]{1,9}(?:/[0-9]{1,9}|\.[0-9]{1,9})?"
_OPERAND = rf"(?:\([ \t]*({_NUMBER})[ \t]*\)|({_NUMBER}))"
_STEP = re.compile(
    rf"{_PREFIX}{_OPERAND}[ \t]*([-+*/])[ \t]*{_OPERAND}[ \t]*=[ \t]*{_OPERAND}[ \t]*[.,;]?[ \t]*"
    rf"(?:\(?[ \t]*[Ll]eft[ \t]*:?([-0-9/., \t()]*))?"
)


def game24(claim: Claim) -> float:
    """Check a line of the Game of 24: make 24 from four numbers, each used once, with + - * / and brackets.

    The numbers are the last run of exactly four whole numbers in the question ("1 1 4 6", "1, 1, 4 and 6"), else
    its last four numbers that are not the goal. Arithmetic is exact: 8 / 3 is "8/3", and not 2.67.

    A finished claim scores 1.0 if its answer or its text ends in such an expression, with or without "= 24", where
    the last line of the text that holds an expression of three or more numbers decides; where none does, if its steps
    end with 24 alone. Else it scores 0.0.

    An unfinished claim is checked step by step. A step is a line ``a op b = c``, where ``(left: ...)`` may follow; it
    must use two numbers that are left. A wrong step scores 0.0, and so does another last number than 24; 24 as the
    only number left scores 1.0, and what is undecided 0.5. Other lines are ignored.

    Other tasks want other checkers. For answers in mathematics give `CallableVerifier` a lambda around math-verify
    or around :func:`rksc_agents.reasoning.equivalence.equivalent`.

    Raises
    ------
    ConfigError
        If the question names no four numbers.
    """
    numbers = puzzle_numbers(claim.asked)
    if not claim.finished:
        left = _left_after(claim.text, numbers)
        if left is None:
            return 0.0
        return 0.5 if len(left) > 1 else float(left == [Fraction(TARGET)])
    if claim.answer is not None and _judged(claim.answer, numbers):
        return 1.0
    judged = _judged(claim.text, numbers)
    return float(_left_after(claim.text, numbers) == [Fraction(TARGET)] if judged is None else judged)


def puzzle_numbers(question: str) -> tuple[int, ...]:
    """Return the four numbers that a question of the Game of 24 names, in its order; see :func:`game24`.

    Raises
    ------
    ConfigError
        If there are fewer than four numbers in it.
    """
    runs = [_whole_numbers(run.group()) for run in _RUN.finditer(question)]
    fours = [run for run in runs if len(run) == 4]
    if fours:
        return fours[-1]
    numbers = _whole_numbers(_GOAL.sub(" ", question))
    if len(numbers) < 4:
        shown = question if len(question) <= 80 else question[:80] + "..."
        raise ConfigError(
            f"game24 finds {len(numbers)} of the four numbers in the question {shown!r}: name them in a row, as in "
            "'1 1 4 6', or use another verifier"
        )
    return numbers[-4:]


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(_WHOLE, text))


def _plain(line: str) -> str:
    """One spelling for each sign."""
    for spelled, sign in _LATEX:
        line = line.replace(spelled, sign)
    return line.translate(_SIGNS)


# -- expressions ------------------------------------------------------------------------------------


def _judged(text: str, numbers: Sequence[int]) -> bool | None:
    """Whether the last attempt at a whole expression in `text` is right; None if there is none."""
    for written in reversed(text.splitlines()):
        line = _ITEM.sub("", _plain(written), count=1)
        for found in reversed(list(_CANDIDATE.finditer(line))):
            before, candidate, after = found.groups()
            if any(map(_is_attempt, candidate.split("="))):
                glued = (before and not candidate[0].isspace()) or (after and candidate[-1] in "0123456789)")  # sqrt(4)
                right = not glued and len(candidate) <= _LONGEST and _makes_target(candidate, numbers)
                if right or _step(written) is None:  # a step may hold three numbers: 3 - 8/3 = 1/3
                    return right
    return None


def _is_attempt(part: str) -> bool:
    """Whether a text is meant as a whole expression, not as a step or a list of numbers."""
    return sum(map(part.count, _SYMBOLS)) >= 2 and len(re.findall(r"[0-9]+", part)) >= 3


def _makes_target(candidate: str, numbers: Sequence[int]) -> bool:
    """Whether an expression, or a chain of equal ones, uses `numbers` once each and makes 24."""
    candidate = re.sub(r"(?<![.0-9])([0-9]+)\.0+(?![.0-9])", r"\1", candidate)  # "24.0"
    used = False
    for part in candidate.lstrip(" *=").rstrip(" .!*=(").split("="):
        parsed = _evaluated(_balanced(part.strip()))
        if parsed is None or parsed[0] != TARGET:
            return False
        used = used or Counter(parsed[1]) == Counter(numbers)
    return used


def _balanced(part: str) -> str:
    """Without the brackets that surround more than this part."""
    surplus = part.count("(") - part.count(")")
    while surplus > 0 and part.startswith("("):
        part, surplus = part[1:].lstrip(), surplus - 1
    while surplus < 0 and part.endswith(")"):
        part, surplus = part[:-1].rstrip(), surplus + 1
    return part


def _evaluated(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and the numbers in it; None if it is none, or has no value."""
    if text.count("(") > _DEEPEST:
        return None
    used: list[int] = []
    try:
        return _value(ast.parse(text, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("no expression of whole numbers with + - * /")


# -- steps ------------------------------------------------------------------------------------------


def _left_after(text: str, numbers: Sequence[int]) -> list[Fraction] | None:
    """The numbers that the steps in `text` leave, in ascending order; None if one of them is wrong."""
    left = sorted(map(Fraction, numbers))
    for line in text.splitlines():
        if step := _step(line):
            after = _stepped(step, left)
            if after is None:
                return None
            left = after
    return left


def _step(line: str) -> re.Match[str] | None:
    """The line as a step, with nothing but punctuation after it."""
    step = _STEP.match(_plain(line))
    return step if step and not step.string[step.end() :].strip(" \t.,;)*") else None


def _stepped(step: re.Match[str], left: Sequence[Fraction]) -> list[Fraction] | None:
    first_in, first, sign, second_in, second, result_in, result, rest = step.groups()
    try:
        a, b, c = Fraction(first_in or first), Fraction(second_in or second), Fraction(result_in or result)
        value = _OPERATORS[_SYMBOLS[sign]](a, b)
        told = None if rest is None else sorted(Fraction(number) for number in re.findall(_NUMBER, rest))
    except ZeroDivisionError:
        return None
    unused = Counter(left)
    unused.subtract((a, b))
    if value != c or min(unused.values()) < 0:
        return None
    after = sorted([*unused.elements(), c])
    return after if told is None or told == after else None
