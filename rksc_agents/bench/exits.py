"""What early exit saves and what it changes: both levels against full verification, on files of questions.

The branches of each question are verified at full depth, with the hidden states of every layer kept. What each rule
would have done is read from these, and the time is taken from passes that really stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, ClassVar

import torch

from rksc_agents.calibrator import certificate_of, default_layers, fitted, observe, observed, predictions
from rksc_agents.config import Sampling
from rksc_agents.errors import ConfigError
from rksc_agents.questions import Question
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.reasoning import SelfConsistency
from rksc_agents.reasoning.judging import claims_of
from rksc_agents.reasoning.observe import Sample
from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.strategy import Outcome, Strategy
from rksc_agents.verify.decisions import Setting, best_of_n, early_log_odds, weighted_vote
from rksc_agents.verify.early_exit import FittedExit, binary_entropy
from rksc_agents.verify.gates import ExitConfig
from rksc_agents.verify.intervals import auc, clopper_pearson
from rksc_agents.verify.lens import FittedLens
from rksc_agents.verify.replay import Bench
from rksc_agents.verify.verifier import ProbingVerifier, Verifier

MARGINS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
MARGIN = 3.0
"""Of the passes that are timed."""

RAW = ((0.3, 0.05), (0.5, 0.05), (0.6, 0.02), (0.65, 0.1))
"""Entropy and its change, of the raw lens."""

Progress = Callable[[str, int, int], None]


def bench_exits(
    model: str,
    tasks: Mapping[str, Sequence[Question]],
    *,
    verifier: Verifier | None = None,
    branches: int = 4,
    tokens: int = 48,
    temperature: float = 0.7,
    first_layer: int | None = None,
    splits: int = 3,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure both levels of early exit.

    Parameters
    ----------
    model : str
        As for `rksc ask`.
    tasks : mapping of str to sequence of Question
        Questions by the name of their file.
    verifier : Verifier or None
        None asks the model on the branch's own KV.
    branches, tokens : int, default 4, 48
        Branches per question, and tokens of each.
    temperature : float, default 0.7
        Of the branches.
    first_layer : int or None
        The first layer that the fitted lens reads; None is the first quarter of the model.
    splits : int, default 3
        Certificates that are made and tried on the other half of the questions.

    Returns
    -------
    dict
        model, verifier, calls, auc; level1, raw and fitted (lists of rows), certificates, time.
    """
    strategy = SelfConsistency(vote="verifier", branches=branches, verifier=verifier)
    sampling = Sampling(temperature=temperature, max_tokens=tokens)
    with RKSCReasoner.from_pretrained(model, dtype=torch.float32, sampling=sampling, exit="off") as reasoner:
        depth = reasoner.depth
        every = tuple(range(1, depth))
        samples: dict[str, list[Sample]] = {}
        for name, questions in tasks.items():
            watch = None if progress is None else _named(progress, name)
            found = observe(reasoner, [q.text for q in questions], strategy, every, progress=watch)
            if None in found:
                raise ConfigError(f"a question of {name} leaves no room to ask about its branches: lower tokens")
            samples[name] = [sample for sample in found if sample is not None]
        first = first_layer if first_layer is not None else max(1, depth // 4)
        fit, test = _halves(samples)
        read = [layer for layer in every if layer >= first]
        columns = [layer - 1 for layer in read]
        lens, _ = fitted([_narrowed(sample, columns) for sample in fit], read)
        held = [_narrowed(sample, columns) for sample in test]
        answers = {name: [question.answer for question in questions] for name, questions in tasks.items()}
        return {
            "model": reasoner.name,
            "verifier": strategy.checker.name,
            "depth": depth,
            "calls": sum(len(sample.branches) for found in samples.values() for sample in found),
            "yes": fmean(float(v > 0) for found in samples.values() for s in found for v in s.log_odds - s.zeros),
            "auc": _auc(samples, answers),
            "level1": [_level1(samples, config) for config in _gates()],
            "raw": [_raw(test, depth, theta, epsilon) for theta, epsilon in RAW],
            "fitted": [_fitted(held, lens, depth, margin) for margin in MARGINS],
            "certificates": [_certified(reasoner, strategy, samples, split) for split in range(splits)],
            "time": _timed(reasoner, strategy, tasks, lens),
        }


def _named(progress: Progress, name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(name, done, total)


def _halves(samples: Mapping[str, Sequence[Sample]]) -> tuple[list[Sample], list[Sample]]:
    """Every second question of each task: one half for fitting, the other for testing."""
    fit = [sample for found in samples.values() for sample in found[::2]]
    return fit, [sample for found in samples.values() for sample in found[1::2]]


def _auc(samples: Mapping[str, Sequence[Sample]], answers: Mapping[str, Sequence[str | None]]) -> dict[str, float]:
    """By task, how well the verdict tells right branches from wrong ones."""
    from rksc_agents.reasoning.equivalence import equivalent

    found: dict[str, float] = {}
    for name, given in samples.items():
        marks, scores = [], []
        for sample, answer in zip(given, answers[name], strict=True):
            for branch, value in zip(sample.branches, (sample.log_odds - sample.zeros).tolist(), strict=True):
                if answer is not None:
                    marks.append(branch.answer is not None and equivalent(branch.answer, answer))
                    scores.append(value)
        if len(set(marks)) == 2:
            found[name] = auc(scores, marks)
    return found


# -- level 1 ------------------------------------------------------------------------------------


def _gates() -> list[ExitConfig]:
    paper = ExitConfig.preset("paper")
    relative = paper.replace(source="paper, relative", confidence=0.63, gap=0.08, relative=True)
    steps = [ExitConfig(source=f"{tau:.2f}, gap {gap:.2f}", confidence=tau, gap=gap) for tau, gap in _GRID]
    return [ExitConfig.preset("strict"), paper, relative, *steps]


_GRID = ((0.70, 0.10), (0.70, 0.20), (0.80, 0.10), (0.80, 0.20), (0.90, 0.10))


def _level1(samples: Mapping[str, Sequence[Sample]], config: ExitConfig) -> dict[str, Any]:
    """How often the gate skips, and how often the decision then differs from full verification's."""
    rows: dict[str, Any] = {"gate": config.source, "confidence": config.confidence, "gap": config.gap, "tasks": {}}
    problems = skipped = best_errors = vote_errors = 0
    for name, found in samples.items():
        task_skipped = 0
        for sample in found:
            confidences = [branch.confidence for branch in sample.branches]
            top = config.decisive(config.measure, confidences, sample.keys)
            problems += 1
            if top is None:
                continue
            task_skipped += 1
            keys = [key if key >= 0 else -1 - at for at, key in enumerate(sample.keys)]
            scores = torch.sigmoid(sample.log_odds - sample.zeros).tolist()
            best_errors += best_of_n(confidences, keys, scores) != keys[top]
            vote_errors += weighted_vote(confidences, keys, scores) != keys[top]
        skipped += task_skipped
        rows["tasks"][name] = task_skipped / len(found)
    rows |= {
        "skip_rate": skipped / problems,
        "skipped": skipped,
        "best_of_n_errors": best_errors,
        "vote_errors": vote_errors,
        "problems": problems,
    }
    return rows


# -- level 2 ------------------------------------------------------------------------------------


def _raw(samples: Sequence[Sample], depth: int, theta: float, epsilon: float) -> dict[str, Any]:
    """The paper's rule, from the middle layer on."""
    errors = calls = 0
    saved: list[float] = []
    for sample in samples:
        for full, zero, row in zip(sample.log_odds.tolist(), sample.zeros.tolist(), sample.raw.tolist(), strict=True):
            layer, value = depth, full
            for at in range(max(2, depth // 2), depth):
                now, before = (binary_entropy(row[i] - zero) for i in (at - 1, at - 2))
                if now < theta and abs(now - before) < epsilon:
                    layer, value = at, row[at - 1]
                    break
            calls += 1
            errors += (value > zero) != (full > zero)
            saved.append(1 - layer / depth)
    return {"theta": theta, "epsilon": epsilon, **_rate(errors, calls), "layers_saved": fmean(saved)}


def _fitted(samples: Sequence[Sample], lens: FittedLens, depth: int, margin: float) -> dict[str, Any]:
    """The fitted rule, on questions that the lens has not seen."""
    errors = calls = 0
    reached: list[int] = []
    passes: list[float] = []
    for sample in samples:
        seen = observed(sample, predictions(lens, sample))
        values, exits = early_log_odds(seen, lens.layers, lens.error, margin)
        layers = [depth if layer is None else layer for layer in exits]
        calls += len(layers)
        errors += sum((value > 0) != (full > 0) for value, full in zip(values, seen.log_odds, strict=True))
        reached += layers
        passes.append(1 - max(layers) / depth)
    return {
        "margin": margin,
        **_rate(errors, calls),
        "exits": sum(layer < depth for layer in reached) / calls,
        "layers_saved": fmean(1 - layer / depth for layer in reached),
        "layers_saved_by_pass": fmean(passes),
    }


def _rate(errors: int, calls: int) -> dict[str, Any]:
    low, high = clopper_pearson(errors, calls)
    return {"errors": errors, "calls": calls, "error_rate": errors / calls, "low": low, "high": high}


# -- certificates -------------------------------------------------------------------------------


def _certified(
    reasoner: RKSCReasoner, strategy: SelfConsistency, samples: Mapping[str, Sequence[Sample]], split: int
) -> dict[str, Any]:
    """A certificate from one half of the questions, and its risk on the other half."""
    every = [sample for found in samples.values() for sample in found]
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(split)).tolist()
    half = len(every) // 2
    made, held = [every[i] for i in order[:half]], [every[i] for i in order[half:]]
    layers = default_layers(reasoner.depth)
    columns = [layer - 1 for layer in layers]
    narrowed = [[_narrowed(sample, columns) for sample in part] for part in (made, held)]
    alpha = 0.05
    certificate, missing = certificate_of(reasoner, narrowed[0], strategy, layers, alpha=alpha, seed=split)
    lens = certificate.fitted_lens
    read, spread = ((), ()) if lens is None else (lens.layers, lens.error)
    tried = [
        observed(sample, predictions(lens, sample) if lens is not None else torch.zeros(len(sample.branches), 0))
        for sample in narrowed[1]
    ]
    run = Bench(tried, read, spread, reasoner.depth, weighted_vote).run(
        Setting(certificate.confidence, certificate.gap, certificate.margin)
    )
    return {
        "alpha": alpha,
        "made_on": half,
        "n": certificate.n,
        "missing_for_alpha": missing,
        "confidence": certificate.confidence,
        "gap": certificate.gap,
        "margin": certificate.margin,
        "work_saved": certificate.work_saved,
        "held_out": len(held),
        **{key: value for key, value in _rate(run.errors, len(held)).items() if key != "calls"},
        "skip_rate": run.skip_rate,
    }


def _narrowed(sample: Sample, columns: Sequence[int]) -> Sample:
    """The sample with some of its layers."""
    return replace(sample, states=sample.states[:, list(columns)], raw=sample.raw[:, list(columns)])


# -- time ---------------------------------------------------------------------------------------


class _Timed(Strategy):
    """Verifies the same branches in full and with a rule, in turn, and keeps the seconds of each."""

    name: ClassVar[str] = "timed-exits"

    branches: int
    rule: FittedExit
    sink: Callable[[tuple[float, float]], None]

    async def solve(self, problem: Problem) -> Outcome:
        verifier = problem.settings.verifier
        assert isinstance(verifier, ProbingVerifier)
        async with problem.branching(await problem.start(self.branches)) as ended:
            async for _ in ended:
                pass
        claims = claims_of(problem, range(len(problem.branches)))
        taken: tuple[list[float], list[float]] = ([], [])
        for _ in range(3):
            for times, rule in zip(taken, (None, self.rule), strict=True):
                began = time.perf_counter()
                await verifier.read(problem.session, claims, rule)
                times.append(time.perf_counter() - began)
        self.sink((median(taken[0]), median(taken[1])))
        return Outcome(0, None)


def _timed(
    reasoner: RKSCReasoner, strategy: SelfConsistency, tasks: Mapping[str, Sequence[Question]], lens: FittedLens
) -> dict[str, Any]:
    pairs: list[tuple[float, float]] = []
    timed = _Timed(
        branches=strategy.branches,
        rule=FittedExit(lens, MARGIN),
        sink=pairs.append,
        verifier=strategy.verifier,
    )
    for questions in tasks.values():
        for question in questions[1:10:2]:  # of the half that the lens has not seen
            reasoner.reason(question.text, strategy=timed)
    ratios = sorted(full / early for full, early in pairs)
    return {
        "margin": MARGIN,
        "questions": len(pairs),
        "ratio": median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[3 * len(ratios) // 4],
    }
