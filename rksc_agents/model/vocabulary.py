"""A tokenizer's tokens, in groups by what they do for the end of a text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Tokens = Sequence[int]

_WIDE = 24  # where so many printable letters may come, a text is free: quotes close it, brackets are just letters
_FIRST = b"1203456789" + bytes(range(65, 91)) + bytes(range(97, 123)) + b"-@:/. "  # 1111-11-11T11:11:11Z is a date
_LAST = b'"[{'


class Vocabulary:
    """Tokens that complete texts, in groups; in each group the better one comes first.

    Attributes
    ----------
    texts : list of bytes
        What each token stands for.
    quotes : array
        Closing quotes with the brackets behind them, as in `"}]`, the longest first.
    brackets : array
        Closing brackets, the longest first.
    separators : array
        Commas, colons and semicolons.
    letters : array
        Single bytes: digits, letters, other signs, and what opens something.
    long : array
        Several letters and digits, the longest first, for texts that must have some length.
    special : array
        Added tokens that are no text.
    shortest : array
        All other tokens, the shortest first.
    """

    def __init__(self, tokenizer: LLTokenizer, eos: Collection[int]) -> None:
        texts = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        special = {token for token in range(len(texts)) if tokenizer.is_special_token(token)}
        plain = [token for token, text in enumerate(texts) if text and token not in special and token not in eos]
        by_length = sorted(plain, key=lambda token: (len(texts[token]), token))

        def those(pattern: bytes, tokens: Tokens) -> NDArray[np.int64]:
            return np.array([token for token in tokens if re.fullmatch(pattern, texts[token])], dtype=np.int64)

        singles = {texts[token]: token for token in reversed(by_length) if len(texts[token]) == 1}
        self.texts = texts
        self.quotes = those(rb'"[}\])]*', by_length[::-1])
        self.brackets = those(rb"[}\])>]+", by_length[::-1])
        self.separators = those(rb"[,:;] ?", by_length)
        self.letters = np.array([singles[letter] for letter in sorted(singles, key=_taste)], dtype=np.int64)
        self.long = those(rb"[a-zA-Z0-9]{2,}", by_length[::-1])
        self.special = np.array(sorted(special - set(eos)), dtype=np.int64)
        self.shortest = np.array(by_length, dtype=np.int64)

    def size(self, tokens: Tokens) -> int:
        """How many bytes `tokens` stand for."""
        return sum(len(self.texts[token]) for token in tokens)

    def candidates(self, mask: NDArray[np.bool_], literals: Sequence[Tokens], again: bool) -> Iterator[Tokens]:
        """What might complete a text, the likeliest first.

        Parameters
        ----------
        mask : array
            The tokens that may come next, [vocabulary].
        literals : sequence of sequence of int
            Texts that the grammar spells out, as tokens.
        again : bool
            Whether the same mask was there before: one letter more did not help.
        """
        letters = self.letters[mask[self.letters]].tolist()
        printable = [token for token in letters if 32 <= self.texts[token][0] < 127]
        if len(printable) >= _WIDE:
            yield from _ends(self.quotes, mask)
            yield from _some(self.special, mask, 8)
            yield from literals
            if again:
                yield from _some(self.long, mask, 1)
            kinds = [_kind(self.texts[token]) for token in letters]
            yield from ([token] for at, token in enumerate(letters) if kinds[at] not in kinds[:at])
            yield from _some(self.long, mask, 1)
            yield from _ends(self.brackets, mask)
        else:
            yield from _ends(self.brackets, mask)
            yield from list(_some(self.quotes, mask, len(self.quotes)))[-1:]
            yield from _some(self.separators, mask, 2)
            yield from _some(self.special, mask, 8)
            yield from literals
            digits = [token for token in letters if self.texts[token].isdigit()]
            others = [token for token in letters if not self.texts[token].isdigit()]
            yield from ([token] for token in (*digits[:1], *others, *digits[1:]))
        if not letters:
            yield from _some(self.shortest, mask, 16)


def _taste(letter: bytes) -> tuple[int, bytes]:
    at = _FIRST.find(letter)
    return (at, letter) if at >= 0 else (1000 + (letter in _LAST), letter)


def _kind(letter: bytes) -> bytes:
    """What stands for a letter: digits, small and capital letters, and bytes of other alphabets are alike."""
    if letter.isdigit():
        return b"0"
    if letter.isalpha():
        return b"a" if letter.islower() else b"A"
    return letter if letter[0] < 128 else b""


def _some(tokens: NDArray[np.int64], mask: NDArray[np.bool_], most: int) -> Iterator[Tokens]:
    """The first `most` of the tokens that are allowed."""
    return ([token] for token in tokens[mask[tokens]][:most].tolist())


def _ends(tokens: NDArray[np.int64], mask: NDArray[np.bool_]) -> Iterator[Tokens]:
    """The first and the last of the tokens that are allowed."""
    those = tokens[mask[tokens]].tolist()
    return ([token] for token in (those if len(those) < 3 else (those[0], those[-1])))
