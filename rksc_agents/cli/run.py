"""``rksc run``: a file of questions in, a file of answers out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rksc_agents.cli import common, options, plans
from rksc_agents.config import DEFAULT_MODEL, EngineConfig


def run(
    *,
    questions: Annotated[
        Path, typer.Argument(metavar="FILE", help="Questions, one JSON object with a `question` per line.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the answers go, one JSON object per line.")],
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
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    stop: options.Stop = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same file.")] = 0,
    system: options.System = None,
    kv_budget: options.KVBudget = None,
    int8: options.Int8 = False,
    in_flight: Annotated[
        int,
        typer.Option(min=1, max=64, help="Questions at once; more are quicker, and a resumed file may then differ."),
    ] = 1,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace what is there instead of going on with it.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Answer each question of FILE; run the same again to go on after it was stopped.

    A line of the answers has: line, question, and either error or answer, text, strategy, rule, winner, branches,
    votes, agreement, confidence, score, finish_reason, completion_tokens_winner. The keys of --json: answered, failed,
    resumed. The exit code is 1 where a question failed.
    """
    settings = options.sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop=stop
    )
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
    # True packs all weights: what a measurement decides could differ between a run and its resumption.
    engine = EngineConfig(kv_budget=options.kv_budget(kv_budget), int8=int8, fast_linears=True)
    from rksc_agents.bulk import answer_file
    from rksc_agents.questions import read_questions

    read_questions(questions)  # a damaged file is refused before a model is loaded
    with (
        common.load_reasoner(model, gguf_file, engine=engine, exit=options.exit_of(exits)) as reasoner,
        common.progress_bars() as progress,
    ):
        done = answer_file(
            reasoner,
            questions,
            out,
            seed=seed,
            in_flight=in_flight,
            system=None if system is None else common.utf8(system, "--system"),
            fresh=fresh,
            progress=progress,
            **settings,
        )
    if as_json:
        typer.echo(done.model_dump_json())
    else:
        typer.echo(f"answered: {done.answered}, failed {done.failed}, done before {done.resumed}")
    if done.failed:
        raise typer.Exit(1)
