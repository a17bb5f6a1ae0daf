"""What can be read off a grammar's text: what it spells out, and how much one token can make necessary."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

LITERALS = 32
"""Texts of a grammar that are tried where anything may be written."""

FEW = 8
"""Up to so many texts, it is tried whether they make a whole text one after another."""

_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)+)"|/((?:[^/\\\n]|\\.)+)/')
_NOT_PLAIN = re.compile(r"\[(?:[^\]\\]|\\.)*\]|\{[\d,]*\}|\(\?\w*:?|\\[a-mo-zA-Z]")
_PLAIN = re.compile(r"(?:[^\\.^$*+?()\[\]{}|]|\\[^a-zA-Z0-9]|\\n)+")
_COUNT = re.compile(r'"min(?:Items|Length|Properties)\\?": (\d+)|\{(\d+)')
_REFERENCE = re.compile(r'"\$ref\\?": \\?"([^"\\]*)')


def literals(lark: str) -> list[str]:
    """Texts that a grammar spells out, outside of JSON schemas; the longest first."""
    return sorted(_in_order(lark), key=len, reverse=True)[:LITERALS]


def guesses(lark: str) -> list[str]:
    """Texts that may complete one: the last few that the grammar spells out, with a letter around them or nothing."""
    found = _in_order(lark)
    if len(found) > FEW:
        return []
    ends = [found[first:] for first in range(len(found))]
    return sorted(
        {
            before + filler.join(end) + after
            for end in ends
            for filler in ("", "a", "1")
            for before, after in _around(filler)
        },
        key=lambda text: (len(text), text),
    )


def _around(filler: str) -> list[tuple[str, str]]:
    return [("", ""), (filler, ""), ("", filler), (filler, filler)]


def _in_order(lark: str) -> list[str]:
    found: dict[str, None] = {}
    for text, pattern in _LITERAL.findall(_without_schemas(_lark_of(lark))):
        if text:
            found[_unescaped(text)] = None
        for part in _PLAIN.findall(_NOT_PLAIN.sub("()", pattern)):
            found[_unescaped(part)] = None
    return list(found)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda escaped: {"n": "\n", "t": "\t"}.get(escaped[1], escaped[1]), text)


def _lark_of(grammar: str) -> str:
    """The Lark text of a grammar that may be several, in JSON."""
    if not grammar.startswith("{"):
        return grammar
    return "\n".join(part.get("lark_grammar") or "" for part in json.loads(grammar)["grammars"])


def _without_schemas(lark: str) -> str:
    decoder = json.JSONDecoder()
    parts, position = [], 0
    while (place := lark.find("%json", position)) >= 0:
        parts.append(lark[position:place])
        try:
            position = decoder.raw_decode(lark, lark.index("{", place))[1]
        except ValueError:  # in a comment, or in a text
            position = place + len("%json")
    return "".join([*parts, lark[position:]])


def most_growth(lark: str) -> int:
    """More tokens than one token can make necessary, for most grammars.

    What it opens is spelled out in the grammar, where every token has a byte at least. It is repeated as often as the
    counts around it say, each within the others at worst, and as often as definitions within definitions refer to it.
    """
    counts = [int(one or other) for one, other in _COUNT.findall(lark)]
    uses = Counter(_REFERENCE.findall(lark)).values()
    growth = len(lark.encode())
    for times in (*counts, *uses):
        growth = min(growth * max(1, times), sys.maxsize)
    return growth
