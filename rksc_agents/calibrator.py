"""`calibrate`: early exit on your own questions, with a promise on how often it changes the answer.

Branches are drawn for each question and verified at full depth. On a third of the questions a lens is fitted and the
settings are put into an order from strict to loose; on the others they are tested in that order.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from rksc_agents.errors import ConfigError
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.reasoning import BestOfN, SelfConsistency, Strategy
from rksc_agents.reasoning.labelled import labelled
from rksc_agents.reasoning.observe import Observe, Sample
from rksc_agents.request import settings_of
from rksc_agents.types import Prompt
from rksc_agents.verify.calibration import certify, problems_needed
from rksc_agents.verify.certificate import Certificate, stored_path
from rksc_agents.verify.decisions import Decide, Observed, best_of_n, weighted_vote
from rksc_agents.verify.lens import MIN_ROWS, FittedLens, cross_fit

WAVE = 16
"""Questions in flight at once."""

MOST_LAYERS = 16
"""Layers that a lens reads at most."""

Progress = Callable[[int, int], None]
"""Called with the questions that are done and their number."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A certificate, and what it lacks.

    Attributes
    ----------
    certificate : Certificate
    path : Path or None
        Where it was written.
    problems_missing : int
        Questions to add before even settings without any error could be certified; 0 if there were enough.

    Examples
    --------
    >>> report = calibrate(reasoner, ["Q"] * 8)  # doctest: +SKIP
    >>> report.certificate.save("certificate.json")  # doctest: +SKIP
    """

    certificate: Certificate
    path: Path | None
    problems_missing: int


def calibrate(
    reasoner: RKSCReasoner,
    questions: Sequence[Prompt],
    *,
    answers: Sequence[str] | None = None,
    strategy: BestOfN | SelfConsistency | None = None,
    alpha: float = 0.01,
    delta: float = 0.05,
    fit_share: float = 1 / 3,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    save: bool | Path | str = True,
    progress: Progress | None = None,
) -> Calibration:
    """Choose thresholds and fit a lens so that early exit changes at most a share `alpha` of the decisions.

    Parameters
    ----------
    reasoner : RKSCReasoner
        Its model, sampling and chat template are what the certificate is for.
    questions : sequence of str or conversation
        Like those that will be asked; no labels are needed.
    answers : sequence of str or None, default None
        Right answers, if known: then the verifier's AUC and the accuracy of each vote rule are reported too.
    strategy : BestOfN, SelfConsistency or None
        What will be used; None is ``SelfConsistency(vote="verifier")``.
    alpha, delta : float, default 0.01, 0.05
        With probability 1 - `delta` over the questions, at most this share of decisions differs from full depth.
    fit_share : float, default 1/3
        Share of the questions on which the lens is fitted; the others test it.
    layers : sequence of int or None
        The layers that the lens reads; None is up to 16 from the first quarter of the model on.
    seed : int, default 0
        Of the split.
    save : bool, Path or str, default True
        Where the certificate is written: True is the user's cache folder, where reasoners find it by themselves.
    progress : callable or None
        Called after each wave of questions.

    Raises
    ------
    ConfigError
        If a value is outside its range, or there are too few questions to fit a lens.

    Examples
    --------
    >>> calibrate(reasoner, questions).certificate.save("certificate.json")  # doctest: +SKIP
    """
    chosen = strategy if strategy is not None else SelfConsistency(vote="verifier")
    deciding = chosen.score if isinstance(chosen, BestOfN) else chosen.vote
    if deciding != "verifier":
        raise ConfigError(
            f"the strategy {chosen.name!r} decides by {deciding!r}, so verification changes nothing: calibrate "
            "SelfConsistency(vote='verifier') or BestOfN(score='verifier')"
        )
    if isinstance(chosen, SelfConsistency) and chosen.warmup is not None:
        raise ConfigError("calibrate a strategy without warmup: all branches are drawn to their end and verified")
    problems_needed(alpha, delta)  # both are checked before anything is drawn
    if answers is not None and len(answers) != len(questions):
        raise ConfigError(f"{len(answers)} answers to {len(questions)} questions: give one each, or none")
    if not 0 < fit_share < 1:
        raise ConfigError(f"fit_share = {fit_share!r}: give a share between 0 and 1, such as 0.33")
    verdicts = round(fit_share * len(questions)) * chosen.branches
    if verdicts < MIN_ROWS:  # said before anything is drawn
        raise ConfigError(
            f"{len(questions)} questions with {chosen.branches} branches leave {verdicts} verdicts to fit a lens on, "
            f"and {MIN_ROWS} are needed: give more questions, more branches or a larger fit_share"
        )
    looked = tuple(layers) if layers is not None else default_layers(reasoner.depth)
    if round(fit_share * len(questions)) >= len(questions):
        raise ConfigError(f"fit_share = {fit_share!r} of {len(questions)} questions leaves none to test on: lower it")
    found = observe(reasoner, questions, chosen, looked, progress=progress)
    seen = [at for at, sample in enumerate(found) if sample is not None]
    if len(seen) < len(found):
        warnings.warn(
            f"{len(found) - len(seen)} of {len(found)} questions were left out, because they leave no room in the "
            "context to ask about their branches: lower max_tokens",
            stacklevel=2,
        )
    certificate, missing = certificate_of(
        reasoner,
        [sample for sample in found if sample is not None],
        chosen,
        looked,
        answers=None if answers is None else [answers[at] for at in seen],
        alpha=alpha,
        delta=delta,
        fit_share=fit_share,
        seed=seed,
    )
    if save is False:
        return Calibration(certificate, None, missing)
    path = stored_path(certificate.model_hash, certificate.prompt_hash) if save is True else Path(save)
    certificate.save(path)
    return Calibration(certificate, path, missing)


def default_layers(depth: int) -> tuple[int, ...]:
    """Up to 16 layers, evenly spaced, from the first quarter of a model of `depth` layers to the last but one."""
    first = max(1, depth // 4)
    step = max(1, -(-(depth - first) // MOST_LAYERS))
    return tuple(range(first, depth, step))


def observe(
    reasoner: RKSCReasoner,
    questions: Sequence[Prompt],
    strategy: BestOfN | SelfConsistency,
    layers: Sequence[int],
    *,
    progress: Progress | None = None,
) -> list[Sample | None]:
    """Draw and fully verify the branches of each question, in order; None where there is no room to ask about them."""
    samples: list[Sample | None] = []
    for first in range(0, len(questions), WAVE):
        wave = questions[first : first + WAVE]
        found: list[Sample] = []
        watcher = Observe(
            layers=tuple(layers),
            sink=found.append,
            asking=strategy,
            branches=strategy.branches,
            confidence=strategy.confidence,
            extract=strategy.extract,
            verifier=strategy.verifier,
        )
        reasoner.batch(wave, strategy=watcher, sharing="exact", exit="off")
        by_question = {id(sample.question): sample for sample in found}
        samples += [by_question.get(id(question)) for question in wave]
        if progress is not None:
            progress(len(samples), len(questions))
    return samples


def certificate_of(
    reasoner: RKSCReasoner,
    samples: Sequence[Sample],
    strategy: BestOfN | SelfConsistency,
    layers: Sequence[int],
    *,
    answers: Sequence[str] | None = None,
    alpha: float = 0.01,
    delta: float = 0.05,
    fit_share: float = 1 / 3,
    seed: int = 0,
) -> tuple[Certificate, int]:
    """The certificate that `samples` give, and the number of problems that are missing; computes no model pass."""
    order = list(range(len(samples)))
    random.Random(seed).shuffle(order)
    cut = round(fit_share * len(order))
    lens, held_out = fitted([samples[i] for i in order[:cut]], layers)
    fit = [observed(samples[i], held) for i, held in zip(order[:cut], held_out, strict=True)]
    test = [observed(samples[i], predictions(lens, samples[i])) for i in order[cut:]]
    found = certify(
        fit,
        test,
        layers=lens.layers,
        errors=lens.error,
        total_layers=reasoner.depth,
        alpha=alpha,
        delta=delta,
        decide=_decide(strategy),
    )
    certificate = Certificate(
        model=reasoner.name,
        model_hash=reasoner.model_hash,
        prompt_hash=reasoner.prompt_hash(strategy),
        verifier=strategy.checker.name,
        measure=strategy.measure.name,
        strategy=settings_of(strategy, reasoner.sampling),
        alpha=alpha,
        delta=delta,
        n=found.n,
        errors=found.errors,
        p_value=found.p_value,
        confidence=found.setting.confidence,
        gap=found.setting.gap,
        margin=found.setting.margin,
        lens=lens.to_json() if found.setting.margin is not None else None,
        total_layers=reasoner.depth,
        skip_rate=found.skip_rate,
        risk_among_skipped=found.risk_among_skipped,
        layers_saved=found.layers_saved,
        work_saved=found.work_saved,
        curve=found.curve,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        labelled=None if answers is None else labelled(samples, answers),
    )
    return certificate, found.problems_missing


def observed(sample: Sample, predicted: Tensor) -> Observed:
    """A sample as calibration sees it; `predicted` is [branches, layers]."""
    zeros = sample.zeros[:, None]
    return Observed(
        confidences=tuple(branch.confidence for branch in sample.branches),
        answers=tuple(branch.answer for branch in sample.branches),
        keys=sample.keys,
        log_odds=tuple((sample.log_odds - sample.zeros).tolist()),
        predicted=tuple(map(tuple, (predicted - zeros).tolist())),
    )


def predictions(lens: FittedLens, sample: Sample) -> Tensor:
    """What a lens makes of a sample it was not fitted on, [branches, layers]."""
    return torch.stack([lens.predict(layer, sample.states[:, i]) for i, layer in enumerate(lens.layers)], dim=1)


def fitted(samples: Sequence[Sample], layers: Sequence[int]) -> tuple[FittedLens, list[Tensor]]:
    """A lens fitted on `samples`, and what it would predict for each had it not seen it."""
    if not samples:
        raise ConfigError("no questions to fit a lens on: give more questions, or a larger fit_share")
    groups = [index for index, sample in enumerate(samples) for _ in sample.branches]
    states, log_odds = (torch.cat([getattr(sample, name) for sample in samples]) for name in ("states", "log_odds"))
    lens, held_out = cross_fit(layers, states, log_odds, groups=groups)
    return lens, list(held_out.split([len(sample.branches) for sample in samples]))


def _decide(strategy: Strategy) -> Decide:
    return best_of_n if isinstance(strategy, BestOfN) else weighted_vote
