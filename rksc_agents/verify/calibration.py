"""Which early decisions may be trusted: learn-then-test over settings from strict to loose.

The loss of a problem is that the early decision differs from the one that full verification makes, so no labels are
needed. The order of the settings comes from one part of the problems (*fit*), the test from the other (*test*); with
probability 1 - delta over the test problems, the setting that is chosen has a risk of at most alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rksc_agents.errors import ConfigError
from rksc_agents.types import Record
from rksc_agents.verify.decisions import OFF, Decide, Observed, Setting, lead
from rksc_agents.verify.intervals import binomial_cdf
from rksc_agents.verify.replay import Bench

STEPS = 24
"""Settings on a path."""

MARGINS = (6.0, 0.5)
"""The strictest and the loosest margin of a path, in standard deviations of the lens's error."""


@dataclass(frozen=True, slots=True)
class Tested:
    """Outcome of a test of settings in a fixed order.

    Attributes
    ----------
    accepted : int or None
        Index of the loosest setting that was accepted; None if the first was not.
    n, errors, p_value
        Problems, and the errors and p-value of that setting; those of the first where none was accepted.
    records : tuple of (int, float)
        Errors and p-value of each setting that was tested; the last may be the one that failed.
    """

    accepted: int | None
    n: int
    errors: int
    p_value: float
    records: tuple[tuple[int, float], ...]


def learn_then_test(losses: Sequence[Sequence[bool]], alpha: float, delta: float) -> Tested:
    """Walk the settings from strict to loose and stop at the first that is not safe (arXiv 2110.01052, section 2.3).

    Testing in a fixed order needs no correction for the number of tests: with probability 1 - `delta` the accepted
    setting has a risk of at most `alpha`, provided that the order was chosen without these problems.

    Parameters
    ----------
    losses : sequence of sequence of bool
        Per setting, strict to loose, whether each problem is an error.
    alpha : float
        Risk that is allowed, in (0, 1).
    delta : float
        Probability that the promise fails, in (0, 1).
    """
    _check_levels(alpha, delta)
    n = len(losses[0]) if losses else 0
    if not n or any(len(row) != n for row in losses):
        raise ConfigError(
            f"{len(losses)} settings tested on {sorted({len(row) for row in losses})} problems: give one setting and "
            "one problem at least, and the same problems to each setting"
        )
    records: list[tuple[int, float]] = []
    accepted = None
    for index, row in enumerate(losses):
        errors = sum(map(bool, row))
        records.append((errors, binomial_cdf(errors, n, alpha)))
        if records[-1][1] > delta:
            break
        accepted = index
    return Tested(accepted, n, *records[accepted or 0], tuple(records))


def problems_needed(alpha: float, delta: float, errors: int = 0) -> int:
    """Return the fewest problems with which `errors` errors still certify a risk of at most `alpha`."""
    _check_levels(alpha, delta)
    if errors < 0:
        raise ConfigError(f"errors = {errors!r}: give a count from 0")
    low, high = errors, errors + 1  # more problems with the same errors make the p-value smaller
    while binomial_cdf(errors, high, alpha) > delta:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if binomial_cdf(errors, middle, alpha) > delta else (low, middle)
    return high


class Point(Record):
    """One setting of a path, measured on the test problems.

    Attributes
    ----------
    confidence, gap, margin
        The setting.
    errors : int
        Problems that it decides differently from full verification.
    risk, skip_rate, work_saved : float
        Their share, the share of problems that level 1 skips, and the share of verification's layers that both save.
    accepted : bool
        The test accepted it.
    """

    confidence: float | None
    gap: float
    margin: float | None
    errors: int
    risk: float
    skip_rate: float
    work_saved: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class Certified:
    """The setting that was chosen, and how it did on the test problems.

    Attributes
    ----------
    setting : Setting
        The loosest that was accepted; ``OFF`` where there are too few problems to accept any.
    n, errors, p_value
        Of the test.
    skip_rate : float
        Share of problems that level 1 skips.
    skipped : int
        Their number.
    risk_among_skipped : float or None
        Share of errors among them; None where none was skipped.
    layers_saved : float
        Mean share of layers that level 2 saves, over the branches that were verified.
    work_saved : float
        Share of all layers of all branches that both levels save.
    curve : tuple of Point
        All settings of the path.
    problems_missing : int
        Test problems to add before a setting without any error would be accepted; 0 if there are enough.
    """

    setting: Setting
    n: int
    errors: int
    p_value: float
    skip_rate: float
    skipped: int
    risk_among_skipped: float | None
    layers_saved: float
    work_saved: float
    curve: tuple[Point, ...]
    problems_missing: int


def path(
    fit: Sequence[Observed],
    *,
    layers: Sequence[int],
    errors: Sequence[float],
    total_layers: int,
    decide: Decide,
    steps: int = STEPS,
) -> list[Setting]:
    """Return settings from strict to loose, joint over both levels; the first is ``OFF``.

    A staircase: each step loosens the level that costs fewer errors on `fit`, of equals the one that saves more work.
    So a level that cannot be trusted comes late and does not stop the other. Thresholds of level 1 are quantiles of
    the confidence and the lead on `fit`, margins fall from 6 to 0.5 in equal ratios.

    Parameters
    ----------
    fit : sequence of Observed
        Problems that are not used for the test. The lens should not have been fitted on them, or its predictions for
        them be held out, else level 2 seems better than it is.
    layers, errors, total_layers, decide
        As for `certify`.
    steps : int, default 24
        Settings at most, from 2.
    """
    if not fit or steps < 2:
        raise ConfigError(
            f"a path of {steps} settings from {len(fit)} problems: give 2 settings and 1 problem at least"
        )
    share = steps // 2 if layers else 0
    skips = _skips(fit, steps - 1 - share)
    margins: list[float | None] = [None]
    margins += [MARGINS[0] * (MARGINS[1] / MARGINS[0]) ** (i / max(share - 1, 1)) for i in range(share)]
    bench = Bench(fit, layers, errors, total_layers, decide)
    settings, skip, exit_ = [OFF], 0, 0
    while (skip, exit_) != (len(skips) - 1, len(margins) - 1):
        moves = [(s, e) for s, e in ((skip, exit_ + 1), (skip + 1, exit_)) if s < len(skips) and e < len(margins)]
        options = [(move, Setting(*skips[move[0]], margins[move[1]])) for move in moves]
        if len(options) > 1:
            runs = [bench.run(setting) for _, setting in options]
            costs = [(run.errors, -run.work_saved) for run in runs]
            options = options[costs.index(min(costs)) :]
        (skip, exit_), setting = options[0]
        settings.append(setting)
    return settings


def certify(
    fit: Sequence[Observed],
    test: Sequence[Observed],
    *,
    layers: Sequence[int],
    errors: Sequence[float],
    total_layers: int,
    alpha: float,
    delta: float,
    decide: Decide,
) -> Certified:
    """Choose the loosest setting whose risk is at most `alpha` with probability 1 - `delta`.

    Parameters
    ----------
    fit, test : sequence of Observed
        Problems for the order of the settings and for the test, none in both. The lens may have seen none of `test`.
    layers : sequence of int
        Layers of the lens, ascending; empty without a lens.
    errors : sequence of float
        Standard deviation of the lens's error at each.
    total_layers : int
        Layers of the model.
    alpha, delta : float
        As for `learn_then_test`.
    decide : callable
        Such as `best_of_n` or `weighted_vote`.
    """
    if not test:
        raise ConfigError("no problems to test on: give more questions")
    settings = path(fit, layers=layers, errors=errors, total_layers=total_layers, decide=decide)
    bench = Bench(test, layers, errors, total_layers, decide)
    runs = [bench.run(setting) for setting in settings]
    tested = learn_then_test([run.losses for run in runs], alpha, delta)
    chosen = tested.accepted or 0
    run = runs[chosen]
    return Certified(
        setting=settings[chosen],
        n=tested.n,
        errors=tested.errors,
        p_value=tested.p_value,
        skip_rate=run.skip_rate,
        skipped=sum(run.skipped),
        risk_among_skipped=run.risk_among_skipped,
        layers_saved=run.layers_saved,
        work_saved=run.work_saved,
        curve=tuple(
            Point(
                confidence=setting.confidence,
                gap=setting.gap,
                margin=setting.margin,
                errors=run.errors,
                risk=run.errors / tested.n,
                skip_rate=run.skip_rate,
                work_saved=run.work_saved,
                accepted=tested.accepted is not None and index <= tested.accepted,
            )
            for index, (setting, run) in enumerate(zip(settings, runs, strict=True))
        ),
        problems_missing=max(0, problems_needed(alpha, delta) - tested.n),
    )


def _skips(fit: Sequence[Observed], count: int) -> list[tuple[float | None, float]]:
    leads = [lead(problem.confidences, problem.keys) for problem in fit]
    tops, gaps = sorted(top for _, top, _ in leads), sorted(max(gap, 0.0) for _, _, gap in leads)
    last = len(fit) - 1
    at = [round(last * (1.0 - step / count)) for step in range(1, count + 1)]
    levels: list[tuple[float | None, float]] = [(None, 0.0), *((tops[i], gaps[i]) for i in at)]
    return list(dict.fromkeys(levels))  # equal quantiles are one setting


def _check_levels(alpha: float, delta: float) -> None:
    if not (0.0 < alpha < 1.0 and 0.0 < delta < 1.0):
        raise ConfigError(f"alpha = {alpha!r}, delta = {delta!r}: give both between 0 and 1, such as 0.01 and 0.05")
