"""The picture of `rksc bench accuracy`: accuracy against time, and which ways no other one beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rksc_agents.bench.svg import blank, save


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw accuracy with its interval against seconds as an SVG file: a mark for each way, a line through the best.

    Raises
    ------
    ConfigError
        If matplotlib is missing, or the file cannot be written.
    """
    figure = blank(7.2, 4.4)
    axes = figure.add_subplot()
    for number, row in enumerate(found["rows"]):
        accuracy = 100 * row["accuracy"]
        spread = [[max(0.0, accuracy - 100 * row["low"])], [max(0.0, 100 * row["high"] - accuracy)]]
        (mark, _, _) = axes.errorbar(
            [row["seconds"]],
            [accuracy],
            yerr=spread,
            marker="osD^vP*X"[number % 8],
            linestyle="none",
            capsize=3,
            color=f"C{number % 10}",
            label=row["way"],
        )
        mark.set_gid(row["way"])
    best = front(found["rows"])
    axes.plot(
        [row["seconds"] for row in best],
        [100 * row["accuracy"] for row in best],
        drawstyle="steps-post",
        color="0.6",
        zorder=0,
        gid="front",
    )
    axes.set_xlabel("seconds per question")
    axes.set_ylabel("right answers, % (95 % interval)")
    axes.set_title(f"{found['model']}, {found['questions']} questions", parse_math=False)
    axes.legend()
    save(figure, path)


def front(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that no quicker one equals in accuracy (Pareto), quickest first."""
    best: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["seconds"], -row["accuracy"])):
        if not best or row["accuracy"] > best[-1]["accuracy"]:
            best.append(row)
    return best
