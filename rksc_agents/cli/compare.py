"""``rksc bench branches``, ``rksc bench growth`` and ``rksc bench accuracy``: this package beside others and itself."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rksc_agents.cli import common
from rksc_agents.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from rksc_agents.questions import Question

EXAMPLES = Path(__file__).parents[2] / "tests" / "data" / "gsm8k_small.jsonl"
"""In a checkout: the questions that prompts are made of unless a file is given."""

Data = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="What prompts are made of, one JSON object per line; a checkout has its own."),
]
Exit = Annotated[
    str, typer.Option("--exit", help="Early exit where there is one: strict, paper, auto, or a certificate's path.")
]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of each branch, whatever they are.")]


def branches(
    *,
    systems: Annotated[
        str | None, typer.Option(metavar="NAME,NAME,...", help="Systems, by commas; all if left out.")
    ] = None,
    data: Data = None,
    model: common.Model = DEFAULT_MODEL,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of the prompt, exactly.")] = 1024,
    branches: Annotated[int, typer.Option(min=1, max=1024, help="Branches.")] = 8,
    tokens: Tokens = 64,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each system; one more warms up.")] = 5,
    exit_: Exit = "strict",
    vllm_python: Annotated[
        str | None, typer.Option(envvar="RKSC_VLLM_PYTHON", metavar="PATH", help="The Python that has vLLM.")
    ] = None,
    llama_cpp: Annotated[
        str | None, typer.Option(envvar="RKSC_LLAMA_CPP", metavar="PATH", help="The program llama-server.")
    ] = None,
    llama_cpp_model: Annotated[
        str | None, typer.Option(envvar="RKSC_LLAMA_CPP_MODEL", metavar="FILE", help="The weights as a GGUF file.")
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Answer a question with branches and verify each, by several systems in turn.

    Systems: no-kv (nothing shared, verification from nothing: the paper's baseline), transformers, vllm, llama.cpp,
    rksc (no shortcut), rksc-int8 (8-bit weights), rksc-cgee (early exit), rksc-adaptive (and branches that end early).

    The keys of --json: unit with prefix, examples, branches, tokens, verification_tokens, temperature, runs; machine
    with model, device, dtype, parameters, copies (of the weights), cores, threads, cpu_capability, torch, transformers;
    systems, each with system, note, missing (why it did not run), median_s, spread (quartiles), speedup_over_no_kv (of
    medians), speedup_spread (quartiles of the ratios by round), verified (branches), tokens_computed, kv_bytes, passes,
    prefill_s, decode_s, verify_s.
    """
    from rksc_agents.bench import branches as measuring
    from rksc_agents.bench.peers import SYSTEMS, systems_of
    from rksc_agents.bench.peers.weights import Places

    named = list(SYSTEMS) if systems is None else _names(systems)
    systems_of(named)  # a wrong name is told before a model is loaded
    questions = _questions(data)
    common.quiet_unless_watched()
    with common.progress_bars() as show:
        found = measuring.bench_branches(
            model,
            questions,
            systems=named,
            prefix=prefix,
            branches=branches,
            tokens=tokens,
            runs=runs,
            exit=exit_,
            places=Places(vllm_python, llama_cpp, llama_cpp_model),
            loading=common.load_progress(),
            progress=None if show is None else partial(show, "runs"),
        )
    common.print_lines([json.dumps(found)] if as_json else measuring.lines(found))


def growth(
    *,
    data: Data = None,
    model: common.Model = DEFAULT_MODEL,
    branches: Annotated[
        list[int] | None, typer.Option(min=1, max=1024, help="Branches; may be repeated. 1, 2, 4, 8, 16, 32.")
    ] = None,
    prefix: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of the prompt; may be repeated. 256, 1024.")
    ] = None,
    in_flight: Annotated[
        list[int] | None, typer.Option(min=1, help="Questions at once, each with its prompt; may be repeated. 1.")
    ] = None,
    tokens: Tokens = 64,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each; one more warms up.")] = 3,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw time and KV against branches.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Do what `branches` does, by this package alone, in every size that is asked for.

    The keys of --json: unit with tokens, verification_tokens, temperature, runs; machine as of `branches`, with
    model, device, dtype, parameters, copies, cores, threads, cpu_capability, torch, transformers; rows, each with
    prefix, branches, in_flight, median_s, spread (quartiles), prefill_s, decode_s, verify_s, tokens_computed, kv_bytes,
    kv_bytes_copied (of the same sequences with a copy of the prompt each).
    """
    from rksc_agents.bench import growth as measuring
    from rksc_agents.bench.growth_plot import plot as draw
    from rksc_agents.bench.svg import check_drawing

    if plot is not None:
        check_drawing()
    questions = _questions(data)
    common.quiet_unless_watched()
    with common.progress_bars() as show:
        found = measuring.bench_growth(
            model,
            questions,
            branches=branches or measuring.BRANCHES,
            prefix=prefix or measuring.PREFIX,
            in_flight=in_flight or measuring.IN_FLIGHT,
            tokens=tokens,
            runs=runs,
            loading=common.load_progress(),
            progress=None if show is None else partial(show, "runs"),
        )
    if plot is not None:
        draw(found, plot)
    common.print_lines([json.dumps(found)] if as_json else measuring.lines(found))


def accuracy(
    *,
    questions: Annotated[Path, typer.Argument(help="Questions with answers, one JSON object per line.")],
    ways: Annotated[str | None, typer.Option(metavar="NAME,NAME,...", help="Ways, by commas; all if left out.")] = None,
    model: common.Model = DEFAULT_MODEL,
    gguf_file: common.GGUFFile = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions at most.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which questions are drawn, and of the branches.")] = 0,
    branches: Annotated[int, typer.Option(min=1, max=1024, help="Branches.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each branch at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Of the ways that draw.")] = 0.7,
    exit_: Exit = "strict",
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep each answer here, and go on from what it has.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw accuracy against time.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Answer questions in several ways, one at a time, and count the right answers.

    Ways: direct, majority, majority-decided, verifier (a vote by verdicts), verifier-cgee, verifier-adaptive,
    best-of-n, best-of-n-cgee.

    The keys of --json: model, questions, exit, branches, tokens, temperature, seed; rows, each with way, strategy,
    right, accuracy, low and high (95 % interval), generated_tokens and seconds (means per question), reference (the
    same without shortcuts) and agreement with it, skip_rate, exits.
    """
    from rksc_agents.bench import accuracy as measuring
    from rksc_agents.bench.accuracy_plot import plot as draw
    from rksc_agents.bench.svg import check_drawing
    from rksc_agents.bench.ways import WAYS, ways_of
    from rksc_agents.questions import read_questions

    if plot is not None:
        check_drawing()
    named = list(WAYS) if ways is None else _names(ways)
    ways_of(named)
    asked = read_questions(questions, limit=limit, seed=seed)
    if lacking := [number for number, question in enumerate(asked, 1) if question.answer is None]:
        raise typer.BadParameter(f"question {lacking[0]} of {questions} has no `answer`: give each one")
    with common.load_reasoner(model, gguf_file, exit=exit_) as reasoner, common.progress_bars() as show:
        found = measuring.bench_accuracy(
            reasoner,
            asked,
            ways=named,
            branches=branches,
            tokens=tokens,
            temperature=temperature,
            exit=exit_,
            seed=seed,
            resume=resume,
            progress=None if show is None else partial(show, "answers"),
        )
    if plot is not None:
        draw(found, plot)
    common.print_lines([json.dumps(found)] if as_json else measuring.lines(found))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _questions(data: Path | None) -> list[Question]:
    from rksc_agents.questions import read_questions

    if data is None and not EXAMPLES.exists():
        raise typer.BadParameter("--data is needed outside a checkout: give a file of questions with answers")
    return read_questions(EXAMPLES if data is None else data)
