"""Options that several commands have: how tokens are drawn, when verification stops, what memory KV may take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rksc_agents.cli import common
from rksc_agents.config import Sampling

if TYPE_CHECKING:
    from rksc_agents.verify.certificate import Certificate

Exit = Annotated[
    str,
    typer.Option(
        "--exit",
        metavar="[auto|off|strict|paper|FILE]",
        help="When verification is skipped or stops early; a FILE is from rksc calibrate.",
    ),
]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens a branch may generate.")]
Temperature = Annotated[float | None, typer.Option(help="Divides the logits; 0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Smallest set of tokens with this probability.")]
TopK = Annotated[int | None, typer.Option(help="The likeliest tokens to keep; 0 keeps all.")]
MinP = Annotated[float | None, typer.Option(help="Least probability, relative to the likeliest token.")]
Stop = Annotated[list[str] | None, typer.Option(help="End a branch before this text; may be repeated.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
System = Annotated[str | None, typer.Option(help="A system message before the question.")]
KVBudget = Annotated[
    str | None, typer.Option(metavar="BYTES", help="Bytes of KV cache, or a share of the free memory below 1.")
]
Int8 = Annotated[
    bool,
    typer.Option("--int8", help="Round weights to 8-bit integers on the CPU: lossy, and quicker for few branches."),
]


def sampling(*, stop: Sequence[str] | None = None, **given: Any) -> dict[str, Any]:
    """What was typed of how tokens are drawn, None where an option was left out; a bad value is refused at once."""
    options = {name: value for name, value in given.items() if value is not None}
    if stop:
        options["stop"] = texts(stop, "--stop")
    Sampling(**options)  # before a model is loaded
    return options


def texts(values: Sequence[str] | None, option: str) -> tuple[str, ...] | None:
    """The texts of an option that may be repeated; None where it was left out."""
    return tuple(common.utf8(value, option) for value in values or ()) or None


def kv_budget(text: str | None) -> int | float | None:
    """The KV budget as the engine takes it."""
    if text is None:
        return None
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise typer.BadParameter(
            f"--kv-budget {text!r} is no number: give bytes, such as 268435456, or a share below 1, such as 0.25"
        ) from None


def exit_of(text: str) -> str | Certificate:
    """A preset's name, or the certificate in a file, which is read before a model is loaded."""
    from rksc_agents.verify.certificate import Certificate
    from rksc_agents.verify.gates import PRESETS

    if text in (names := ("auto", *PRESETS)):
        return text
    if not Path(text).is_file():
        raise typer.BadParameter(
            f"--exit {text!r} is not one of {', '.join(names)}, and no such file: make one with `rksc calibrate`"
        )
    return Certificate.load(text)
