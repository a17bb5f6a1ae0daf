"""How runs take turns, and how results are written: rounds, medians, tables."""

from __future__ import annotations

import pytest

from rksc_agents.bench.peers.system import Took
from rksc_agents.bench.rounds import in_turn, middle, order, quartiles
from rksc_agents.bench.table import table


def test_every_round_runs_each_job_once_and_begins_with_another() -> None:
    ran: list[tuple[str, int]] = []
    told: list[tuple[int, int]] = []

    def job(name: str, number: int) -> str:
        ran.append((name, number))
        return f"{name}{number}"

    jobs = [lambda number, name=name: job(name, number) for name in "abc"]
    assert in_turn(jobs, 3, lambda done, total: told.append((done, total))) == [
        ["a1", "a2", "a3"], ["b1", "b2", "b3"], ["c1", "c2", "c3"],
    ]  # fmt: skip
    assert ran == [(name, number) for number, names in enumerate(("abc", "bca", "cab", "abc")) for name in names]
    assert told == [(done, 12) for done in range(1, 13)]


def test_order_is_a_rotation() -> None:
    assert [order(3, number) for number in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_quartiles() -> None:
    assert quartiles([2.0]) == [2.0, 2.0]
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 4.0]


def test_the_middle_is_unknown_where_one_run_does_not_know() -> None:
    known = [Took(seconds, (), passes=passes) for seconds, passes in ((1.0, 4), (3.0, 8), (9.0, 6))]
    assert (middle(known, "seconds"), middle(known, "passes", max)) == (3.0, 8)
    assert middle([*known, Took(1.0, ())], "passes") is None


def test_a_table_is_markdown_with_aligned_columns() -> None:
    assert list(table(("way", ">n"), [("[bold]a|b", "1"), ("語", "1,000")])) == [
        "| way        |     n |",
        "| ---------- | ----: |",
        "| [bold]a\\|b |     1 |",
        "| 語         | 1,000 |",
    ]


def test_a_row_has_a_cell_for_every_column() -> None:
    with pytest.raises(ValueError, match="zip"):
        list(table(("a", "b"), [("1",)]))
