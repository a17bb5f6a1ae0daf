"""``rksc doctor`` and ``rksc cache``: what this machine gives, and what lies in the cache folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from rksc_agents.cli.common import STYLE, AsJson, print_lines

if TYPE_CHECKING:
    from rksc_agents.model.converted import ConvertedCopies

cache = typer.Typer(help="Show or clear the converted copies of models.", **STYLE)


def doctor(as_json: AsJson = False) -> None:
    """Say what device, dtype, attention path and features this machine gives."""
    from rksc_agents.report.terminal import facts

    found = examine()
    print_lines([json.dumps(found)] if as_json else facts(found))


def examine() -> dict[str, Any]:
    """What this machine gives."""
    from rksc_agents.model.device import doctor as examine_device

    found: dict[str, Any] = examine_device()
    return found


def copies() -> ConvertedCopies:
    """The converted copies in the user's cache folder."""
    from rksc_agents.model.converted import ConvertedCopies

    return ConvertedCopies()


@cache.command()
def show(as_json: AsJson = False) -> None:
    """List the converted copies of models.

    The keys of --json: entries, each with name, path, bytes, created; bytes, their sum.
    """
    from rksc_agents.printable import one_line, size

    entries = copies().entries()
    total = sum(entry.bytes for entry in entries)
    if as_json:
        rows = [
            {"name": entry.name, "path": str(entry.path), "bytes": entry.bytes, "created": entry.created.isoformat()}
            for entry in entries
        ]
        typer.echo(json.dumps({"entries": rows, "bytes": total}))
        return
    for entry in entries:
        typer.echo(one_line(f"{entry.name}: {size(entry.bytes)}, {entry.created.isoformat()}, {entry.path}"))
    typer.echo(f"total: {size(total)} in {len(entries)} converted copies")


@cache.command()
def clear(as_json: AsJson = False) -> None:
    """Delete the converted copies of models; they are made again when needed.

    The key of --json: bytes_freed.
    """
    from rksc_agents.printable import size

    freed = copies().clear()
    typer.echo(json.dumps({"bytes_freed": freed}) if as_json else f"freed: {size(freed)}")
