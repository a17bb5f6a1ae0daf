"""Pictures as SVG files, drawn by matplotlib where that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rksc_agents.errors import ConfigError
from rksc_agents.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_drawing() -> None:
    """Say before a long measurement whether its picture can be drawn.

    Raises
    ------
    ConfigError
        If matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: install the extra `plot` (pip install 'rksc-agents[plot]')")


def blank(width: float, height: float) -> Figure:
    """An empty figure, in inches, that no window shows.

    Raises
    ------
    ConfigError
        If matplotlib is missing.
    """
    check_drawing()
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all; equal figures make equal files.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    from matplotlib import rc_context

    def draw(temporary: Path) -> None:
        with rc_context({"svg.hashsalt": "rksc"}):
            figure.savefig(temporary, format="svg", metadata={"Date": None})

    write_whole(path, draw, way_out="give another file for the plot")
