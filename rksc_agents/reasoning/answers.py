"""Finding the answer in what a branch wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from rksc_agents.errors import ConfigError
from rksc_agents.reasoning.spelling import balanced, numeral, plain


@runtime_checkable
class AnswerExtractor(Protocol):
    """Finds the answer in a branch's text, or None."""

    def __call__(self, text: str) -> str | None:
        """Return the answer in `text`, tidied, or None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Boxed:
    r"""The content of the last ``\boxed{...}`` (or ``\fbox``) that is closed and not empty."""

    def __call__(self, text: str) -> str | None:
        """Return the box's content."""
        for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*(?:\{|(?=[^\s{]))", text))):
            if not match[0].endswith("{"):  # TeX takes one character where there is no brace; models mean the word
                word = re.match(r"[-\w.,]+", text[match.end() :])
                answer = tidy(word[0]) if word else None
            else:
                end = balanced(text, match.end() - 1)
                answer = tidy(text[match.end() : end]) if end > 0 else None
            if answer is not None:
                return answer
        return None


@dataclass(frozen=True, slots=True)
class Hash:
    """What follows the last ``####``, as in GSM8K; a Markdown heading ("#### Step 2: Add") is not taken."""

    def __call__(self, text: str) -> str | None:
        """Return the rest of the line."""
        for match in reversed(list(re.finditer(r"(?<!#)####(?!#)[ \t]*([^\n]*)(\s*\Z)?", text))):
            line = re.sub(r"(?i)\A(?:the\s+)?(?:final\s+)?answer\s*(?:is|:|=)\s*", "", plain(match[1]))
            answer = tidy(line)
            if answer is None or re.match(r"(?i)(?:step\b|part\b|\d+[.):]\s+[A-Za-z])", line):
                continue
            if _starts_like_a_value(answer) or (match[2] is not None and len(answer.split()) <= 4):
                return answer
        return None


@dataclass(frozen=True, slots=True)
class AnswerIs:
    """What follows the last "the answer is", "Answer:" or "Final answer", in bold or not, up to the sentence's end."""

    def __call__(self, text: str) -> str | None:
        """Return the phrase after the last such mark that holds one."""
        for match in reversed(list(_ANSWER_MARK.finditer(text))):
            answer = self._phrase(text[match.end() :])
            if answer is not None:
                return answer
        return None

    @staticmethod
    def _phrase(rest: str) -> str | None:
        rest = rest.lstrip(" \t\n*_:#")
        display = re.match(r"(?s)(?:\\\[|\$\$)\s*(.+?)\s*(?:\\\]|\$\$)", rest)
        if display is not None:
            return tidy(_result(display[1]))
        line = rest.split("\n", 1)[0]
        line = _FILLER.sub("", line)
        if re.match(r"(?i)not\b", line):
            return None
        sentence = re.split(r"(?<![A-Za-z]\.[A-Za-z])[.!?](?=[\s*_\"']|\Z)(?!\s*\d)", line, maxsplit=1)[0]
        sentence = re.split(r"(?i),?\s(?:because|since|which|so that|as (?:the|we|it))\b", sentence, maxsplit=1)[0]
        sentence = re.sub(r"(\*\*|__)", "", sentence)
        choice = re.match(r"(?i:option|choice)?\s*(?:\(([A-Ja-j])\)|([A-J])[).:](?=\s|\Z)|([A-J])\s*\Z)", sentence)
        if choice is not None:
            return next(letter for letter in choice.groups() if letter).upper()
        return tidy(_result(sentence))


@dataclass(frozen=True, slots=True)
class ChoiceLetter:
    """The letter of a multiple-choice answer.

    Parameters
    ----------
    letters : str, default "ABCDE"
        The letters that may be chosen.
    strict : bool, default False
        Take a letter only where a line plainly answers with it: the first or last line is "B", "(B)" or "**B.**", or
        a text of one line is "B) Paris". Otherwise also from "the answer is B" and, failing that, the last letter
        in brackets or after "option".
    """

    letters: str = "ABCDE"
    strict: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Z]+", self.letters):
            raise ConfigError(f"ChoiceLetter.letters = {self.letters!r}: give capital letters, such as 'ABCD'")

    def __call__(self, text: str) -> str | None:
        """Return one capital letter of `letters`."""
        letter = f"[{self.letters}]"
        if not self.strict:
            for extractor in (Boxed(), AnswerIs(), Hash()):
                found = re.match(rf"\(?({letter})(?![\w'’])\)?", (extractor(text) or "").upper())
                if found is not None and not re.match(rf"{letter}\s+[a-z]", extractor(text) or ""):
                    return found[1]
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        for line in [*lines[-1:], *lines[:1]]:
            bare = re.sub(r"[*_`$]", "", line)
            found = re.fullmatch(rf"(?i:(?:option|choice|answer)[:\s]*)?\(?({letter})\s*[).:]*", bare)
            if found is None and len(lines) == 1:
                found = re.match(rf"(?i:(?:option|choice)\s+)?(?:\(({letter})\)|({letter})[).:])\s+\S", bare)
            if found is not None:
                return next(group for group in found.groups() if group)
        if self.strict:
            return None
        for pattern in (
            rf"\(({letter})\)|(?i:\b(?:option|choice|answer|choose|pick|select|say|is)\s+)\(?({letter})\b|\*\*({letter})\b",
            rf"(?<![\w'’])(?![AI])({letter})(?![\w'’])",  # a lone "A" or "I" is a word
        ):
            named = re.findall(pattern, text)
            if named:
                return "".join(named[-1])
        return None


@dataclass(frozen=True, slots=True)
class LastNumber:
    """The last number of the text: decimals, fractions, percentages, powers of ten; not the marks of a list."""

    def __call__(self, text: str) -> str | None:
        """Return the number, without currency and thousands commas."""
        text = text.replace("−", "-").replace("{,}", ",").replace(r"\%", "%")
        text = re.sub(r"\\[dtc]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"\1/\2", text)
        prose = re.sub(r"(?m)^[ \t]*(?:(?:\*\*)?\d{1,2}[.)][ \t]+(?=\S)|(?i:step)\s+\d+\b)", " ", text)
        for part in (prose, text):
            found = _LAST_NUMBER.findall(part)
            if found:
                return tidy(found[-1])
        return None


_ANSWER_MARK = re.compile(
    r"""(?ix)
    \b(?:answer|result)(?:\s+(?:to|for|of)\b[^.\n:]{0,80}?)?[*_]*\s*(?:\bis\b|\bare\b|\bequals\b|[:=])
    |\bfinal\s+answer\b[*_]*\s*(?:\bis\b|[:=]|\n)
    |\b(?:correct|right|best)\s+(?:option|choice)\s+(?:is\b|:)
    """
)
_FILLER = re.compile(
    r"(?i)\A[\s*_:]*(?:(?:therefore|thus|then|hence|simply|just|indeed|about|approximately|roughly|exactly|clearly|"
    r"given by|equal to|option|choice)\b[\s,:*_]*)*"
)
_LAST_NUMBER = re.compile(
    r"""(?x)
    (?<![\w.^{])                                          # not inside a word or a number
    (?:(?<![\d)\]}])-\s?)?[$€£]?\s?-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)|(?<![\d])(?=\.\d))(?:\.\d+)?
    (?<=\d)
    (?!(?:st|nd|rd|th)\b)(?![\d])
    (?:\s?/\s?\d+(?![\d./])|\s*(?:×|\*|\\times|\\cdot)\s*10\s*\^\s*\{?\s*-?\d+\s*\}?|\s?\^\s?\{?-?\d+\}?
      |[eE][-+]?\d+\b)?
    (?:\s?%|\s+percent\b|\s+(?:hundred|thousand|million|billion|trillion)\b)?
    """
)


def tidy(text: str) -> str | None:
    """Return `text` without its dress, a plain number without currency, commas and what it counts; None if empty."""
    text = plain(text)
    number = numeral(text)
    return number.spelling if number is not None else text or None


def extract_answer(text: str) -> str | None:
    """Return the answer that `text` gives, or None.

    The first that finds one: a box, a ``####`` line, "the answer is", a plain choice letter, the last number.
    """
    for extractor in _CHAIN:
        answer = extractor(text)
        if answer is not None:
            return answer
    return None


_CHAIN: tuple[AnswerExtractor, ...] = (Boxed(), Hash(), AnswerIs(), ChoiceLetter(strict=True), LastNumber())

EXTRACTORS: Mapping[str, AnswerExtractor] = MappingProxyType(
    {
        "auto": extract_answer,
        "boxed": Boxed(),
        "hash": Hash(),
        "answer-is": AnswerIs(),
        "choice": ChoiceLetter(),
        "last-number": LastNumber(),
    }
)
"""The extractors by name; "auto" is :func:`extract_answer`."""


def _starts_like_a_value(text: str) -> bool:
    return (
        re.match(r"[-+]?[\d.$\\(]", text) is not None or re.fullmatch(r"[A-J]|(?i:yes|no|true|false)", text) is not None
    )


def _result(sentence: str) -> str:
    """Of a calculation, "6 * 3 = 18", take the value at its end; leave an equation, "y = 2x + 1", whole."""
    left, equals, right = sentence.rpartition("=")
    if equals and re.search(r"\d", left) and numeral(plain(right)) is not None:
        return right
    return sentence
