"""Finding tokens that complete a text soon: a best-first search over few candidates per state.

A state of a grammar cannot be looked into, but its mask can: two places with the same mask are most likely alike, and a
way that keeps coming back to one mask most likely goes round in a circle.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rksc_agents.model.spelled import guesses, literals, most_growth
from rksc_agents.model.vocabulary import Tokens, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

STEPS = 1024
"""Candidates that are tried before a search gives up."""

PATIENCE = (6, 60)
"""How often a mask may come back before it looks like a circle; a long list does too, hence a second try."""

RUN = 12
"""How long a mask may stay as it is before that looks like a text without end; the longest run in a UUID."""


def unpacked(bits: bytes) -> NDArray[np.bool_]:
    """A mask of bits, as llguidance makes it, with one value per token."""
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little").view(np.bool_)


@dataclass(slots=True)
class _State:
    """A text that was tried.

    Attributes
    ----------
    cost : float
        How little it promises.
    tokens : tuple of int
        What was written since the search began.
    size : int
        Their bytes.
    masks : dict
        How often each mask came on the way here, this one included.
    mask : int
        What may follow, as a hash.
    run : int
        For how many candidates that has been so.
    tried : int
        How many of its candidates were tried.
    """

    cost: float
    matcher: LLMatcher
    tokens: tuple[int, ...] = ()
    size: int = 0
    masks: dict[int, int] = field(default_factory=dict)
    mask: int = 0
    run: int = 0
    tried: int = 0
    candidates: Iterator[Tokens] = field(default_factory=lambda: iter(()))


class _Search:
    """What is left to try, and what was learned.

    Attributes
    ----------
    patience : int
        How often a mask may come back on one way before that speaks against it.
    places : Counter
        How often a mask came behind a number of bytes: states with both in common are most likely the same.
    masks : set
        Masks that were seen.
    useful : dict
        For a mask, a candidate that led away from it.
    tried : Counter
        How often the n-th candidate was tried where a mask was.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.places: Counter[tuple[int, int]] = Counter()
        self.masks: set[int] = set()
        self.useful: dict[int, Tokens] = {}
        self.tried: Counter[tuple[int, int]] = Counter()
        self._queue: list[tuple[float, int, _State]] = []
        self._order = itertools.count()

    def push(self, cost: float, state: _State) -> None:
        heapq.heappush(self._queue, (cost, next(self._order), state))

    def pop(self) -> tuple[float, _State] | None:
        if not self._queue:
            return None
        cost, _, state = heapq.heappop(self._queue)
        return cost, state

    def dearer(self, state: _State) -> float:
        """What the next candidate costs beyond the one before it: more, the more often it was tried at such a place."""
        state.tried += 1
        key = (state.mask, state.tried)
        self.tried[key] += 1
        return float(0.1 * 2 ** min(self.tried[key], 20))

    def weigh(self, state: _State, bits: bytes) -> None:
        """Note what may follow `state`, and what that says about the way there."""
        before, state.mask = state.mask, hash(bits)
        met = state.masks.get(state.mask, 0)
        state.masks = {**state.masks, state.mask: met + 1}
        state.run = state.run + 1 if state.mask == before else 0
        state.cost += 0.002
        if state.run > RUN or (state.run == 0 and met > self.patience):
            state.cost += 0.05
        place = (state.mask, state.size)
        if self.places[place]:
            state.cost += 0.5 * 2 ** min(self.places[place], 6)
        self.places[place] += 1

    def learn(self, state: _State, candidate: Tokens, child: _State) -> None:
        """Remember a candidate that leads away from such a state, and rather one that leads to something new."""
        away = child.mask != state.mask and state.mask not in self.useful
        if away or (child.mask not in self.masks and state.masks[state.mask] > 1):
            self.useful[state.mask] = candidate
        self.masks.add(child.mask)


class Closer:
    """Completes texts of one grammar.

    Parameters
    ----------
    tokenizer : LLTokenizer
        The model's, as llguidance has it.
    vocabulary : Vocabulary
        Its tokens.
    lark : str
        The grammar.

    Attributes
    ----------
    growth : int
        More tokens than one token can make necessary.
    """

    def __init__(self, tokenizer: LLTokenizer, vocabulary: Vocabulary, lark: str) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._literals: list[Tokens] = [[int(token)] for token in re.findall(r"<\[(\d+)\]>", lark)]
        self._literals += [tokenizer.tokenize_str(text) for text in literals(lark)]
        self._guesses: list[Tokens] = [tokenizer.tokenize_str(text) for text in guesses(lark)]
        self.growth = most_growth(lark)

    def closing(self, matcher: LLMatcher) -> list[int] | None:
        """Tokens that complete the text that `matcher` has read; None if none were found."""
        for guess in self._guesses:  # masks tell nothing where anything may be written between two texts
            if completes(matcher, guess):
                return list(guess)
        for patience in PATIENCE:
            found = self._search(matcher, _Search(patience))
            if found is not None:
                return shortened(matcher, list(found.tokens))
        return None

    def _search(self, matcher: LLMatcher, search: _Search) -> _State | None:
        start = _State(0.0, matcher.deep_copy())
        if self._force(start):
            return start
        self._look(start, search)
        search.masks.add(start.mask)
        search.push(start.cost, start)
        for _ in range(STEPS):
            if (best := search.pop()) is None:
                return None
            cost, state = best
            candidate = next(state.candidates, None)
            if candidate is None:
                continue
            search.push(cost + search.dearer(state), state)
            child = self._child(state, cost, candidate)
            if child is None:
                continue
            if self._force(child):
                return child
            self._look(child, search)
            search.learn(state, candidate, child)
            search.push(child.cost, child)
        return None

    def _child(self, state: _State, cost: float, tokens: Tokens) -> _State | None:
        matcher = state.matcher.deep_copy()
        if matcher.try_consume_tokens(list(tokens)) != len(tokens):
            return None
        size = state.size + self._vocabulary.size(tokens)
        return _State(cost, matcher, (*state.tokens, *tokens), size, state.masks, state.mask, state.run)

    def _force(self, state: _State) -> bool:
        """Write what can only come next; say whether the text is complete."""
        while not state.matcher.is_accepting():
            forced = state.matcher.compute_ff_bytes()
            tokens = self._tokenizer.tokenize_bytes(forced) if forced else []
            written = tokens[: state.matcher.try_consume_tokens(tokens)] if tokens else []
            if not written:
                return False
            state.tokens = (*state.tokens, *written)
            state.size += self._vocabulary.size(written)
            state.cost += 0.0003 * len(written)
        return True

    def _look(self, state: _State, search: _Search) -> None:
        """See what may follow."""
        bits = state.matcher.compute_bitmask()
        search.weigh(state, bits)
        state.candidates = self._candidates(bits, search.useful.get(state.mask), state.masks[state.mask] > 1)

    def _candidates(self, bits: bytes, useful: Tokens | None, again: bool) -> Iterator[Tokens]:
        if useful is not None:
            yield useful
        mask = unpacked(bits)[: len(self._vocabulary.texts)]
        for candidate in self._vocabulary.candidates(mask, self._literals, again):
            if candidate != useful:
                yield candidate


def completes(matcher: LLMatcher, tokens: Tokens) -> bool:
    """Whether `tokens` complete the text that `matcher` has read; it stays where it is."""
    trial = matcher.deep_copy()
    return trial.try_consume_tokens(list(tokens)) == len(tokens) and trial.is_accepting()


def shortened(matcher: LLMatcher, tokens: list[int]) -> list[int]:
    """A completion, with one token in place of many equal ones where one is enough: the search goes on for a while."""
    kept: list[int] = []
    position = 0
    for token, run in itertools.groupby(tokens):
        size = len(list(run))
        position += size
        enough = size > 3 and completes(matcher, [*kept, token, *tokens[position:]])
        kept += [token] if enough else [token] * size
    return kept
