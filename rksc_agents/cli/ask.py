"""``rksc ask``: a question in, an answer and its evidence out."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rksc_agents.cli import common, plans
from rksc_agents.config import DEFAULT_MODEL, EngineConfig, Sampling, Sharing
from rksc_agents.errors import EngineError
from rksc_agents.events import Answer
from rksc_agents.types import Prompt, ReasoningResult, SharingMode

if TYPE_CHECKING:
    from rksc_agents.reasoner import RKSCReasoner
    from rksc_agents.verify.certificate import Certificate

REFRESH_S = 0.1  # a faster redraw costs the model time and the eye sees no more


def ask(
    *,
    question: Annotated[str, typer.Argument(help='The question; "-" reads it from standard input.')],
    model: common.Model = DEFAULT_MODEL,
    gguf_file: common.GGUFFile = None,
    strategy: plans.Name = "self-consistency",
    branches: plans.Branches = None,
    vote: plans.VoteRule = None,
    score: plans.Score = None,
    hint: plans.Hint = None,
    proposals: plans.Proposals = None,
    breadth: plans.Breadth = None,
    search: plans.Search = None,
    beams: plans.Beams = None,
    expansions: plans.Expansions = None,
    depth: plans.Depth = None,
    delimiter: plans.Delimiter = None,
    verifier: plans.VerifierName = None,
    exits: Annotated[
        str,
        typer.Option(
            "--exit",
            metavar="[auto|off|strict|paper|FILE]",
            help="When verification is skipped or stops early; a FILE is from rksc calibrate.",
        ),
    ] = "auto",
    phrasing: Annotated[
        list[str] | None, typer.Option(help="Another way to put the question, for other branches; may be repeated.")
    ] = None,
    sharing: Annotated[
        SharingMode | None, typer.Option(help="What other phrasings take from the first one's KV; exact by default.")
    ] = None,
    audit: Annotated[bool, typer.Option("--audit", help="Measure how far shared KV is from exact.")] = False,
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
    int8: Annotated[
        bool,
        typer.Option("--int8", help="Round weights to 8-bit integers on the CPU: lossy, and quicker for few branches."),
    ] = False,
    as_json: common.AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer only.")] = False,
) -> None:
    """Answer QUESTION with branches of reasoning, and show what it took.

    The keys of --json: answer, text, tool_calls, invalid_tool_calls, strategy, winner, rule; branches, each with
    text, thinking, tokens (ids), logprobs, confidence, finish_reason, answer, tool_calls, invalid_tool_calls,
    depth, parent, sharing (mode, sigma, reused, recomputed, kl, agreement), verdict (score, skipped, exit_layer,
    layers, tokens_computed); votes, each with answer, weight, branches; verification with verifier, exit, verified,
    skipped, exited, tokens_computed, layers, layers_full; quantization (layers, divergence, agreement);
    usage with prompt_tokens, prompt_tokens_computed, prompt_tokens_reused, completion_tokens,
    completion_tokens_winner, completion_tokens_thinking; kv with peak_bytes, bytes_if_copied, tokens_shared,
    evicted, recomputed; timings with queue_s, prefill_s, decode_s, verify_s, total_s.
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
        "stop": _texts(stop, "--stop"),
        "seed": seed,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    Sampling(**options)  # a bad value is refused before a model is loaded
    engine = EngineConfig(kv_budget=_budget(kv_budget), int8=int8)
    options["strategy"] = plans.plan(
        strategy,
        branches=branches,
        vote=vote,
        score=score,
        hints=_texts(hint, "--hint"),
        proposals=proposals,
        breadth=breadth,
        search=search,
        beams=beams,
        expansions=expansions,
        depth=depth,
        delimiter=None if delimiter is None else common.utf8(delimiter, "--delimiter"),
        verifier=verifier,
    )
    if phrasing:
        options["phrasings"] = [_conversation(_filled(text, "--phrasing"), system) for text in phrasing]
    if sharing is not None or audit:
        options["sharing"] = Sharing(mode=sharing or "exact", audit=audit)
    live = sys.stdout.isatty() and not as_json and not quiet
    with common.load_reasoner(model, gguf_file, engine=engine, exit=_exit(exits)) as reasoner:
        if live:
            _ask_live(reasoner, prompt, options)
            return
        result = reasoner.reason(prompt, **options)
    _print_result(result, as_json, quiet)


def _prompt(question: str, system: str | None) -> Prompt:
    if question == "-":
        try:
            question = sys.stdin.buffer.read().decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"standard input is not UTF-8 at byte {error.start}: convert it first") from None
    if not question.strip():
        raise typer.BadParameter('the question is empty: give a text, or "-" to read one from standard input')
    return _conversation(common.utf8(question, "QUESTION"), system)


def _conversation(question: str, system: str | None) -> Prompt:
    if system is None:
        return question
    return [{"role": "system", "content": common.utf8(system, "--system")}, {"role": "user", "content": question}]


def _texts(texts: Sequence[str] | None, option: str) -> tuple[str, ...] | None:
    return tuple(common.utf8(text, option) for text in texts or ()) or None


def _filled(text: str, option: str) -> str:
    if not text.strip():
        raise typer.BadParameter(f"{option} is empty: give a text")
    return common.utf8(text, option)


def _budget(text: str | None) -> int | float | None:
    if text is None:
        return None
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise typer.BadParameter(
            f"--kv-budget {text!r} is no number: give bytes, such as 268435456, or a share below 1, such as 0.25"
        ) from None


def _exit(text: str) -> str | Certificate:
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


def _ask_live(reasoner: RKSCReasoner, prompt: Prompt, options: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.live import Live

    from rksc_agents.report.terminal import BranchView, summary

    console, view, result, drawn = Console(highlight=False), BranchView(), None, 0.0
    # Warnings stay out of the drawing's way in a terminal, and go where stderr goes otherwise.
    with Live(view, console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty()) as live:
        for event in reasoner.stream(prompt, **options):
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
        common.print_lines(plain(result))
