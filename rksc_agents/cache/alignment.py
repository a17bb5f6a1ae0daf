"""Which tokens of a new prompt can take their KV from another prompt's, at whatever position they stand there.

Equal beginnings share KV exactly. Beyond them, a run of tokens that also stands in the source can take the source's
keys and values, rotated to the new position, at a small loss: the tokens before the run differ. The first tokens of
a run feel that most, so they are computed anew, as are tokens whose KV must never come from elsewhere (numbers) and
the last tokens of the prompt, from which the answer is read.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from rksc_agents.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Alignment:
    """What each token of a target takes from a source.

    Attributes
    ----------
    prefix : int
        Length of the longest common prefix, at most one less than the target's length: shared exactly.
    taken : tuple of (int, int)
        Target position and source position of each token beyond the prefix that takes the source's KV, ascending in
        the target's.
    matched : int
        Tokens beyond the prefix that stand in a run that the source has too, before anything was excluded.
    length : int
        Tokens of the target.
    """

    prefix: int
    taken: tuple[tuple[int, int], ...]
    matched: int
    length: int

    @property
    def computed(self) -> tuple[int, ...]:
        """Target positions beyond the prefix that take nothing, ascending."""
        taken = {position for position, _ in self.taken}
        return tuple(position for position in range(self.prefix, self.length) if position not in taken)


def align(
    source: Sequence[int],
    target: Sequence[int],
    *,
    first: int = 8,
    shortest: int = 4,
    last: int = 4,
    never: Container[int] = (),
) -> Alignment:
    """Find the tokens of `target` whose KV can be taken from `source`.

    Runs are chosen longest first, then by their place in the target, so each is as long as the runs chosen before it
    allow; a moved block counts. Where the source has a run more than once, the place that goes on with the diagonal
    of the run before it is taken, else the first. Time and memory are linear in the prompts' lengths, but for a sort.

    Parameters
    ----------
    source, target : sequence of int
        Tokens; the target has at least one.
    first : int, default 8
        Tokens at the beginning of each run that are computed all the same; at least 0.
    shortest : int, default 4
        Tokens that a run has at least; at least 1.
    last : int, default 4
        Tokens at the end of the target that are computed in any case, if the prefix does not cover them; at least 1.
    never : container of int
        Tokens that are always computed beyond the prefix.

    Raises
    ------
    ConfigError
        If a number is out of its range or the target is empty.
    """
    for name, value, least in (("first", first, 0), ("shortest", shortest, 1), ("last", last, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} = {value!r}: give a whole number of tokens, {least} or more")
    if not target:
        raise ConfigError("the target has no tokens: give a prompt of at least one token")
    prefix = _common_prefix(source, target)
    runs = _runs(source, target, prefix, shortest)
    end = len(target) - last
    taken = tuple(
        (position, position + shift)
        for start, stop, shift in runs
        for position in range(start + first, min(stop, end))
        if target[position] not in never
    )
    return Alignment(prefix, taken, sum(stop - start for start, stop, _ in runs), len(target))


def _common_prefix(source: Sequence[int], target: Sequence[int]) -> int:
    most = min(len(source), len(target) - 1)
    return next((i for i in range(most) if source[i] != target[i]), most)


def _runs(source: Sequence[int], target: Sequence[int], prefix: int, shortest: int) -> list[tuple[int, int, int]]:
    """The chosen runs, ascending: first target position, the one past the last, and source minus target position."""
    index = _Substrings(source)
    longest, states = zip(*index.match(target[prefix:]), strict=True)
    runs = []
    diagonal: int | None = None
    for start, stop in _longest_first(longest, shortest):
        first, end = prefix + start, prefix + stop
        if diagonal is None or not _equal(source, target, first, end, diagonal):
            diagonal = index.first_end(states[stop - 1], stop - start) - end
        runs.append((first, end, diagonal))
    return runs


def _longest_first(longest: Sequence[int], shortest: int) -> list[tuple[int, int]]:
    """Choose disjoint intervals, where one that ends with position e may have up to ``longest[e]`` positions."""
    waiting = [(-length, end) for end, length in enumerate(longest, start=1) if length >= shortest]
    heapify(waiting)
    chosen: list[tuple[int, int]] = []
    while waiting:
        length, end = heappop(waiting)
        length = -length
        at = bisect(chosen, (end,))  # intervals before this one start before `end`
        free = end - chosen[at - 1][1] if at else end  # what the interval to the left leaves
        if free >= length:
            insort(chosen, (end - length, end))
        elif free >= shortest:
            heappush(waiting, (-free, end))
    return chosen


def _equal(source: Sequence[int], target: Sequence[int], start: int, stop: int, shift: int) -> bool:
    return stop + shift <= len(source) and all(
        source[position + shift] == target[position] for position in range(start, stop)
    )


class _Substrings:
    """All substrings of a sequence: a suffix automaton, built in linear time.

    A state stands for substrings that end at the same places; the longest has `length` tokens, and `link` leads to
    the state of the longest suffix that also ends elsewhere. Unlike an index of n-grams it needs no limit on the
    places of a frequent n-gram to stay linear where a prompt repeats itself.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]  # where the state's substrings end for the first time
        whole = 0
        for token in tokens:
            whole = self._extend(whole, token)

    def _extend(self, whole: int, token: int) -> int:
        new = self._state({}, self._length[whole] + 1, self._length[whole] + 1)
        at = whole
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        if at < 0:
            self._link[new] = 0
            return new
        found = self._next[at][token]
        if self._length[found] != self._length[at] + 1:  # only its shorter substrings end here too: a state of theirs
            shorter = self._state(dict(self._next[found]), self._length[at] + 1, self._end[found])
            self._link[shorter], self._link[found] = self._link[found], shorter
            while at >= 0 and self._next[at].get(token) == found:
                self._next[at][token] = shorter
                at = self._link[at]
            found = shorter
        self._link[new] = found
        return new

    def _state(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._length) - 1

    def match(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """For each token the length of the longest substring that ends with it, and its state."""
        state, length = 0, 0
        for token in tokens:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
            yield length, state

    def first_end(self, state: int, length: int) -> int:
        """Where the `length` last tokens of a substring of `state` end for the first time: one past the last."""
        while self._length[self._link[state]] >= length:
            state = self._link[state]
        return self._end[state]
