"""Votes among branches: counting equivalent answers together, and telling when the count is settled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rksc_agents.errors import ConfigError
from rksc_agents.reasoning.equivalence import equivalent
from rksc_agents.types import Vote


@dataclass(slots=True)
class _Group:
    answer: str
    weights: dict[int, float]

    @property
    def weight(self) -> float:
        return math.fsum(self.weights.values())

    @property
    def earliest(self) -> int:
        return min(self.weights)

    @property
    def rank(self) -> tuple[float, int]:
        return (-self.weight, self.earliest)


class Ballot:
    """Counts the branches' answers as they arrive.

    An answer joins the first group whose answer is equivalent to it; the group keeps the spelling it began with.
    The heavier group leads, of equals the one with the earliest branch.

    Parameters
    ----------
    same : callable, default :func:`~rksc_agents.reasoning.equivalence.equivalent`
        Tells whether two answers say the same.
    """

    def __init__(self, same: Callable[[str, str], bool] = equivalent) -> None:
        self._same = same
        self._groups: list[_Group] = []
        self._branches: set[int] = set()

    @property
    def cast(self) -> int:
        """Branches that were counted, with those that abstained."""
        return len(self._branches)

    def add(self, branch: int, answer: str | None, weight: float = 1.0) -> None:
        """Count one branch.

        Parameters
        ----------
        branch : int
            The branch's index; each may vote once.
        answer : str or None
            Its answer; None abstains.
        weight : float, default 1.0
            What its vote counts, finite and not negative.
        """
        if branch in self._branches or branch < 0:
            raise ConfigError(
                f"branch {branch} has voted already or is negative: give each branch's index once, from 0"
            )
        if not (math.isfinite(weight) and weight >= 0.0):
            raise ConfigError(f"weight = {weight!r} of branch {branch}: give a finite number from 0")
        group = None
        if answer is not None:
            group = next((g for g in self._groups if g.answer == answer or self._same(g.answer, answer)), None)
            if group is None:
                group = _Group(answer, {})
                self._groups.append(group)
            group.weights[branch] = weight
        self._branches.add(branch)

    def standing(self) -> tuple[Vote, ...]:
        """Return the candidates, best first."""
        return tuple(
            Vote(answer=group.answer, weight=group.weight, branches=tuple(sorted(group.weights)))
            for group in self._ranked()
        )

    def decided(self, remaining: int, max_weight: float = 1.0) -> bool:
        """Tell whether `remaining` more votes of at most `max_weight` each can no longer change the winner.

        A rival that could draw level counts as a danger only if it would win the tie. The remaining votes may come
        from any branch from 0 that has not voted yet.

        False while nobody has voted. With confidence-weighted votes `max_weight` must bound the weights in use: see
        :func:`bounded_weight`.
        """
        if remaining < 0 or not (math.isfinite(max_weight) and max_weight >= 0.0):
            raise ConfigError(
                f"decided(remaining={remaining!r}, max_weight={max_weight!r}): remaining is a count from 0 and "
                "max_weight a finite number from 0"
            )
        ranked = self._ranked()
        if not ranked:
            return False
        leader = ranked[0]
        if remaining == 0:
            return True
        # of the indices that are still free the lowest wins the most ties
        next_branch = min(set(range(self.cast + remaining)) - self._branches)
        gain = math.fsum([max_weight] * remaining)
        # a new answer, or an old one that gets every vote that is left
        rivals = [(gain, next_branch)]
        rivals += [(math.fsum([group.weight, gain]), min(group.earliest, next_branch)) for group in ranked[1:]]
        return all(leader.rank < (-weight, earliest) for weight, earliest in rivals)

    def posterior(self) -> float:
        """Return the probability that the leading answer beats the runner-up in the long run.

        With `v1` and `v2` votes (numbers of branches, whatever their weights) this is P(p > 1/2) for
        p ~ Beta(v1 + 1, v2 + 1), the criterion of adaptive consistency (Aggarwal et al. 2023, arXiv 2305.11860).
        It is 1/2 without votes.
        """
        counts = [len(group.weights) for group in self._ranked()[:2]]
        first, second = (*counts, 0, 0)[:2]
        trials = first + second + 1
        # the tail of a Beta with whole parameters is that of a binomial: P(Bin(v1 + v2 + 1, 1/2) <= v1)
        return float(Fraction(sum(math.comb(trials, k) for k in range(first + 1)), 2**trials))

    def _ranked(self) -> list[_Group]:
        return sorted(self._groups, key=lambda group: group.rank)


def answer_keys(answers: Sequence[str | None], same: Callable[[str, str], bool] = equivalent) -> list[int]:
    """Number answers so that those that say the same have the same number; -1 for none."""
    ballot = Ballot(same)
    for index, answer in enumerate(answers):
        ballot.add(index, answer)
    keys = [-1] * len(answers)
    for vote in ballot.standing():
        for index in vote.branches:
            keys[index] = vote.branches[0]
    return keys


def softmax_weights(confidences: Sequence[float], temperature: float = 1.0) -> tuple[float, ...]:
    """Return the weights of a confidence-weighted vote (CISC, arXiv 2502.06233): a softmax that sums to 1.

    They are known only once the last branch has ended, since each depends on all. To stop early, vote with
    :func:`bounded_weight`, whose weights stand in the same proportions.

    Parameters
    ----------
    confidences : sequence of float
        One for each branch.
    temperature : float, default 1.0
        Small values listen to the surest branch, large values count all alike.
    """
    _require_temperature(temperature)
    for confidence in confidences:
        _require_confidence(confidence)
    if not confidences:
        return ()
    top = max(confidences)
    weights = [math.exp((confidence - top) / temperature) for confidence in confidences]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def bounded_weight(confidence: float, temperature: float = 1.0, ceiling: float = 1.0) -> float:
    """Return a weight in [0, 1] in proportion to the branch's share of the softmax, known as soon as it has ended.

    The softmax's denominator is the same for all branches, so it may be left out: ``exp((c - ceiling) / temperature)``
    ranks the candidates the same, and no weight exceeds 1, so ``Ballot.decided(remaining)`` holds with its default.

    Parameters
    ----------
    confidence : float
        The branch's confidence.
    temperature : float, default 1.0
        As in :func:`softmax_weights`.
    ceiling : float, default 1.0
        The largest confidence that the measure can give: 1 for "mean-top-probability", 0 for "mean-log-probability".
    """
    _require_temperature(temperature)
    _require_confidence(confidence)
    if not math.isfinite(ceiling) or confidence > ceiling + 1e-6:  # a probability in fp32 may round to just above 1
        raise ConfigError(
            f"confidence = {confidence!r} with ceiling = {ceiling!r}: the ceiling must be finite and no confidence "
            "above it; use softmax_weights at the end for a measure without a ceiling"
        )
    return math.exp(min(confidence - ceiling, 0.0) / temperature)


def _require_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0.0):
        raise ConfigError(f"temperature = {temperature!r} of a confidence-weighted vote: give a finite number above 0")


def _require_confidence(confidence: float) -> None:
    if not math.isfinite(confidence):
        raise ConfigError(f"confidence = {confidence!r}: a vote can only be weighted by finite numbers")
