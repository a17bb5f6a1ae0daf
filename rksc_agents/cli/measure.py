"""``rksc bench``: this package measured."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rksc_agents.cli import common, compare
from rksc_agents.config import DEFAULT_MODEL

bench = typer.Typer(help="Measure this package: its steps, what it shares, what it spares.", **common.STYLE)

Model = Annotated[str, typer.Option(help="As for rksc ask.")]
DATA = "Questions, one JSON object per line"


@bench.command("steps")
def steps(
    *,
    model: Model = DEFAULT_MODEL,
    branches: Annotated[list[int] | None, typer.Option(help="Rows per step; may be repeated. 1, 8, 32.")] = None,
    prefix: Annotated[list[int] | None, typer.Option(help="Tokens they share; may be repeated. 1024.")] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each.")] = 24,
    as_json: common.AsJson = False,
) -> None:
    """Time a decode step on a shared prefix against transformers, alternating in one run.

    The keys of --json: model, dtype, threads, packed_layers, panelled_layers; rows, each with branches, prefix, ratio
    (transformers' median over ours), ratio_low and ratio_high (quartiles), ours_median_s, transformers_median_s.
    """
    from rksc_agents.bench import steps as measuring

    common.quiet_unless_watched()
    found = measuring.bench_steps(
        model,
        branches=branches or (1, 8, 32),
        prefix=prefix or (1024,),
        steps=steps,
        progress=common.load_progress(),
    )
    common.print_lines([json.dumps(found)] if as_json else measuring.lines(found))


@bench.command("load")
def load(
    *,
    model: Model = DEFAULT_MODEL,
    runs: Annotated[int, typer.Option(min=1, help="Timed processes; one more comes first.")] = 5,
    as_json: common.AsJson = False,
) -> None:
    """Time a fresh process from its start to the first token of an answer.

    The keys of --json: model, runs, median_s, spread (quartiles); medians of the parts: python_s (until the interpreter
    runs), import_s, load_s, token_s.
    """
    from rksc_agents.bench import load as measuring

    with common.progress_bars() as show:
        found = measuring.bench_load(model, runs=runs, progress=None if show is None else partial(show, "processes"))
    common.print_lines([json.dumps(found)] if as_json else measuring.lines(found))


@bench.command("sharing")
def sharing(
    *,
    data: Annotated[
        Path, typer.Option(metavar="FILE", help=f"{DATA}, each with two or more `prompts` that put it differently.")
    ],
    model: Model = DEFAULT_MODEL,
    limit: Annotated[int | None, typer.Option(help="Questions at most.")] = None,
    first: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Tokens computed at the start of a reused run; may be repeated. 0, 4, 8, 16."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    as_json: common.AsJson = False,
) -> None:
    """Compare each mode of sharing with exact computation, over other phrasings of the same questions.

    The keys of --json: model, pairs; rows, each with mode, reused, over_exact (percentage points), kl_mean, kl_p95,
    agreement, same_answer, same_verdict; predictors, with the rank correlation of each with the divergence;
    sigma_range, its lowest and highest value.
    """
    from rksc_agents.bench import sharing as measuring
    from rksc_agents.questions import read_questions

    questions = read_questions(data, limit=limit)
    if short := [number for number, question in enumerate(questions, 1) if len(question.prompts) < 2]:
        raise typer.BadParameter(
            f"question {short[0]} of {data} has {len(questions[short[0] - 1].prompts)} `prompts`: give each question "
            "a list of two or more texts that put it differently"
        )
    common.quiet_unless_watched()
    with common.progress_bars() as show:
        found = measuring.bench_sharing(
            model,
            questions,
            firsts=first or (0, 4, 8, 16),
            tokens=tokens,
            progress=None if show is None else partial(show, "questions"),
        )
    common.print_lines([json.dumps(found)] if as_json else measuring.lines(found))


@bench.command("exits")
def exits(
    *,
    data: Annotated[list[Path], typer.Option(metavar="FILE", help=f"{DATA}; may be repeated.")],
    model: Model = DEFAULT_MODEL,
    limit: Annotated[int | None, typer.Option(help="Questions of each file at most.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which questions are drawn.")] = 0,
    verifier: common.Probing = "self",
    branches: Annotated[int, typer.Option(min=1, max=1024, help="Branches per question.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each branch.")] = 48,
    temperature: Annotated[float, typer.Option(min=0, help="Of the branches.")] = 0.7,
    as_json: common.AsJson = False,
) -> None:
    """Compare both levels of early exit with full verification, on files of questions.

    The keys of --json: model, verifier, depth, calls, yes (share), auc (by file); level1, each with gate, confidence,
    gap, tasks (skip rate by file), skip_rate, skipped, best_of_n_errors, vote_errors, problems; raw and fitted, each
    with theta and epsilon or margin and exits, errors, calls, error_rate, low, high, layers_saved,
    layers_saved_by_pass; certificates, each with alpha, made_on, n, missing_for_alpha, confidence, gap, margin,
    work_saved, held_out, errors, error_rate, low, high, skip_rate; time with margin, questions, ratio, ratio_low,
    ratio_high.
    """
    from rksc_agents.bench import exits as measuring
    from rksc_agents.bench.exits_report import lines
    from rksc_agents.questions import read_questions

    names = [path.stem for path in data]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise typer.BadParameter(f"two files are called {twice!r}, and results go by name: rename one of them")
    asked = common.verifier_of(verifier, probing=True)
    tasks = {path.stem: read_questions(path, limit=limit, seed=seed) for path in data}
    common.quiet_unless_watched()
    with common.progress_bars() as show:
        found = measuring.bench_exits(
            model,
            tasks,
            verifier=asked,
            branches=branches,
            tokens=tokens,
            temperature=temperature,
            progress=show,
        )
    common.print_lines([json.dumps(found)] if as_json else lines(found))


@bench.command("tools")
def tools(
    *,
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="Tasks, one JSON object per line: question, tools, answer, accept.")
    ],
    model: Model = DEFAULT_MODEL,
    limit: Annotated[int | None, typer.Option(min=1, help="Tasks at most.")] = None,
    branches: Annotated[int, typer.Option(min=1, max=1024, help="Branches that vote.")] = 5,
    temperature: Annotated[float, typer.Option(min=0, help="Of the branches that vote.")] = 0.7,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a branch at most.")] = 160,
    as_json: common.AsJson = False,
) -> None:
    """Force a tool call for each task, by one greedy branch and by a vote, and count which are valid and right.

    The keys of --json: model, tasks; rows, each with strategy, branches, temperature, valid, right (counts), agreement
    (mean share of the branches that gave the winning call).
    """
    from rksc_agents.bench import tools as measuring

    tasks = measuring.read_tasks(data, limit)
    common.quiet_unless_watched()
    with common.progress_bars() as show:
        found = measuring.bench_tools(
            model,
            tasks,
            branches=branches,
            temperature=temperature,
            tokens=tokens,
            progress=None if show is None else partial(show, "tasks"),
        )
    common.print_lines([json.dumps(found)] if as_json else measuring.lines(found))


bench.command("branches")(compare.branches)
bench.command("growth")(compare.growth)
bench.command("accuracy")(compare.accuracy)
