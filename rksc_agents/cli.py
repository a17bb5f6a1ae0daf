"""The command line: ``rksc ask``, ``rksc doctor``, ``rksc cache``, ``rksc bench``.

What a command needs is imported inside it, so that ``rksc --help`` does not wait for torch.
"""

from __future__ import annotations

import io
import json
import sys
import time
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from rksc_agents.config import EngineConfig, Sampling
from rksc_agents.errors import ConfigError, EngineError, PromptTooLongError, RKSCError
from rksc_agents.types import Answer, Prompt, ReasoningResult

if TYPE_CHECKING:
    from rksc_agents.model.converted import ConvertedCopies
    from rksc_agents.reasoner import RKSCReasoner
    from rksc_agents.reasoning import Strategy

DEFAULT_MODEL = "smollm2-135m-instruct"  # as in model/source.py, which cannot be imported without transformers
REFRESH_S = 0.1  # a faster redraw costs the model time and the eye sees no more


class _Commands(TyperGroup):
    """Turns errors of this package into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except RKSCError as error:
                _say("error", error)
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
    _say("warning", message)


def _say(kind: str, message: object) -> None:
    from rksc_agents.report.terminal import one_line

    typer.echo(f"{kind}: {one_line(str(message))}", err=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rksc {version('rksc-agents')}")
        raise typer.Exit


# Plain help and usage errors: stable lines in a pipe, and no markup in what a user typed.
_STYLE: dict[str, Any] = {"rich_markup_mode": None, "no_args_is_help": True}
app = typer.Typer(cls=_Commands, pretty_exceptions_enable=False, **_STYLE)
cache = typer.Typer(help="Show or clear the converted copies of models.", **_STYLE)
bench = typer.Typer(help="Measure this package against other ways to do the same work.", **_STYLE)
app.add_typer(cache, name="cache")
app.add_typer(bench, name="bench")


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Multi-branch reasoning on local Hugging Face models: branches share one KV cache."""


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def ask(
    *,
    question: Annotated[str, typer.Argument(help='The question; "-" reads it from standard input.')],
    model: Annotated[
        str, typer.Option(help="A hub id, a folder, a GGUF file or the alias of the default model.")
    ] = DEFAULT_MODEL,
    gguf_file: Annotated[str | None, typer.Option(help="Name of the GGUF file inside MODEL.")] = None,
    strategy: Annotated[
        str, typer.Option(metavar="[direct|self-consistency|best-of-n]", help="How to reason.")
    ] = "self-consistency",
    branches: Annotated[
        int | None, typer.Option(help="Branches of reasoning; the strategy's default if left out.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens a branch may generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits; 0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Smallest set of tokens with this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="The likeliest tokens to keep; 0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least probability, relative to the likeliest token.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End a branch before this text; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the question.")] = None,
    kv_budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Bytes of KV cache, or a share of the free memory below 1.")
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer only.")] = False,
) -> None:
    """Answer QUESTION with branches of reasoning, and show what it took.

    The keys of --json: answer, text, strategy, winner; branches, each with text, thinking, tokens (ids), logprobs,
    confidence, finish_reason, answer; votes, each with answer, weight, branches; usage with prompt_tokens,
    prompt_tokens_computed, prompt_tokens_reused, completion_tokens, completion_tokens_winner; kv with peak_bytes,
    bytes_if_copied, tokens_shared, evicted, recomputed; timings with queue_s, prefill_s, decode_s, total_s.
    """
    if as_json and quiet:
        raise typer.BadParameter("--json and --quiet exclude each other: give one of them")
    prompt = _prompt(question, system)
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "stop": tuple(_utf8(text, "--stop") for text in stop or ()) or None,
        "seed": seed,
    }
    sampling = {name: value for name, value in given.items() if value is not None}
    Sampling(**sampling)  # a bad value is refused before a model is loaded
    engine = EngineConfig(kv_budget=_budget(kv_budget))
    plan = _strategy(strategy, branches)
    live = sys.stdout.isatty() and not as_json and not quiet
    with _load_reasoner(model, gguf_file, engine) as reasoner:
        if live:
            _ask_live(reasoner, prompt, plan, sampling)
            return
        result = reasoner.reason(prompt, strategy=plan, **sampling)
    _print_result(result, as_json, quiet)


def _prompt(question: str, system: str | None) -> Prompt:
    if question == "-":
        try:
            question = sys.stdin.buffer.read().decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"standard input is not UTF-8 at byte {error.start}: convert it first") from None
    if not question.strip():
        raise typer.BadParameter('the question is empty: give a text, or "-" to read one from standard input')
    question = _utf8(question, "QUESTION")
    if system is None:
        return question
    return [{"role": "system", "content": _utf8(system, "--system")}, {"role": "user", "content": question}]


def _utf8(text: str, name: str) -> str:
    """Refuse an argument with bytes that are no text: no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"{name} is not UTF-8 at character {error.start}: convert it first") from None
    return text


def _budget(text: str | None) -> int | float | None:
    if text is None:
        return None
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise typer.BadParameter(
            f"--kv-budget {text!r} is no number: give bytes, such as 268435456, or a share below 1, such as 0.25"
        ) from None


def _strategy(name: str, branches: int | None) -> Strategy:
    from rksc_agents.reasoning import STRATEGIES

    if name not in STRATEGIES:
        raise typer.BadParameter(f"--strategy {name!r} is not one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](**({} if branches is None else {"branches": branches}))


def _load_reasoner(model: str, gguf_file: str | None, engine: EngineConfig) -> RKSCReasoner:
    from rksc_agents.reasoner import RKSCReasoner

    _quiet_unless_watched()
    progress = _print_progress if sys.stderr.isatty() else None
    return RKSCReasoner.from_pretrained(model, gguf_file=gguf_file, engine=engine, progress=progress)


def _quiet_unless_watched() -> None:
    """Turn transformers' progress bars off where nobody watches them."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def _print_progress(line: str) -> None:
    from rksc_agents.report.terminal import one_line

    typer.echo(one_line(line), err=True)


def _ask_live(reasoner: RKSCReasoner, prompt: Prompt, strategy: Strategy, sampling: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.live import Live

    from rksc_agents.report.terminal import BranchView, summary

    console, view, result, drawn = Console(highlight=False), BranchView(), None, 0.0
    # Warnings stay out of the drawing's way in a terminal, and go where stderr goes otherwise.
    with Live(view, console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty()) as live:
        for event in reasoner.stream(prompt, strategy=strategy, **sampling):
            view.feed(event)
            if isinstance(event, Answer):
                result = event.result
            elif time.monotonic() - drawn >= REFRESH_S:
                live.refresh()
                drawn = time.monotonic()
    if result is None:
        raise EngineError("the run ended without an answer: run it again, and report it if it happens again")
    console.print(summary(result))


def _print_result(result: ReasoningResult, as_json: bool, quiet: bool) -> None:
    from rksc_agents.report.terminal import clean, plain

    if as_json:
        typer.echo(result.model_dump_json(ensure_ascii=True))  # ASCII: no terminal reads a control code from it
    elif quiet:
        typer.echo(clean(result.text if result.answer is None else result.answer).strip())
    else:
        _print_lines(plain(result))


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what device, dtype, attention path and features this machine gives."""
    from rksc_agents.report.terminal import facts

    found = _examine()
    _print_lines([json.dumps(found)] if as_json else facts(found))


def _examine() -> dict[str, Any]:
    from rksc_agents.model.device import doctor as examine

    found: dict[str, Any] = examine()
    return found


def _copies() -> ConvertedCopies:
    from rksc_agents.model.converted import ConvertedCopies

    return ConvertedCopies()


@cache.command()
def show(as_json: AsJson = False) -> None:
    """List the converted copies of models.

    The keys of --json: entries, each with name, path, bytes, created; bytes, their sum.
    """
    from rksc_agents.report.terminal import one_line, size

    entries = _copies().entries()
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
    from rksc_agents.report.terminal import size

    freed = _copies().clear()
    typer.echo(json.dumps({"bytes_freed": freed}) if as_json else f"freed: {size(freed)}")


@bench.command("steps")
def bench_steps(
    *,
    model: Annotated[str, typer.Option(help="As for rksc ask.")] = DEFAULT_MODEL,
    branches: Annotated[list[int] | None, typer.Option(help="Rows per step; may be repeated. 1, 8, 32.")] = None,
    prefix: Annotated[list[int] | None, typer.Option(help="Tokens they share; may be repeated. 1024.")] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each.")] = 24,
    as_json: AsJson = False,
) -> None:
    """Time a decode step on a shared prefix against transformers, alternating in one run.

    The keys of --json: model, dtype, threads, packed_layers, panelled_layers; rows, each with branches, prefix, ratio
    (transformers' median over ours), ratio_low and ratio_high (quartiles), ours_median_s, transformers_median_s.
    """
    from rksc_agents.bench.steps import bench_steps as measure
    from rksc_agents.bench.steps import lines

    _quiet_unless_watched()
    found = measure(
        model,
        branches=branches or (1, 8, 32),
        prefix=prefix or (1024,),
        steps=steps,
        progress=_print_progress if sys.stderr.isatty() else None,
    )
    _print_lines([json.dumps(found)] if as_json else lines(found))


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer in any script prints in any locale
    app(prog_name="rksc")
