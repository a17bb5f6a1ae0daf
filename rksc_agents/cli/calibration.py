"""``rksc calibrate``: a certificate for early exit from your own questions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rksc_agents.cli import common
from rksc_agents.config import DEFAULT_MODEL, Sampling

if TYPE_CHECKING:
    from rksc_agents.calibrator import Calibration
    from rksc_agents.questions import Question
    from rksc_agents.reasoning import BestOfN, SelfConsistency
    from rksc_agents.verify.certificate import Labelled

STRATEGIES = ("self-consistency", "best-of-n")


def calibrate(
    *,
    data: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Questions, one JSON object per line; may be repeated.")
    ],
    model: common.Model = DEFAULT_MODEL,
    gguf_file: common.GGUFFile = None,
    strategy: Annotated[
        str, typer.Option(metavar=f"[{'|'.join(STRATEGIES)}]", help="What will be used, deciding by verifier.")
    ] = "self-consistency",
    branches: Annotated[int | None, typer.Option(help="Branches per question; the strategy's default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens a branch may generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits; 0 is greedy.")] = None,
    verifier: common.Probing = "self",
    alpha: Annotated[float, typer.Option(help="Share of decisions that may differ from full verification.")] = 0.01,
    delta: Annotated[float, typer.Option(help="Probability that the promise fails.")] = 0.05,
    limit: Annotated[int | None, typer.Option(help="Questions at most, of all files together.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which questions are drawn, and how they are split.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of the cache folder, where --exit auto looks.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw risk against work saved.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Choose thresholds for early exit on your own questions, with a promise on how often it changes the decision.

    Needs no labels. Where all questions have answers, it also says how good the verifier and the vote rules are.

    The keys of --json: path; questions_missing; version, model, model_hash, prompt_hash, verifier, measure; strategy
    with strategy, branches, temperature, max_tokens; alpha, delta, n, errors, p_value, confidence, gap, margin; lens,
    or null, with layers, width, weights, bias, error, scale, fitted_on; total_layers, skip_rate, risk_among_skipped,
    layers_saved, work_saved; curve, each with confidence, gap, margin, errors, risk, skip_rate, work_saved, accepted;
    created; labelled, or null, with questions, verifier_auc, accuracy (a share by rule), recommendation.
    """
    from rksc_agents.calibrator import calibrate as certify
    from rksc_agents.verify.calibration import problems_needed
    from rksc_agents.verify.certificate import plot as draw

    # all that can be wrong is told before hours of work
    problems_needed(alpha, delta)
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot needs matplotlib: install it with pip install 'rksc-agents[plot]'")
    questions = _questions(data, limit, seed)
    given = {"max_tokens": max_tokens, "temperature": temperature}
    sampling = {name: value for name, value in given.items() if value is not None}
    Sampling(**sampling)
    plan = _plan(strategy, branches, verifier)
    answers = [question.answer for question in questions if question.answer is not None]
    with (
        common.load_reasoner(model, gguf_file, sampling=sampling, exit="off") as reasoner,
        common.progress_bars() as show,
    ):
        found = certify(
            reasoner,
            [question.text for question in questions],
            answers=answers if len(answers) == len(questions) else None,
            strategy=plan,
            alpha=alpha,
            delta=delta,
            seed=seed,
            save=True if out is None else out,
            progress=None if show is None else partial(show, "questions"),
        )
    if plot is not None:
        draw(found.certificate, plot)
    if as_json:
        typer.echo(json.dumps(_record(found)))
        return
    common.print_lines(_lines(found, plot, len(questions), len(answers)))


def _questions(paths: Sequence[Path], limit: int | None, seed: int) -> list[Question]:
    from rksc_agents.questions import read_questions

    if limit is not None and limit < 1:
        raise typer.BadParameter(f"--limit {limit}: give a number of questions, at least 1")
    found = [question for path in paths for question in read_questions(path)]
    if limit is None or limit >= len(found):
        return found
    return random.Random(seed).sample(found, limit)


def _plan(name: str, branches: int | None, verifier: str) -> BestOfN | SelfConsistency:
    from rksc_agents.reasoning import BestOfN, SelfConsistency

    common.one_of("--strategy", name, STRATEGIES)
    settings: dict[str, Any] = {"verifier": common.verifier_of(verifier, probing=True)}
    if branches is not None:
        settings["branches"] = branches
    if name == "best-of-n":
        return BestOfN(score="verifier", **settings)
    return SelfConsistency(vote="verifier", **settings)


def _record(found: Calibration) -> dict[str, Any]:
    return {
        "path": None if found.path is None else str(found.path),
        "questions_missing": found.problems_missing,
        **found.certificate.model_dump(mode="json"),
    }


def _lines(found: Calibration, plot: Path | None, questions: int, answers: int) -> Iterator[str]:
    """Yield what was found as lines, ``name: facts``."""
    from rksc_agents.printable import one_line

    made = found.certificate
    yield one_line(f"certificate: {found.path}")
    if plot is not None:
        yield one_line(f"plot: {plot}")
    yield one_line(f"model: {made.model}, verifier {made.verifier}")
    if made.confidence is None:
        yield "level 1: off, every branch is verified"
    else:
        yield f"level 1: confidence {made.confidence:.4f}, gap {made.gap:.4f}"
    yield "level 2: off, full depth" if made.margin is None else f"level 2: margin {made.margin:.4f}"
    promise = f"alpha {made.alpha:g}, delta {made.delta:g}"
    yield f"test: {made.n} questions, {made.errors} decisions differ, p-value {made.p_value:.4f}, {promise}"
    risk = (
        "none was skipped" if made.risk_among_skipped is None else f"risk among skipped {made.risk_among_skipped:.2%}"
    )
    yield f"skip rate: {made.skip_rate:.1%}, {risk}"
    yield f"saved: layers {made.layers_saved:.1%}, work {made.work_saved:.1%}"
    if found.problems_missing:
        yield f"missing: {found.problems_missing} more questions in the test before any saving can be certified"
    else:
        yield "missing: none, there are questions enough for this alpha"
    if made.labelled is None:
        yield f"labelled: no, {answers} of {questions} questions have an answer"
    else:
        yield from _labelled(made.labelled)


def _labelled(report: Labelled) -> Iterator[str]:
    area = "unknown" if report.verifier_auc is None else f"{report.verifier_auc:.3f}"
    yield f"labelled: {report.questions} questions, AUC of the verifier {area}"
    for rule, share in report.accuracy.items():
        yield f"accuracy: {rule} {share:.1%}"
    yield f"recommendation: {report.recommendation}"
