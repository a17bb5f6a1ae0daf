"""Whether two answers say the same: by their spelling, as numbers, then as mathematics through math-verify."""

from __future__ import annotations

import logging
import math
import re
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

from rksc_agents.reasoning.spelling import numeral, plain

_MAX_DRESSED = 2000  # characters of an answer with its dress; beyond, it is prose
_MAX_CHARS = 120  # of mathematics
_MAX_POWER = 1000  # of a numeral or a letter
_MAX_GROUP_POWER = 16  # of a bracket, which may be multiplied out; powers of powers multiply
_MAX_FUNCTIONS = 4
_MAX_BESIDE_LOG = 10_000  # product of all numbers
_MAX_STEPS = 3_000_000  # lines of Python in one comparison, about a second; counted, so alike on every machine

_FUNCTIONS = frozenset(
    ["sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "ln", "log", "exp"]
)
_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|varphi|psi|omega|pi"
_SIGNS = "frac|cdot|times|div|pm|mp|infty|le|leq|ge|geq|lt|gt|ne|neq|in|cup|cap|emptyset|varnothing|mathbb|begin|end"
_COMMANDS = _FUNCTIONS.union(_GREEK.split("|"), _SIGNS.split("|"))
_WORDS = frozenset(["and", "sin", "cos", "tan", "sqrt", "log", "exp", "infinity", "matrix", "pmatrix", "bmatrix"])
_SAFE_EXPONENT = re.compile(
    r"[-+]?\d{0,4}(?:\.\d+)?\s*(?:\\?[A-Za-z]+)?(?:\s*/\s*\d{1,3})?|[-+]?\\frac\{\w{1,3}\}\{\w{1,3}\}"
)
_ASSIGNMENT = re.compile(r"((?:\\?[A-Za-z]+|[A-Za-z]\([a-z]\)))\s*=\s*([^=<>]+)")
_RELATION = re.compile(r"[=<>]|\\(?:leq?|geq?|lt|gt|neq?|in)\b")
_POWER = re.compile(r"(\S?)\s*\^\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\\?[A-Za-z]+|[-+]?\d+)")

_lock = threading.Lock()  # the LaTeX parser's tables are shared by all threads


def equivalent(a: str, b: str) -> bool:
    """Tell whether two answers say the same.

    Texts that differ only in dress (case, spaces, bold, ``$`` delimiters, a box, closing punctuation) are equal.
    Plain numbers are compared exactly, whatever stands around them: "18", "$18.00" and "18 dollars" are one
    answer. Other mathematics goes to math-verify: "(x+1)^2" equals "x^2+2x+1". What is long or could take long,
    such as a tower of powers, is compared as text. The relation is symmetric and reflexive, and never raises; it
    is not quite transitive (50% equals both 50 and 0.5).
    """
    if a == b or max(len(a), len(b)) > _MAX_DRESSED:
        return " ".join(a.split()).casefold() == " ".join(b.split()).casefold()
    a, b = plain(a), plain(b)
    if _key(a) == _key(b):
        return True
    split = _ASSIGNMENT.fullmatch(a), _ASSIGNMENT.fullmatch(b)
    if split[0] and split[1] and split[0][1] != split[1][1]:  # x = 3 is not y = 3
        return False
    a, b = (match[2] if match else text for match, text in zip(split, (a, b), strict=True))
    if _key(a) == _key(b):
        return True
    left, right = numeral(a), numeral(b)
    if left is not None and right is not None:
        return left.equals(right)
    if ("=" in a) != ("=" in b) or not (parsable(a) and parsable(b)):
        return False
    # a counted thing would be read as a product of letters
    a, b = (a if left is None else left.spelling), (b if right is None else right.spelling)
    return _logarithms_are_small(a, b) and _verified(a, b)


def parsable(text: str) -> bool:
    """Tell whether `text`, in the spelling of :func:`plain`, is mathematics that is quick to parse and compare."""
    if not text or len(text) > _MAX_CHARS or re.search(r"\d{30}|\d(?:st|nd|rd|th)\b", text):
        return False
    commands = re.findall(r"\\([A-Za-z]+)", text)
    letters = re.sub(r"\\[A-Za-z]+", " ", text)
    words = re.findall(r"[A-Za-z]{2,}", letters)
    if any(command not in _COMMANDS for command in commands) or not _closed(text):
        return False
    if any(len(word) > 2 and word not in _WORDS for word in words):
        return False
    if sum(name in _FUNCTIONS for name in [*commands, *words]) > _MAX_FUNCTIONS:
        return False
    if re.search(r"[^\x20-\x7e]|[?@#'\"`~;]|(?<!\d)!|\d{3,}!|!!", text):  # factorials of small numbers only
        return False
    text = text.replace("**", "^")
    if _RELATION.search(text) and not _is_plain_relation(text, letters, [*commands, *words]):
        return False
    return _powers_are_small(text)


def _closed(text: str) -> bool:
    """Tell whether every bracket is closed, where "[0, 1)" closes too: the parser is slow to give up on others."""
    depth = 0
    for character in re.sub(r"\\[{}]", lambda m: "(" if m[0] == r"\{" else ")", text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0 and re.search(r"[-+*/^=<>,]\s*\Z", text) is None


def _is_plain_relation(text: str, letters: str, names: list[str]) -> bool:
    """Tell whether a relation is one between polynomials: others take long to solve, "3 * 4 = 12" is merely true."""
    powers = re.findall(r"\^\s*\{?\s*(\w+)\s*\}?", text)
    return (
        re.search(r"[A-Za-z]", letters) is not None
        and _FUNCTIONS.isdisjoint(names)
        and "|" not in text
        and len(powers) == text.count("^")
        and all(power in {"1", "2", "3", "4"} for power in powers)
    )


def _logarithms_are_small(*texts: str) -> bool:
    """Refuse a logarithm beside a large number: log(x) + n may be combined to log(10^n * x), in one step."""
    if not any(re.search(r"log|ln", text) for text in texts):
        return True
    return all(
        math.prod(max(int(number), 1) for number in re.findall(r"\d+", text)) <= _MAX_BESIDE_LOG
        and re.search(r"\d\s*[)}]*\s*(?:\^|\*\*)|!|\de\d", text) is None
        for text in texts
    )


def _powers_are_small(text: str) -> bool:
    matches = _POWER.findall(text)
    # a power within a power, or one that cannot be read
    if len(matches) != text.count("^") or re.search(r"\^\s*(?:\{[^{}]*\}|\w)\s*\^", text):
        return False
    grouped = 1.0
    for base, braced in matches:
        exponent = braced[1:-1].strip() if braced.startswith("{") else braced
        if not _SAFE_EXPONENT.fullmatch(exponent):
            return False
        size = max([abs(float(number)) for number in re.findall(r"\d+(?:\.\d+)?", exponent)], default=1.0)
        if base.isalnum():
            if size > _MAX_POWER:
                return False
        else:
            grouped *= max(size, 1.0)
    return grouped <= _MAX_GROUP_POWER


def _key(text: str) -> str:
    return re.sub(r"\s*([^\w\s])\s*", r"\1", text).casefold()


def _verified(a: str, b: str) -> bool:
    with _lock:
        library = _math_verify()
        before = sys.gettrace()
        try:
            left, right = _parse(a), _parse(b)
            sys.settrace(_limit(_MAX_STEPS))  # works in any thread, where a signal does not
            # math-verify follows the form of its first argument, so both orders are asked
            return bool(
                library.verify(list(left), list(right), timeout_seconds=None)
                or library.verify(list(right), list(left), timeout_seconds=None)
            )
        except (Exception, _TooMuchWork):  # what cannot be compared as mathematics differs, since its text does
            return False
        finally:
            sys.settrace(before)


TraceFunction = Callable[[FrameType, str, Any], Any]


class _TooMuchWork(BaseException):
    """The limit was reached; no Exception, so that no library takes it for one of its own."""


def _limit(steps: int) -> TraceFunction:
    """Return a trace function that stops what runs after so many calls and lines of Python."""
    left = steps

    def count(frame: FrameType, _event: str, _arg: object) -> TraceFunction:
        nonlocal left
        left -= 1
        # what is raised into a generator that is being closed would be lost
        if left < 0 and not frame.f_code.co_flags & CO_GENERATOR and frame.f_code.co_name != "__del__":
            raise _TooMuchWork
        return count

    return count


@lru_cache(maxsize=256)
def _parse(text: str) -> tuple[Any, ...]:
    latex = text.replace("**", "^").replace("%", r"\%")
    latex = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", latex)
    latex = re.sub(r"\^\s*(-?\d+)", r"^{\1}", latex)
    latex = re.sub(r"(?<![\\A-Za-z])(sin|cos|tan|log|ln|exp)(?![A-Za-z])", r"\\\1", latex)
    latex = re.sub(r"(?<![\\A-Za-z])(pi)(?![A-Za-z])", r"\\pi ", latex)
    latex = re.sub(r"(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])", r"\\infty ", latex)
    library = _math_verify()
    config = [library.LatexExtractionConfig()]
    return tuple(library.parse(f"${latex}$", extraction_config=config, parsing_timeout=None))


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    import math_verify  # pulls in sympy, which takes a while

    for module in ("parser", "grader", "utils"):
        logging.getLogger(f"math_verify.{module}").addFilter(_no_timeout_notice)
    # the first comparison loads tables and modules, which is no work of its own
    math_verify.verify(
        math_verify.parse("$(x+1)^2$", parsing_timeout=None),
        math_verify.parse("$x^2+2x+\\sqrt{1}$", parsing_timeout=None),
        timeout_seconds=None,
    )
    return math_verify


def _no_timeout_notice(record: logging.LogRecord) -> bool:
    """Drop the library's notice that its time limit is off: what could take long is never given to it."""
    return not record.getMessage().startswith("Timeout is disabled")
