"""`rksc bench load`: how long a fresh process takes to its first token."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rksc_agents.bench import first_token
from rksc_agents.bench.rounds import Progress, in_turn, quartiles
from rksc_agents.bench.table import table
from rksc_agents.config import DEFAULT_MODEL
from rksc_agents.errors import ConfigError, EngineError

PARTS = ("python_s", "import_s", "load_s", "token_s")


def bench_load(
    model: str = DEFAULT_MODEL,
    *,
    runs: int = 5,
    command: Sequence[str] = (sys.executable, "-m", first_token.__name__),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Start a process, load a model in it and ask it for a token; several times, one after the other.

    Parameters
    ----------
    model : str, default "smollm2-135m-instruct"
        As for `rksc ask`.
    runs : int, default 5
        Timed processes; one more comes first and brings the files into memory.
    command : sequence of str
        What is started, with the model's name after it.
    progress : callable or None
        Called with the number of processes so far and in all.

    Returns
    -------
    dict
        model, runs, median_s, spread (quartiles), and the medians of its parts: python_s (until the interpreter runs),
        import_s, load_s, token_s.

    Raises
    ------
    ConfigError
        If `runs` is below 1.
    EngineError
        If a process fails; the message is the last line that it wrote.
    """
    if runs < 1:
        raise ConfigError(f"runs = {runs}: give at least 1")
    (taken,) = in_turn([lambda _: _once([*command, model])], runs, progress)
    totals = [sum(parts.values()) for parts in taken]
    return {
        "model": model,
        "runs": runs,
        "median_s": statistics.median(totals),
        "spread": quartiles(totals),
        **{part: statistics.median(parts[part] for parts in taken) for part in PARTS},
    }


def _once(command: Sequence[str]) -> dict[str, float]:
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - began
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").strip().splitlines()
    if process.returncode or not line:
        last = said[-1] if said else "it wrote nothing"
        raise EngineError(f"the process that loads the model ended with code {process.returncode}: {last}")
    parts: dict[str, float] = json.loads(line)
    return {"python_s": seconds - sum(parts.values()), **parts}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the result as a Markdown table."""
    low, high = found["spread"]
    yield f"{found['model']}, from the start of a process to its first token; {found['runs']} runs"
    yield ""
    yield from table(
        (">median", "quartiles", ">Python", ">import", ">load", ">first token"),
        [(f"{found['median_s']:.2f} s", f"{low:.2f} to {high:.2f}", *(f"{found[part]:.2f} s" for part in PARTS))],
    )
