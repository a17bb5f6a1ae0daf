"""When a branch is too unsure to go on (DeepConf online, arXiv 2508.15260)."""

from __future__ import annotations

from collections.abc import Sequence

from rksc_agents.engine.jobs import Doubt
from rksc_agents.verify.confidence import Confidence, GroupMinimum

LEAST = 16
"""Tokens that a branch has before it is doubted; a measure over a window waits for the first full one instead."""

EVERY = 8
"""A branch is looked at each time its length is a multiple of this, since each look costs time between two steps."""

_NOISE = 1e-6  # as much as sums in another order, or passes over other batches, change equal confidences


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of `values` lie, between two of them in proportion."""
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])


def doubt_under(measure: Confidence, threshold: float) -> Doubt:
    """Return what tells that a branch's confidence so far, in `measure`, is under `threshold`."""
    window = measure.window if isinstance(measure, GroupMinimum) else None
    least = LEAST if window is None else window
    limit = threshold - _NOISE * max(1.0, abs(threshold))

    def doubt(scores: Sequence[float], logprobs: Sequence[float]) -> bool:
        if len(scores) < least or len(scores) % EVERY:
            return False
        if window is not None:  # of the windows those are new that ended since the last look
            scores, logprobs = scores[-(window + EVERY) :], logprobs[-(window + EVERY) :]
        return measure.of_branch(scores, logprobs) < limit

    return doubt
