"""The command line: ``rksc ask``, ``chat``, ``run``, ``serve``, ``calibrate``, ``doctor``, ``cache`` and ``bench``.

What a command needs is imported inside it, so that ``rksc --help`` does not wait for torch.
"""

from __future__ import annotations

import io
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from rksc_agents.cli.ask import ask as _ask  # by another name: `cli.ask` is the module
from rksc_agents.cli.calibration import calibrate
from rksc_agents.cli.chat import chat
from rksc_agents.cli.common import STYLE, Commands
from rksc_agents.cli.housekeeping import cache, doctor
from rksc_agents.cli.measure import bench
from rksc_agents.cli.run import run
from rksc_agents.cli.serve import serve

__all__ = ["app", "main"]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rksc {version('rksc-agents')}")
        raise typer.Exit


app = typer.Typer(cls=Commands, pretty_exceptions_enable=False, **STYLE)


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Multi-branch reasoning on local Hugging Face models: branches share one KV cache."""


app.command()(_ask)
app.command()(chat)
app.command()(run)
app.command()(serve)
app.command()(calibrate)
app.command()(doctor)
app.add_typer(cache, name="cache")
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer in any script prints in any locale
    app(prog_name="rksc")
