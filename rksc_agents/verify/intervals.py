"""Small exact statistics: binomial tails and intervals, and measures by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rksc_agents.errors import ConfigError


def binomial_cdf(k: int, n: int, p: float) -> float:
    """Return P(Bin(n, p) <= k).

    The tail that does not hold the mean is summed outwards from its largest term, so small tails keep their relative
    precision (about 1e-9 at n = 100,000) and few terms are needed.

    Parameters
    ----------
    k : int
        May lie outside 0 to `n`.
    n : int
        Trials, from 0.
    p : float
        Probability of each, in [0, 1].
    """
    if n < 0 or not 0.0 <= p <= 1.0:
        raise ConfigError(f"binomial_cdf(n={n!r}, p={p!r}): n is a count from 0 and p a probability in [0, 1]")
    if k < 0:
        return 0.0
    if k >= n or p == 0.0:
        return 1.0
    if p == 1.0:
        return 0.0
    if k <= n * p:
        return _lower_tail(k, n, p)
    return 1.0 - _lower_tail(n - k - 1, n, 1.0 - p)


def _lower_tail(k: int, n: int, p: float) -> float:
    largest = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    largest += k * math.log(p) + (n - k) * math.log1p(-p)
    term = total = 1.0
    for j in range(k, 0, -1):  # P(X = j - 1) / P(X = j), which falls with j
        term *= j * (1.0 - p) / ((n - j + 1) * p)
        total += term
        if term < 1e-17 * total:
            break
    return min(1.0, math.exp(largest + math.log(total)))


def clopper_pearson(errors: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a rate of which `errors` in `n` trials were seen (Clopper and Pearson 1934).

    Parameters
    ----------
    errors : int
        From 0 to `n`.
    n : int
        Trials, from 1.
    confidence : float, default 0.95
        At least this share of such intervals holds the rate; half of the rest lies on each side. In (0, 1).
    """
    if n < 1 or not 0 <= errors <= n or not 0.0 < confidence < 1.0:
        raise ConfigError(
            f"clopper_pearson(errors={errors!r}, n={n!r}, confidence={confidence!r}): n is a count from 1, errors "
            "from 0 to n, confidence in (0, 1)"
        )
    tail = (1.0 - confidence) / 2.0
    low = 0.0 if errors == 0 else _rate(errors - 1, n, 1.0 - tail)
    high = 1.0 if errors == n else _rate(errors, n, tail)
    return low, high


def _rate(k: int, n: int, probability: float) -> float:
    """The p at which P(Bin(n, p) <= k) is `probability`; the distribution function falls with p."""
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2.0) not in {low, high}:
        if binomial_cdf(k, n, middle) > probability:
            low = middle
        else:
            high = middle
    return middle


def auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Return the probability that a true one scores above a false one, ties counted half.

    Raises
    ------
    ConfigError
        If one of the two classes is missing, or a score is NaN.
    """
    positives = sum(map(bool, labels))
    negatives = len(labels) - positives
    if len(scores) != len(labels) or not positives or not negatives:
        raise ConfigError(
            f"auc of {len(scores)} scores with {positives} true and {negatives} false labels: give one label per "
            "score and at least one of each class"
        )
    ranks = average_ranks(scores)
    total = math.fsum(rank for rank, label in zip(ranks, labels, strict=True) if label)
    return (total - positives * (positives + 1) / 2.0) / (positives * negatives)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation, equal values sharing their average rank.

    Raises
    ------
    ConfigError
        If the lengths differ, all values of one are equal, or one is NaN.
    """
    if len(a) != len(b) or len(set(a)) < 2 or len(set(b)) < 2:
        raise ConfigError(
            f"spearman of {len(a)} and {len(b)} values: give two sequences of one length, each with at least two "
            "different values"
        )
    middle = (len(a) + 1) / 2.0
    x = [rank - middle for rank in average_ranks(a)]
    y = [rank - middle for rank in average_ranks(b)]
    shared = math.fsum(i * j for i, j in zip(x, y, strict=True))
    return shared / math.sqrt(math.fsum(i * i for i in x) * math.fsum(j * j for j in y))


def average_ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 1 for the smallest; equal values share the mean of their ranks."""
    if any(math.isnan(value) for value in values):
        raise ConfigError("a value is NaN, which has no rank: leave it out")
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for position in order[start:end]:
            ranks[position] = (start + end + 1) / 2.0
        start = end
    return ranks
