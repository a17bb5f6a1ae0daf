"""Minimum Bayes risk over free texts: the one that is closest to the others (Bertsch et al. 2023, arXiv 2310.01387)."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence

from rksc_agents.errors import ConfigError

_ORDERS = (1, 2, 3, 4)
# scripts that are written without spaces, where a character stands for a word: Thai, Lao, Myanmar, Khmer, kana, Han,
# Hangul (which has spaces, but particles glued to its words)
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_UNSPACED += "\U00020000-\U0003ffff"
_MARKS = "!-/:-@\\[-^`{-~\u00a1-\u00bf\u2010-\u205e\u3001-\u303f\uff01-\uff0f\uff1a-\uff20"
# not \w, which leaves out the vowel signs of Indic scripts
_WORD = re.compile(rf"[{_UNSPACED}{_MARKS}]|[^\s{_UNSPACED}{_MARKS}]+")

_Profile = tuple[frozenset[int], ...]
"""The n-grams of a text per order, each occurrence by a number, so that set operations count them."""


def similarity(a: str, b: str) -> float:
    """Return how much two texts have in common, in [0, 1]; the order of the texts does not matter.

    The mean F1 over word n-grams of one to four words, upper and lower case alike. Punctuation marks are words, and so
    are the characters of scripts without spaces. An order longer than both texts is left out. Texts that differ in
    case and white space alone have 1.
    """
    return _overlap(*_profiles([a, b]))


def closest(texts: Sequence[str], weights: Sequence[float]) -> tuple[int, tuple[float, ...]]:
    """Return the index of the text with the largest utility, the earliest of equals, and the utilities.

    A text's utility is its mean :func:`similarity` to all others, each counted by its weight (alike where all those
    weights are 0). A text alone has 1. An empty text has 0, and wins only if all are empty.

    Parameters
    ----------
    texts : sequence of str
        At least one.
    weights : sequence of float
        One for each text, finite and not negative.
    """
    if not texts or len(texts) != len(weights):
        raise ConfigError(f"{len(texts)} texts with {len(weights)} weights: give at least one text, and each a weight")
    if not all(math.isfinite(weight) and weight >= 0.0 for weight in weights):
        raise ConfigError(f"weights = {list(weights)!r}: give finite numbers from 0")
    profiles = _profiles(texts)
    empty = [not profile for profile in profiles]
    shared = [[0.0] * len(texts) for _ in texts]
    for i, profile in enumerate(profiles):
        for j in range(i):
            shared[i][j] = shared[j][i] = _overlap(profile, profiles[j])
    utilities = tuple(0.0 if empty[i] else _utility(i, shared[i], weights) for i in range(len(texts)))
    return min(range(len(texts)), key=lambda i: (empty[i], -utilities[i], i)), utilities


def _utility(own: int, shared: Sequence[float], weights: Sequence[float]) -> float:
    others = [i for i in range(len(weights)) if i != own]
    if not others:
        return 1.0
    top = max(weights[i] for i in others)
    # in proportion to the largest, so that tiny weights do not underflow
    scaled = [weights[i] / top if top > 0.0 else 1.0 for i in others]
    mean = math.fsum(w * shared[i] for w, i in zip(scaled, others, strict=True)) / math.fsum(scaled)
    return round(mean, 12)  # equal utilities stay equal, whatever weights they were rounded with


def _overlap(a: _Profile, b: _Profile) -> float:
    if not a or not b:
        return float(a == b)
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x or y]
    return math.fsum(2 * len(x & y) / (len(x) + len(y)) for x, y in pairs) / len(pairs)


def _profiles(texts: Sequence[str]) -> list[_Profile]:
    """The n-grams of each text; equal ones of all texts have equal numbers. Nothing for a text without words."""
    numbers: dict[Hashable, int] = {}
    return [_profile(_WORD.findall(unicodedata.normalize("NFC", text.casefold())), numbers) for text in texts]


def _profile(words: Sequence[str], numbers: dict[Hashable, int]) -> _Profile:
    orders = []
    for order in _ORDERS if words else ():
        seen: Counter[tuple[str, ...]] = Counter()
        grams = set()
        for start in range(len(words) - order + 1):
            gram = tuple(words[start : start + order])
            grams.add(numbers.setdefault((gram, seen[gram]), len(numbers)))
            seen[gram] += 1
        orders.append(frozenset(grams))
    return tuple(orders)
