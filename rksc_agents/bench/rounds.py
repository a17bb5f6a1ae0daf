"""How runs take turns, and what is made of their times.

Every round runs each job once, and each round begins with another one, so that a drift of the machine and what the job
before left behind meet all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Taken = TypeVar("Taken")
Progress = Callable[[int, int], None]


def in_turn(jobs: Sequence[Callable[[int], Taken]], runs: int, progress: Progress | None = None) -> list[list[Taken]]:
    """What each job gave in each run; a first round, which warms up, is left out.

    Parameters
    ----------
    jobs : sequence of callable
        Each is called with the number of the round, which is its seed.
    runs : int
        Rounds after the first.
    progress : callable or None
        Called with the number of runs so far and in all.
    """
    taken: list[list[Taken]] = [[] for _ in jobs]
    done = 0
    for number in range(runs + 1):
        for at in order(len(jobs), number):
            found = jobs[at](number)
            if number:
                taken[at].append(found)
            done += 1
            if progress is not None:
                progress(done, (runs + 1) * len(jobs))
    return taken


def order(count: int, number: int) -> list[int]:
    """In which order `count` jobs run in round `number`: each round begins one further on."""
    return [(number + at) % count for at in range(count)]


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower and the upper quartile."""
    if len(values) == 1:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def middle(taken: Sequence[Any], field: str, median: Callable[[list[Any]], Any] = statistics.median) -> Any:
    """The median of a field; None where a run does not know it."""
    values = [getattr(each, field) for each in taken]
    return None if None in values else median(values)
