"""The tables of `rksc bench exits`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the result as Markdown tables."""
    yield f"{found['model']}, verifier {found['verifier']}, {found['calls']} verification calls"
    yield f"share of YES {found['yes']:.2f}; AUC " + ", ".join(f"{k} {v:.2f}" for k, v in found["auc"].items())
    yield ""
    names = list(found["level1"][0]["tasks"])
    yield f"| gate | {' | '.join(names)} | all | best-of-n differs | vote differs |"
    yield "| --- |" + " ---: |" * (len(names) + 3)
    for row in found["level1"]:
        rates = " | ".join(f"{row['tasks'][name]:.1%}" for name in names)
        of = row["skipped"]
        yield (
            f"| {row['gate']} | {rates} | {row['skip_rate']:.1%} | {row['best_of_n_errors']} of {of} | "
            f"{row['vote_errors']} of {of} |"
        )
    yield ""
    yield "| lens | rule | errors | 95 % interval | layers saved | of the whole pass |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for row in found["raw"]:
        yield f"| raw | H < {row['theta']}, change < {row['epsilon']} | {_errors(row)} | {row['layers_saved']:.1%} | |"
    for row in found["fitted"]:
        yield (
            f"| fitted | margin {row['margin']} | {_errors(row)} | {row['layers_saved']:.1%} | "
            f"{row['layers_saved_by_pass']:.1%} |"
        )
    yield ""
    yield "| certificate | confidence, gap, margin | work saved | held out: errors | 95 % interval | alpha |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for number, row in enumerate(found["certificates"], 1):
        chosen = ", ".join("off" if v is None else f"{v:.3f}" for v in (row["confidence"], row["gap"], row["margin"]))
        yield (
            f"| {number}, on {row['made_on']} questions | {chosen} | {row['work_saved']:.1%} | "
            f"{row['errors']} of {row['held_out']} | {row['low']:.1%} to {row['high']:.1%} | {row['alpha']} |"
        )
    yield ""
    spent = found["time"]
    yield (
        f"Time of verification in full over that with an exit at margin {spent['margin']}: {spent['ratio']:.2f} "
        f"(quartiles {spent['ratio_low']:.2f} to {spent['ratio_high']:.2f}, {spent['questions']} questions)"
    )


def _errors(row: dict[str, Any]) -> str:
    return f"{row['errors']} of {row['calls']} ({row['error_rate']:.2%}) | {row['low']:.2%} to {row['high']:.2%}"
