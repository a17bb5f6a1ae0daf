"""``rksc ask``: a question in, an answer and its evidence out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rksc_agents.cli import common, options, plans
from rksc_agents.cli.live import watch
from rksc_agents.config import DEFAULT_MODEL, EngineConfig, Sharing
from rksc_agents.questions import conversation_of
from rksc_agents.result import ReasoningResult
from rksc_agents.trace import FORMATS
from rksc_agents.types import Prompt, SharingMode


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
    exits: options.Exit = "auto",
    phrasing: Annotated[
        list[str] | None, typer.Option(help="Another way to put the question, for other branches; may be repeated.")
    ] = None,
    sharing: Annotated[
        SharingMode | None, typer.Option(help="What other phrasings take from the first one's KV; exact by default.")
    ] = None,
    audit: Annotated[bool, typer.Option("--audit", help="Measure how far shared KV is from exact.")] = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    stop: options.Stop = None,
    seed: options.Seed = None,
    system: options.System = None,
    kv_budget: options.KVBudget = None,
    int8: options.Int8 = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the run as a page (.html) or as data (.json)."),
    ] = None,
    as_json: common.AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer only.")] = False,
) -> None:
    """Answer QUESTION with branches of reasoning, and show what it took.

    The keys of --json: answer, text, tool_calls, invalid_tool_calls, strategy, winner, rule; branches, each with
    text, thinking, tokens (ids), logprobs, confidence, finish_reason, answer, tool_calls, invalid_tool_calls,
    depth, parent, sharing (mode, sigma, reused, recomputed, kl, agreement), verdict (score, skipped, exit_layer,
    layers, tokens_computed, entropies); votes, each with answer, weight, branches; verification with
    verifier, exit, verified, skipped, exited, tokens_computed, layers, layers_full; quantization (layers,
    divergence, agreement); usage with prompt_tokens, prompt_tokens_computed, prompt_tokens_reused,
    completion_tokens, completion_tokens_winner, completion_tokens_thinking; kv with peak_bytes, bytes_if_copied,
    tokens_shared, evicted, recomputed; timings with queue_s, prefill_s, decode_s, verify_s, total_s.
    """
    if as_json and quiet:
        raise typer.BadParameter("--json and --quiet exclude each other: give one of them")
    if report is not None and report.suffix.lower() not in FORMATS:
        raise typer.BadParameter(
            f"--report {str(report)!r} ends in neither .html nor .json: give it one of these names"
        )
    prompt = _prompt(question, system)
    settings = options.sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop=stop, seed=seed
    )
    engine = EngineConfig(kv_budget=options.kv_budget(kv_budget), int8=int8)
    settings["strategy"] = plans.plan(
        strategy,
        branches=branches,
        vote=vote,
        score=score,
        hints=hint,
        proposals=proposals,
        breadth=breadth,
        search=search,
        beams=beams,
        expansions=expansions,
        depth=depth,
        delimiter=delimiter,
        verifier=verifier,
    )
    if phrasing:
        settings["phrasings"] = [_conversation(_filled(text, "--phrasing"), system) for text in phrasing]
    if sharing is not None or audit:
        settings["sharing"] = Sharing(mode=sharing or "exact", audit=audit)
    from rksc_agents.report.terminal import summary

    live = sys.stdout.isatty() and not as_json and not quiet
    with common.load_reasoner(model, gguf_file, engine=engine, exit=options.exit_of(exits)) as reasoner:
        if live:
            console = Console(highlight=False)
            result = watch(reasoner, prompt, settings, console)
            console.print(summary(result))
        else:
            result = reasoner.reason(prompt, **settings)
    if report is not None:
        result.trace.save(report)
    if not live:
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
    return conversation_of(question, None if system is None else common.utf8(system, "--system"))


def _filled(text: str, option: str) -> str:
    if not text.strip():
        raise typer.BadParameter(f"{option} is empty: give a text")
    return common.utf8(text, option)


def _print_result(result: ReasoningResult, as_json: bool, quiet: bool) -> None:
    from rksc_agents.printable import clean
    from rksc_agents.report.terminal import plain

    if as_json:
        typer.echo(result.model_dump_json(ensure_ascii=True))  # ASCII: no terminal reads a control code from it
    elif quiet:
        typer.echo(clean(result.text if result.answer is None else result.answer).strip())
    else:
        common.print_lines(plain(result))
