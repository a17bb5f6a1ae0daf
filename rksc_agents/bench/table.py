"""Tables in Markdown whose columns are aligned, for a terminal and for a page alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len

RIGHT = ">"
"""Begins the heading of a column that stands to the right."""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table.

    Parameters
    ----------
    headings : sequence of str
        One for each column; ``">n"`` is the heading "n" of a column of numbers.
    rows : sequence of sequence of str
        Cells, one for each column.
    """
    right = [heading.startswith(RIGHT) for heading in headings]
    grid = [[heading.removeprefix(RIGHT) for heading in headings]]
    grid += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *map(cell_len, column)) for column in zip(*grid, strict=True)]
    rule = ["-" * (width - 1) + (":" if to else "-") for width, to in zip(widths, right, strict=True)]
    for row in (grid[0], rule, *grid[1:]):
        yield f"| {' | '.join(map(_padded, row, widths, right))} |"


def _padded(cell: str, width: int, right: bool) -> str:
    space = " " * (width - cell_len(cell))
    return space + cell if right else cell + space
