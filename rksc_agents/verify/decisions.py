"""What early exit would have decided: problems verified at full depth, settings, and what one makes of a problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rksc_agents.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Observed:
    """One problem, with all of its branches verified at full depth.

    Attributes
    ----------
    confidences : tuple of float
        Of each branch, in the measure in use.
    answers : tuple of str or None
    keys : tuple of int
        Equal numbers for equal answers; -1 abstains.
    log_odds : tuple of float
        The verdict at full depth.
    predicted : tuple of tuple of float
        Per branch and layer of the lens, the log-odds that the lens predicts; empty tuples without a lens.
    correct : tuple of bool or None
        Where labels are known.
    """

    confidences: tuple[float, ...]
    answers: tuple[str | None, ...]
    keys: tuple[int, ...]
    log_odds: tuple[float, ...]
    predicted: tuple[tuple[float, ...], ...]
    correct: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        count = len(self.confidences)
        parts = [self.answers, self.keys, self.log_odds, self.predicted]
        parts += [] if self.correct is None else [self.correct]
        numbers = [*self.confidences, *self.log_odds, *(value for row in self.predicted for value in row)]
        if not count or any(len(part) != count for part in parts) or not all(map(math.isfinite, numbers)):
            raise ConfigError(
                f"a problem of {count} branches with {[len(part) for part in parts]} entries: give one entry per "
                "branch, one branch at least, and finite numbers"
            )


@dataclass(frozen=True, slots=True)
class Setting:
    """Thresholds of both levels of early exit; None switches a level off.

    Attributes
    ----------
    confidence : float or None
        Level 1: nothing is verified if the top branch is at least this confident ...
    gap : float
        ... and leads the best different answer by at least this much.
    margin : float or None
        Level 2: a verdict has settled where the predicted log-odds are this many standard deviations of the lens's
        error away from 0.
    """

    confidence: float | None = None
    gap: float = 0.0
    margin: float | None = None


OFF = Setting()
"""Everything is verified at full depth."""


Decide = Callable[[Sequence[float], Sequence[int], Sequence[float]], int]
"""Confidences, keys and scores of the branches in, the key of the answer out. Negative keys abstain, each its own."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a setting made of a problem.

    Attributes
    ----------
    decision : int
        Key of the answer; -1 - b if branch b, which abstains, was chosen.
    skipped : bool
        Level 1 decided.
    layers_run : tuple of int or None
        Per branch, the layers its verification took: 0 if skipped, None at full depth. A pass ends when its last
        branch has settled, so the branches of a problem have the same.
    """

    decision: int
    skipped: bool
    layers_run: tuple[int | None, ...]


def lead(confidences: Sequence[float], keys: Sequence[int]) -> tuple[int, float, float]:
    """Return the most confident branch, its confidence, and its lead over the best branch with a different answer.

    The earliest of equals counts as the most confident. Branches that abstain differ from all others. Without a rival
    the lead is the confidence itself.
    """
    top = max(range(len(confidences)), key=lambda branch: (confidences[branch], -branch))
    best = confidences[top]
    rivals = [
        value
        for branch, (value, key) in enumerate(zip(confidences, keys, strict=True))
        if branch != top and (key < 0 or key != keys[top])
    ]
    return top, best, best - max(rivals) if rivals else best


def early_log_odds(
    observed: Observed, layers: Sequence[int], errors: Sequence[float], margin: float | None
) -> tuple[tuple[float, ...], tuple[int | None, ...]]:
    """Return the log-odds with which each branch settles and the layer where it does, None at full depth.

    Parameters
    ----------
    observed : Observed
    layers : sequence of int
        Layers of the lens, ascending.
    errors : sequence of float
        Standard deviation of the lens's error at each.
    margin : float or None
        A branch settles at the first layer that predicts at least `margin` errors away from 0; None never settles.
    """
    if margin is None:
        return observed.log_odds, (None,) * len(observed.log_odds)
    if any(len(row) != len(layers) for row in observed.predicted) or len(errors) != len(layers):
        raise ConfigError(
            f"{[len(row) for row in observed.predicted]} predictions and {len(errors)} errors for {len(layers)} layers "
            "of the lens: give one of each per layer"
        )
    settled: list[tuple[float, int | None]] = []
    for full, row in zip(observed.log_odds, observed.predicted, strict=True):
        early = (
            (value, layer)
            for value, layer, error in zip(row, layers, errors, strict=True)
            if abs(value) >= margin * error
        )
        settled.append(next(early, (full, None)))
    return tuple(value for value, _ in settled), tuple(layer for _, layer in settled)


def best_of_n(confidences: Sequence[float], keys: Sequence[int], scores: Sequence[float]) -> int:
    """Return the answer of the branch with the best score, the earliest of equals."""
    return keys[max(range(len(scores)), key=lambda branch: (scores[branch], -branch))]


def weighted_vote(confidences: Sequence[float], keys: Sequence[int], scores: Sequence[float]) -> int:
    """Return the answer with the largest sum of scores, of equals the one that came first.

    Abstentions win only if all branches abstain.
    """
    weights: dict[int, list[float]] = {}
    for key, score in zip(keys, scores, strict=True):
        weights.setdefault(key, []).append(score)
    voted = [key for key in weights if key >= 0] or list(weights)
    return max(voted, key=lambda key: math.fsum(weights[key]))  # the first of equals, in order of appearance


def outcome(
    observed: Observed, setting: Setting, layers: Sequence[int], errors: Sequence[float], decide: Decide
) -> Result:
    """Decide a problem as the setting would.

    Parameters
    ----------
    observed : Observed
    setting : Setting
    layers, errors
        Layers of the lens and the standard deviation of its error at each; empty without a lens.
    decide : callable
        Such as `best_of_n` or `weighted_vote`.
    """
    keys = [key if key >= 0 else -1 - branch for branch, key in enumerate(observed.keys)]
    if setting.confidence is not None:
        top, best, ahead = lead(observed.confidences, keys)
        if best >= setting.confidence and ahead >= setting.gap:
            return Result(keys[top], True, (0,) * len(keys))
    log_odds, exits = early_log_odds(observed, layers, errors, setting.margin)
    decision = decide(observed.confidences, keys, [sigmoid(value) for value in log_odds])
    settled = [layer for layer in exits if layer is not None]
    depth = max(settled) if len(settled) == len(exits) else None
    return Result(decision, False, (depth,) * len(keys))


def sigmoid(value: float) -> float:
    """1 / (1 + exp(-value)), for any value."""
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0.0 else math.exp(value) / (1.0 + math.exp(value))
