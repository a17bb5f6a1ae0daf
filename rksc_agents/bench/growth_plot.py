"""The picture of `rksc bench growth`: time and KV against branches, a line for each prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rksc_agents.bench.svg import blank, save


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw two panels as an SVG file; dashed is the KV with a copy of the prompt for each branch.

    Raises
    ------
    ConfigError
        If matplotlib is missing, or the file cannot be written.
    """
    figure = blank(9.6, 4.2)
    time, kv = figure.subplots(1, 2)
    sizes = list(dict.fromkeys((row["prefix"], row["in_flight"]) for row in found["rows"]))
    for number, (prefix, in_flight) in enumerate(sizes):
        rows = [row for row in found["rows"] if (row["prefix"], row["in_flight"]) == (prefix, in_flight)]
        rows.sort(key=lambda row: row["branches"])
        branches = [row["branches"] for row in rows]
        style = {"color": f"C{number % 10}", "marker": "o"}
        name = f"{prefix:,} tokens" + (f", {in_flight} questions" if in_flight > 1 else "")
        time.plot(branches, [row["median_s"] for row in rows], label=name, gid=f"time-{prefix}-{in_flight}", **style)
        kv.plot(branches, [row["kv_bytes"] / 2**20 for row in rows], gid=f"kv-{prefix}-{in_flight}", **style)
        kv.plot(branches, [row["kv_bytes_copied"] / 2**20 for row in rows], linestyle="--", **style)
    for axes, what in ((time, "seconds"), (kv, "KV, MiB (dashed: prompt copied)")):
        axes.set_xlabel("branches")
        axes.set_ylabel(what)
        axes.set_ylim(bottom=0)
    time.legend()
    figure.suptitle(found["machine"]["model"], parse_math=False)
    save(figure, path)
