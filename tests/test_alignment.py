"""Tokens that can take KV from another prompt: known cases, properties, and a brute-force search as the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rksc_agents.cache.alignment import Alignment, align
from rksc_agents.errors import ConfigError

PROMPTS = st.integers(1, 5).flatmap(lambda alphabet: st.lists(st.integers(1, alphabet), max_size=40))
TARGETS = PROMPTS.filter(bool)


def diagonals(alignment: Alignment) -> list[int]:
    return [source - target for target, source in alignment.taken]


def runs_of(taken: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Pairs split where the target or the source does not go on."""
    runs: list[list[tuple[int, int]]] = []
    for target, source in taken:
        if not runs or runs[-1][-1] != (target - 1, source - 1):
            runs.append([])
        runs[-1].append((target, source))
    return runs


def slow(source: Sequence[int], target: Sequence[int], prefix: int, shortest: int) -> list[tuple[int, int]]:
    """The longest run of unclaimed tokens again and again, found by looking everywhere: its start and its stop."""
    claimed = [at < prefix for at in range(len(target))]
    found = []
    while True:
        best = (0, 0)
        for start in range(len(target)):
            for at in range(len(source)):
                n = 0
                while (
                    start + n < len(target)
                    and at + n < len(source)
                    and not claimed[start + n]
                    and target[start + n] == source[at + n]
                ):
                    n += 1
                best = max(best, (n, -start))
        length, start = best[0], -best[1]
        if length < shortest:
            return sorted(found)
        found.append((start, start + length))
        claimed[start : start + length] = [True] * length


def test_a_changed_word_shifts_the_rest() -> None:
    source = [1, 2, 3, 50, 4, 5, 6, 7, 8, 9, 10]
    target = [1, 2, 3, 60, 61, 4, 5, 6, 7, 8, 9, 10]
    got = align(source, target, first=2, last=1)
    assert got.prefix == 3
    assert got.taken == ((7, 6), (8, 7), (9, 8), (10, 9))
    assert got.computed == (3, 4, 5, 6, 11)
    assert got.matched == 7


def test_blocks_in_another_order() -> None:
    a, b = list(range(10, 20)), list(range(30, 45))
    got = align([1, *a, *b, 2], [1, *b, *a, 2], first=0, last=1)
    assert got.prefix == 1
    assert got.taken == tuple((1 + i, 11 + i) for i in range(15)) + tuple((16 + i, 1 + i) for i in range(10))
    assert got.computed == (26,)
    assert got.matched == 25


def test_the_longest_run_wins_over_one_that_begins_before_it() -> None:
    source = [1, 2, 3, 4, 9, 3, 4, 5, 6, 7, 8]
    got = align(source, [0, 1, 2, 3, 4, 5, 6, 7, 8, 0], first=0, last=1, shortest=4)
    assert got.taken == tuple((3 + i, 5 + i) for i in range(6))


def test_a_run_goes_on_with_the_diagonal_of_the_run_before_it() -> None:
    block = [5, 6, 7, 8]
    source = [*block, 1, 2, 3, 4, 20, *block]
    assert diagonals(align(source, [0, 1, 2, 3, 4, 21, *block, 0], first=0, last=1)) == [3] * 8
    assert diagonals(align(source, [0, 4, 3, 2, 1, 21, *block, 0], first=0, last=1)) == [-6] * 4  # else the first


def test_no_diagonal_leads_out_of_the_source() -> None:
    block = [5, 6, 7, 8]
    target = [0, 1, 2, 3, 4, 9, *block, 0]
    assert diagonals(align([*block, 1, 2, 3, 4], target, first=0, last=1)) == [3] * 4 + [-6] * 4


def test_numbers_and_the_last_tokens_are_computed() -> None:
    source = list(range(20))
    got = align(source, [99, *source], first=3, last=5, never={7, 9})
    assert got.taken == tuple((at + 1, at) for at in (3, 4, 5, 6, 8, 10, 11, 12, 13, 14))
    assert got.matched == 20


def test_equal_prompts_share_all_but_the_last_token() -> None:
    assert align([1, 2, 3], [1, 2, 3]) == Alignment(prefix=2, taken=(), matched=0, length=3)
    assert align([1, 2, 3, 4], [1, 2, 3]).prefix == 2
    assert align([1, 2], [1, 2, 3]).prefix == 2
    assert align([], [1, 2, 3]).computed == (0, 1, 2)


def test_a_prompt_that_repeats_itself_takes_bounded_work() -> None:
    """Each token is looked at a few times, where trying every pair of places would take 16 million looks."""
    looks = 0

    class Counted(int):
        def __hash__(self) -> int:
            return int.__hash__(self)

        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return int(self) == other

    source = [Counted(1 + i % 2) for i in range(4000)]
    got = align(source, [Counted(t) for t in (3, *source[1:2000], 4, *source[:1999])])
    assert got.matched == 3998
    assert looks < 40 * 8000


@given(PROMPTS, TARGETS, st.integers(0, 4), st.integers(1, 5), st.integers(1, 5), st.sets(st.integers(1, 5)))
def test_what_is_taken_is_equal_and_nothing_else_is_left_out(
    source: list[int], target: list[int], first: int, shortest: int, last: int, never: set[int]
) -> None:
    got = align(source, target, first=first, shortest=shortest, last=last, never=never)
    prefix = got.prefix
    assert source[:prefix] == target[:prefix]
    assert prefix == len(target) - 1 or prefix == len(source) or source[prefix] != target[prefix]
    assert all(source[s] == target[t] for t, s in got.taken)
    assert not {target[t] for t, _ in got.taken} & never
    assert all(t < len(target) - last for t, _ in got.taken)
    assert [t for t, _ in got.taken] == sorted({t for t, _ in got.taken})
    assert sorted([t for t, _ in got.taken] + list(got.computed)) == list(range(prefix, len(target)))
    assert len(got.taken) <= got.matched <= len(target) - prefix
    # All runs, from which nothing but the last token is excluded.
    every = align(source, target, first=0, shortest=shortest, last=1)
    assert set(got.taken) <= set(every.taken)
    assert got.matched == every.matched


@given(PROMPTS, TARGETS, st.integers(1, 5))
def test_runs_are_those_of_a_brute_force_search(source: list[int], target: list[int], shortest: int) -> None:
    got = align(source, [*target, 9], first=0, shortest=shortest, last=1)  # 9 is in no source
    expected = slow(source, [*target, 9], got.prefix, shortest)
    assert [t for t, _ in got.taken] == [t for start, stop in expected for t in range(start, stop)]
    assert got.matched == len(got.taken)
    shift = None
    places = dict(got.taken)
    for start, stop in expected:
        where = [
            at for at in range(len(source) - stop + start + 1) if source[at : at + stop - start] == target[start:stop]
        ]
        expected_place = start + shift if shift is not None and start + shift in where else where[0]
        assert [places[t] for t in range(start, stop)] == list(range(expected_place, expected_place + stop - start))
        shift = expected_place - start


@given(PROMPTS, TARGETS, st.integers(1, 8))
def test_each_run_loses_its_first_tokens(source: list[int], target: list[int], first: int) -> None:
    target = [*target, 9]
    every = align(source, target, first=0, last=1)
    got = align(source, target, first=first, last=1)
    kept = set(got.taken)
    cut = 0
    for start, stop in slow(source, target, every.prefix, 4):
        run = every.taken[cut : cut + stop - start]
        cut += stop - start
        assert [pair for pair in run if pair in kept] == list(run[first:])
    assert cut == len(every.taken)


@pytest.mark.parametrize(
    ("name", "value"), [("first", -1), ("shortest", 0), ("last", 0), ("first", 1.5), ("last", True)]
)
def test_bad_numbers_raise(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} = {value!r}: give a whole number of tokens, "):
        align([1], [1], **{name: value})  # type: ignore[arg-type]


def test_an_empty_target_raises() -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        align([1], [])
