"""`rksc bench growth`: how this package's time and KV grow with branches, prompt, and questions in flight."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from rksc_agents.bench.machine import machine, told
from rksc_agents.bench.peers.rksc import Rksc
from rksc_agents.bench.peers.system import Took
from rksc_agents.bench.peers.weights import Weights
from rksc_agents.bench.rounds import Progress, in_turn, middle, quartiles
from rksc_agents.bench.table import table
from rksc_agents.bench.unit import Unit, make_units
from rksc_agents.config import EngineConfig
from rksc_agents.errors import ConfigError
from rksc_agents.model.loader import LoadedModel, load_model
from rksc_agents.printable import size
from rksc_agents.questions import Question

BRANCHES = (1, 2, 4, 8, 16, 32)
PREFIX = (256, 1024)
IN_FLIGHT = (1,)


def bench_growth(
    model: str | LoadedModel,
    questions: Sequence[Question],
    *,
    branches: Sequence[int] = BRANCHES,
    prefix: Sequence[int] = PREFIX,
    in_flight: Sequence[int] = IN_FLIGHT,
    tokens: int = 64,
    runs: int = 3,
    engine: EngineConfig | None = None,
    loading: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Do the unit of :func:`~rksc_agents.bench.branches.bench_branches` in every size.

    Parameters
    ----------
    model, questions, tokens, engine, loading, progress
        As there.
    branches, prefix, in_flight : sequence of int, default 1, 2, 4, 8, 16, 32 and 256, 1024 and 1
        Branches, tokens of a prompt, and questions at once, each with a prompt of its own. All of one are measured with
        all of the others, in turn.
    runs : int, default 3
        Timed runs of each; one more warms up.

    Returns
    -------
    dict
        unit, machine; rows, each with prefix, branches, in_flight, median_s, spread (quartiles), prefill_s, decode_s,
        verify_s (None with several questions, where they overlap), tokens_computed, kv_bytes, kv_bytes_copied (of the
        same sequences with a copy of the prompt each).

    Raises
    ------
    ConfigError
        If a number is below 1, a list is empty, or a prompt cannot be made.
    """
    if runs < 1:
        raise ConfigError(f"runs = {runs}: give at least 1")
    for name, sizes in (("branches", branches), ("prefix", prefix), ("in_flight", in_flight)):
        if min(sizes, default=0) < 1:
            raise ConfigError(f"{name} = {list(sizes)}: give one number or more, each at least 1")
    loaded = load_model(model, progress=loading) if isinstance(model, str) else model
    with Weights(loaded.model, loaded.tokenizer, name=loaded.name, plain=False, engine=engine) as weights:
        made = [
            make_units(weights.codec, questions, max(in_flight), prefix=p, tokens=tokens, context=weights.context)
            for p in prefix
        ]
        groups = [
            [replace(unit, branches=b) for unit in units[:at_once]]
            for units in made
            for at_once in in_flight
            for b in branches
        ]
        with closing(Rksc()) as system:
            system.open(weights, groups[0][0])
            took = in_turn([partial(system.run_together, group) for group in groups], runs, progress)
        return {
            "unit": {
                "tokens": tokens,
                "verification_tokens": len(groups[0][0].verification),
                "temperature": groups[0][0].sampling.temperature,
                "runs": runs,
            },
            "machine": machine(weights),
            "rows": [_row(group, mine, weights.token_bytes) for group, mine in zip(groups, took, strict=True)],
        }


def _row(units: Sequence[Unit], took: Sequence[Took], token_bytes: int) -> dict[str, Any]:
    seconds = [each.seconds for each in took]
    return {
        "prefix": len(units[0].prompt),
        "branches": units[0].branches,
        "in_flight": len(units),
        "median_s": statistics.median(seconds),
        "spread": quartiles(seconds),
        **{part: middle(took, part) for part in ("prefill_s", "decode_s", "verify_s")},
        "tokens_computed": middle(took, "tokens_computed", statistics.median_low),
        "kv_bytes": middle(took, "kv_bytes", max),
        "kv_bytes_copied": sum(unit.branches * unit.length for unit in units) * token_bytes,
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the result as a Markdown table."""
    unit = found["unit"]
    yield told(found["machine"])
    yield (
        f"branches of {unit['tokens']} tokens, each verified with {unit['verification_tokens']} more; "
        f"{unit['runs']} runs"
    )
    yield ""
    yield from table(
        (">prompt", ">in flight", ">branches", ">median", "quartiles", ">per branch", ">KV", ">KV, prompt copied"),
        [_cells(row) for row in found["rows"]],
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["spread"]
    return (
        f"{row['prefix']:,}",
        str(row["in_flight"]),
        str(row["branches"]),
        f"{row['median_s']:.2f} s",
        f"{low:.2f} to {high:.2f}",
        f"{row['median_s'] / (row['branches'] * row['in_flight']):.2f} s",
        size(row["kv_bytes"]),
        size(row["kv_bytes_copied"]),
    )
