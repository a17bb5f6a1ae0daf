"""Self-consistency: sample several branches and vote (Wang et al. 2022, arXiv 2203.11171)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from rksc_agents.engine.jobs import Doubt
from rksc_agents.errors import ConfigError
from rksc_agents.events import VoteChanged
from rksc_agents.reasoning.doubt import doubt_under, quantile
from rksc_agents.reasoning.hints import Place, hinted
from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.rules import by_closeness, by_confidence, by_count, by_name, by_verdict, candidates
from rksc_agents.reasoning.strategy import Outcome, Strategy
from rksc_agents.reasoning.voting import Ballot, bounded_weight
from rksc_agents.types import Branch, Prompt
from rksc_agents.verify.confidence import ceiling


class SelfConsistency(Strategy):
    """Sample branches from one prefix and answer with the vote's winner.

    Parameters
    ----------
    branches : int, default 8
        Branches at most, 1 to 1024.
    vote : str, default "auto"
        The rule that decides; the result's `rule` names the one that did.

        - "majority": each branch counts 1 for its answer.
        - "confidence": each counts its share of a softmax over the branches' confidences (CISC, arXiv 2502.06233).
        - "verifier": each counts its verdict's score; by confidence where verification was skipped.
        - "mbr": minimum Bayes risk, the text that is closest to the others; needs no answer to count.
        - "universal": the model reads the texts and names the most consistent one (arXiv 2311.17311); "mbr", with a
          warning, where they do not fit its context.
        - "auto": majority where at least two branches give the same answer, else "mbr" with the texts weighted by
          confidence.

        A majority or confidence vote without any answer takes the surest branch, by "confidence".
    stop : "decided", float or None, default "decided"
        When to stop the branches that still run: once the vote cannot change any more, once the leader is the
        true majority with this posterior probability (adaptive consistency, Aggarwal et al. 2023), or never.
        "decided" and None give the same answer. A confidence vote by a measure without a ceiling, such as
        self-certainty, is known only at the end and is never decided early. An "auto" vote stops for an answer that
        two branches gave; "verifier", "mbr" and "universal" wait for all.
    first : int or None, default None
        Start with this many branches and add as many again while the vote is open. None starts all at once, which
        is quicker where a batch costs little more than one branch.
    vote_temperature : float, default 0.1
        Temperature of the softmax over confidences.
    warmup : int or None, default None
        Let this many branches run to their end, and end each later one as "unsure" once its confidence so far falls
        under the threshold that they set (DeepConf online, arXiv 2508.15260). Unsure branches do not vote. At least 2
        and below `branches`; not together with `first`. None lets all run.
    keep : float, default 0.9
        The share of the warm-up's confidences above the threshold, in (0, 1): it is their (1 - `keep`) quantile.
    hints : tuple of str, default ()
        Lines such as "Think step by step." that send branches different ways: they take each phrasing of the question
        with each hint in turn. An empty text is the question without a hint.
    hint_place : "before" or "after", default "after"
        Where a hint goes. After the question, branches share the question's KV exactly; before it, only as far as
        `sharing` lets them.

    Examples
    --------
    >>> reasoner.reason("Q", strategy=SelfConsistency(branches=4, stop=None)).votes[0].weight
    4.0
    """

    name: ClassVar[str] = "self-consistency"

    branches: int = Field(default=8, ge=1, le=1024)
    vote: Literal["auto", "majority", "confidence", "verifier", "mbr", "universal"] = "auto"
    stop: Literal["decided"] | float | None = Field(default="decided")
    first: int | None = Field(default=None, ge=1)
    vote_temperature: float = Field(default=0.1, gt=0.0)
    warmup: int | None = Field(default=None, ge=2)
    keep: float = Field(default=0.9, gt=0.0, lt=1.0)
    hints: tuple[str, ...] = ()
    hint_place: Place = "after"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if isinstance(self.stop, float) and not 0.5 < self.stop < 1.0:
            raise ConfigError(f"SelfConsistency.stop = {self.stop}: give a probability above 0.5 and below 1")
        if self.warmup is not None and self.warmup >= self.branches:
            raise ConfigError(
                f"SelfConsistency.warmup = {self.warmup} with branches = {self.branches}: give a number from 2 that "
                "leaves branches to stop, or more branches"
            )
        if self.warmup is not None and self.first is not None:
            raise ConfigError(
                f"SelfConsistency.warmup = {self.warmup} and first = {self.first}: give one of the two, both say how "
                "many branches start"
            )

    def prompts(self, question: Prompt, phrasings: Sequence[Prompt]) -> list[Prompt]:
        """Each phrasing of the question with each hint."""
        plain = super().prompts(question, phrasings)
        return [hinted(prompt, hint, self.hint_place) for prompt in plain for hint in self.hints] or plain

    async def solve(self, problem: Problem) -> Outcome:
        ballot = problem.ballot()
        doubt = None
        while len(problem.branches) < self.branches and not self._settled(ballot):
            wave = await problem.start(self._wave(len(problem.branches)))
            async with problem.branching(wave, doubt) as ended:
                async for index, branch in ended:
                    await self._count(problem, ballot, index, branch)
                    if self._settled(ballot):
                        break
            doubt = self._doubt(problem)
        outcome = await self._decide(problem, ballot)
        if problem.emit is not None and outcome.votes != ballot.standing():
            problem.emit(VoteChanged(outcome.votes))
        return outcome

    def _wave(self, so_far: int) -> int:
        """How many branches start now."""
        size = self.first or (self.warmup if so_far == 0 else None) or self.branches
        return min(size, self.branches - so_far)

    async def _count(self, problem: Problem, ballot: Ballot, index: int, branch: Branch) -> None:
        if self.vote in ("majority", "confidence", "auto"):
            await problem.session.call(ballot.add, index, branch.answer, self._weight(branch))
            problem.voted(ballot)

    async def _decide(self, problem: Problem, ballot: Ballot) -> Outcome:
        """The winner by the rule that `vote` names."""
        match self.vote:
            case "majority":
                return by_count(problem, ballot, "majority")
            case "confidence":
                if self._bounded:
                    return by_count(problem, ballot, "confidence")
                return await by_confidence(problem, self.vote_temperature)
            case "verifier":
                return await by_verdict(problem, self.vote_temperature)
            case "universal":
                return await by_name(problem)
            case "mbr":
                return await by_closeness(problem)
            case "auto":
                if self.branches == 1:  # nothing to compare
                    return Outcome(0, problem.branches[0].answer, ballot.standing())
                if _agreed(ballot):
                    return by_count(problem, ballot, "majority")
                return await by_closeness(problem, self.vote_temperature)

    @property
    def _bounded(self) -> bool:
        return math.isfinite(ceiling(self.measure))

    def _weight(self, branch: Branch) -> float:
        if self.vote != "confidence" or not self._bounded:
            return 1.0
        return bounded_weight(branch.confidence, self.vote_temperature, ceiling(self.measure))

    def _settled(self, ballot: Ballot) -> bool:
        if self.stop is None or ballot.cast == 0 or (self.vote == "auto" and not _agreed(ballot)):
            return False
        if self.stop == "decided":
            known = self.vote != "confidence" or self._bounded
            return known and ballot.decided(self.branches - ballot.cast)
        return ballot.posterior() >= self.stop

    def _doubt(self, problem: Problem) -> Doubt | None:
        """What ends the branches after the warm-up."""
        if self.warmup is None:
            return None
        sureness = [problem.branches[i].confidence for i in candidates(problem)]
        return doubt_under(self.measure, quantile(sureness, 1.0 - self.keep))


def _agreed(ballot: Ballot) -> bool:
    """Whether two branches or more gave the leading answer."""
    votes = ballot.standing()
    return bool(votes) and len(votes[0].branches) > 1
