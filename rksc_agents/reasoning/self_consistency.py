"""Self-consistency: sample several branches and vote (Wang et al. 2022, arXiv 2203.11171)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from rksc_agents.errors import ConfigError
from rksc_agents.reasoning.strategy import Outcome, Problem, Strategy
from rksc_agents.reasoning.voting import Ballot, bounded_weight, softmax_weights
from rksc_agents.types import Branch
from rksc_agents.verify.confidence import ceiling


class SelfConsistency(Strategy):
    """Sample branches from one prefix and answer with the vote's winner.

    Parameters
    ----------
    branches : int, default 8
        Branches at most, 1 to 1024.
    vote : "majority" or "confidence", default "majority"
        Each branch counts 1, or its share of a softmax over the branches' confidences (CISC, arXiv 2502.06233).
    stop : "decided", float or None, default "decided"
        When to stop the branches that still run: once the vote cannot change any more, once the leader is the
        true majority with this posterior probability (adaptive consistency, Aggarwal et al. 2023), or never.
        "decided" and None give the same answer. A confidence vote by a measure without a ceiling, such as
        self-certainty, is known only at the end and is never decided early.
    first : int or None, default None
        Start with this many branches and add as many again while the vote is open. None starts all at once, which
        is quicker where a batch costs little more than one branch.
    vote_temperature : float, default 0.1
        Temperature of the softmax of a confidence vote.
    """

    name: ClassVar[str] = "self-consistency"

    branches: int = Field(default=8, ge=1, le=1024)
    vote: Literal["majority", "confidence"] = "majority"
    stop: Literal["decided"] | float | None = Field(default="decided")
    first: int | None = Field(default=None, ge=1)
    vote_temperature: float = Field(default=0.1, gt=0.0)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if isinstance(self.stop, float) and not 0.5 < self.stop < 1.0:
            raise ConfigError(f"SelfConsistency.stop = {self.stop}: give a probability above 0.5 and below 1")

    async def solve(self, problem: Problem) -> Outcome:
        root = await problem.prefill()
        ballot = Ballot()
        while len(problem.branches) < self.branches and not self._settled(ballot):
            wave = min(self.first or self.branches, self.branches - len(problem.branches))
            async with problem.branching(problem.session.fork(root, wave)) as ended:
                async for index, branch in ended:
                    await problem.session.call(ballot.add, index, branch.answer, self._weight(branch))
                    problem.voted(ballot)
                    if self._settled(ballot):
                        break
        if self.vote == "confidence" and not self._bounded:
            ballot = await problem.session.call(self._weighted_at_the_end, problem.branches)
            problem.voted(ballot)
        votes = ballot.standing()
        if not votes:  # no branch gave an answer that could be counted
            return Outcome(problem.surest(), None)
        return Outcome(problem.surest(votes[0].branches), votes[0].answer, votes)

    @property
    def _bounded(self) -> bool:
        return math.isfinite(ceiling(self.measure))

    def _weight(self, branch: Branch) -> float:
        if self.vote == "majority" or not self._bounded:
            return 1.0
        return bounded_weight(branch.confidence, self.vote_temperature, ceiling(self.measure))

    def _settled(self, ballot: Ballot) -> bool:
        if self.stop is None or ballot.cast == 0:
            return False
        if self.stop == "decided":
            known = self.vote == "majority" or self._bounded
            return known and ballot.decided(self.branches - ballot.cast)
        return ballot.posterior() >= self.stop

    def _weighted_at_the_end(self, branches: Sequence[Branch]) -> Ballot:
        ended = [(i, branch) for i, branch in enumerate(branches) if branch.finish_reason != "cancelled"]
        weights = softmax_weights([branch.confidence for _, branch in ended], self.vote_temperature)
        ballot = Ballot()
        for (index, branch), weight in zip(ended, weights, strict=True):
            ballot.add(index, branch.answer, weight)
        return ballot
