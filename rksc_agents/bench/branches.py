"""`rksc bench branches`: the paper's unit of work by several systems, in turn. The ratio of medians is what counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from rksc_agents.bench.machine import machine, told
from rksc_agents.bench.peers import SYSTEMS, systems_of
from rksc_agents.bench.peers.system import MissingSystemError, System, Took
from rksc_agents.bench.peers.weights import Places, Weights
from rksc_agents.bench.rounds import Progress, in_turn, middle, quartiles
from rksc_agents.bench.table import table
from rksc_agents.bench.unit import Unit, make_unit
from rksc_agents.config import EngineConfig
from rksc_agents.errors import ConfigError
from rksc_agents.model.loader import LoadedModel, load_model
from rksc_agents.printable import size
from rksc_agents.questions import Question

BASELINE = "no-kv"


def bench_branches(
    model: str | LoadedModel,
    questions: Sequence[Question],
    *,
    systems: Sequence[str] = tuple(SYSTEMS),
    prefix: int = 1024,
    branches: int = 8,
    tokens: int = 64,
    runs: int = 5,
    exit: str = "strict",
    places: Places | None = None,
    engine: EngineConfig | None = None,
    loading: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Have each system answer a question with branches and verify all of them.

    Parameters
    ----------
    model : str or LoadedModel
        As for `rksc ask`, or a model that is loaded.
    questions : sequence of Question
        What the prompt is made of; see :func:`~rksc_agents.bench.unit.make_unit`.
    systems : sequence of str
        Names out of :data:`~rksc_agents.bench.peers.SYSTEMS`; all by default.
    prefix, branches, tokens : int, default 1024, 8, 64
        Tokens of the prompt, branches, and tokens of each.
    runs : int, default 5
        Timed runs of each system; one more warms up.
    exit : str, default "strict"
        Early exit of the systems that have it: a preset, "auto", or the path of a certificate.
    places : Places or None
        Where vLLM and llama.cpp are; None is as the environment says.
    engine : EngineConfig or None
        Of the reasoner.
    loading, progress : callable or None
        Called with a line before the model is loaded, and with the number of runs so far and in all.

    Returns
    -------
    dict
        unit, machine; systems, each with system, note, missing (why it did not run, or None) and, where it ran,
        median_s, spread (quartiles), speedup_over_no_kv (of medians), speedup_spread (quartiles of the rounds'
        ratios), verified (branches), tokens_computed, kv_bytes, passes, prefill_s, decode_s, verify_s (None where
        unknown).

    Raises
    ------
    ConfigError
        If a name is unknown, a number is below 1, or the prompt cannot be made.
    """
    kinds = systems_of(systems)
    if runs < 1:
        raise ConfigError(f"runs = {runs}: give at least 1")
    places = places if places is not None else Places.from_environment()
    if isinstance(model, str):
        places = places.with_gguf_of(model)
    loaded = load_model(model, progress=loading) if isinstance(model, str) else model
    needs = {kind.needs for kind in kinds}
    with ExitStack() as stack:
        weights = stack.enter_context(
            Weights(
                loaded.model,
                loaded.tokenizer,
                name=loaded.name,
                plain="plain" in needs,
                lent="lent" in needs,
                engine=engine,
                exit=exit,
                places=places,
            )
        )
        unit = make_unit(
            weights.codec, questions, prefix=prefix, branches=branches, tokens=tokens, context=weights.context
        )
        opened, missing = _opened(kinds, weights, unit, stack)
        took = in_turn([partial(system.run, unit) for system in opened], runs, progress)
        by_name = {system.name: (system.note, mine) for system, mine in zip(opened, took, strict=True)}
        _, base = by_name.get(BASELINE, ("", None))
        return {
            "unit": {**unit.described(), "runs": runs},
            "machine": machine(weights),
            "systems": [
                _missing(kind.name, missing[kind.name])
                if kind.name in missing
                else _row(kind.name, *by_name[kind.name], base)
                for kind in kinds
            ],
        }


def _opened(
    kinds: Sequence[type[System]], weights: Weights, unit: Unit, stack: ExitStack
) -> tuple[list[System], dict[str, str]]:
    """The systems that can run, and why the others cannot."""
    opened, missing = [], {}
    for kind in kinds:
        system = kind()
        stack.callback(system.close)
        try:
            system.open(weights, unit)
        except MissingSystemError as error:
            missing[kind.name] = str(error)
        else:
            opened.append(system)
    return opened, missing


_COUNTS = ("verified", "tokens_computed", "kv_bytes", "passes")
_PARTS = ("prefill_s", "decode_s", "verify_s")
_MEASURED = ("median_s", "spread", "speedup_over_no_kv", "speedup_spread", *_COUNTS, *_PARTS)


def _missing(name: str, why: str) -> dict[str, Any]:
    return {"system": name, "note": "", "missing": why, **dict.fromkeys(_MEASURED)}


def _row(name: str, note: str, took: Sequence[Took], base: Sequence[Took] | None) -> dict[str, Any]:
    seconds = [each.seconds for each in took]
    median = statistics.median(seconds)
    ratios = None if base is None else [b.seconds / mine for b, mine in zip(base, seconds, strict=True)]
    return {
        "system": name,
        "note": note,
        "missing": None,
        "median_s": median,
        "spread": quartiles(seconds),
        "speedup_over_no_kv": None if base is None else statistics.median(b.seconds for b in base) / median,
        "speedup_spread": None if ratios is None else quartiles(ratios),
        **{field: middle(took, field, statistics.median_low) for field in _COUNTS},
        **{field: middle(took, field) for field in _PARTS},
    }


_HEADINGS = (
    *("system", ">median", "quartiles", ">over no-kv", ">verified", ">tokens", ">KV", ">passes"),
    *(">prefill", ">decode", ">verify", "note"),
)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the result as a Markdown table, and what did not run."""
    unit = found["unit"]
    yield (
        f"{unit['branches']} branches of {unit['tokens']} tokens on a prompt of {unit['prefix']}, each verified with "
        f"{unit['verification_tokens']} more; {unit['runs']} runs"
    )
    yield told(found["machine"])
    yield ""
    yield from table(_HEADINGS, [_cells(row) for row in found["systems"] if row["missing"] is None])
    for row in found["systems"]:
        if row["missing"] is not None:
            yield f"{row['system']} did not run: {row['missing']}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["spread"]
    speedup, kv = row["speedup_over_no_kv"], row["kv_bytes"]
    return (
        row["system"],
        f"{row['median_s']:.2f} s",
        f"{low:.2f} to {high:.2f}",
        "" if speedup is None else f"{speedup:.2f}x",
        str(row["verified"]),
        "?" if row["tokens_computed"] is None else f"{row['tokens_computed']:,}",
        "?" if kv is None else size(kv),
        "?" if row["passes"] is None else f"{row['passes']:,}",
        *("?" if row[part] is None else f"{row[part]:.2f}" for part in _PARTS),
        row["note"],
    )
