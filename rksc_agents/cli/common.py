"""What the commands have in common: errors and warnings as lines, a loaded reasoner, verifiers by name, progress."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from rksc_agents.errors import ConfigError, PromptTooLongError, RKSCError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from rksc_agents.reasoner import RKSCReasoner
    from rksc_agents.verify.verifier import Verifier

PROBING = ("self", "judge", "self-calibrated")
"""Names of the verifiers that ask the model itself."""

# Plain help and usage errors: stable lines in a pipe, and no markup in what a user typed.
STYLE: dict[str, Any] = {"rich_markup_mode": None, "no_args_is_help": True}

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Model = Annotated[str, typer.Option(help="A hub id, a folder, a GGUF file or the alias of the default model.")]
GGUFFile = Annotated[str | None, typer.Option(help="Name of the GGUF file inside MODEL.")]
Probing = Annotated[str, typer.Option(metavar=f"[{'|'.join(PROBING)}]", help="Who says how right a branch is.")]

Show = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


class Commands(TyperGroup):
    """Turns errors of this package into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except RKSCError as error:
                say("error", error)
                usage = isinstance(error, (ConfigError, PromptTooLongError))
                raise typer.Exit(2 if usage else 1) from None


def _show_warning(  # noqa: PLR0917 - the signature of warnings.showwarning
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    say("warning", message)


def say(kind: str, message: object) -> None:
    """Tell an error or a warning as one line on stderr."""
    from rksc_agents.printable import one_line

    typer.echo(f"{kind}: {one_line(str(message))}", err=True)


def load_reasoner(
    model: str, gguf_file: str | None, *, sampling: Mapping[str, Any] | None = None, **settings: Any
) -> RKSCReasoner:
    """Load a model.

    Parameters
    ----------
    model, gguf_file
        As for :meth:`~rksc_agents.reasoner.RKSCReasoner.from_pretrained`.
    sampling : mapping or None
        What differs from the sampling that the model recommends.
    **settings
        Further arguments of a reasoner.
    """
    from rksc_agents.reasoner import RKSCReasoner

    quiet_unless_watched()
    if not sampling:
        return RKSCReasoner.from_pretrained(model, gguf_file=gguf_file, progress=load_progress(), **settings)
    from rksc_agents.model.loader import load_model
    from rksc_agents.model.sampling import recommended_sampling

    loaded = load_model(model, gguf_file=gguf_file, progress=load_progress())
    drawn = recommended_sampling(loaded.model).replace(**sampling)
    return RKSCReasoner.from_model(loaded.model, loaded.tokenizer, name=loaded.name, sampling=drawn, **settings)


def verifier_of(name: str, *, probing: bool = False) -> Verifier:
    """Return the verifier of a name, or of a function ``package.module:function``.

    Parameters
    ----------
    name : str
        What was typed.
    probing : bool, default False
        Whether it must ask the model itself.
    """
    from rksc_agents.verify.callable_verifier import CallableVerifier
    from rksc_agents.verify.judge import JudgeVerifier
    from rksc_agents.verify.self_verifier import SelfVerifier

    if name == "judge":
        return JudgeVerifier()
    if name in PROBING:
        return SelfVerifier(calibrated=name == "self-calibrated")
    if probing or ":" not in name:
        other = "" if probing else ", or a function as PACKAGE.MODULE:FUNCTION"
        raise typer.BadParameter(f"--verifier {name!r} is not one of {', '.join(PROBING)}{other}")
    return CallableVerifier.load(name)


def one_of(option: str, name: str, names: Iterable[str]) -> str:
    """Refuse a name that is none of `names`."""
    if name not in (known := tuple(names)):
        raise typer.BadParameter(f"{option} {name!r} is not one of {', '.join(known)}")
    return name


def utf8(text: str, name: str) -> str:
    """Refuse an argument with bytes that are no text: no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"{name} is not UTF-8 at character {error.start}: convert it first") from None
    return text


def quiet_unless_watched() -> None:
    """Turn transformers' progress bars off where nobody watches them."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def load_progress() -> Callable[[str], None] | None:
    """What tells in lines how loading goes; None where nobody watches."""
    return _print_progress if sys.stderr.isatty() else None


def _print_progress(line: str) -> None:
    from rksc_agents.printable import one_line

    typer.echo(one_line(line), err=True)


@contextmanager
def progress_bars() -> Iterator[Show | None]:
    """Bars on stderr with the time that is left, one for each thing that is done; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from rksc_agents.printable import one_line

    name = TextColumn("{task.description}", markup=False)  # a file may be called anything
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(file=sys.stderr), redirect_stdout=False) as drawn:

        def show(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = drawn.add_task(one_line(what), total=total)
            drawn.update(bars[what], completed=done)

        yield show


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on standard output."""
    for line in lines:
        typer.echo(line)
