"""Best of n: score every branch, keep the best."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field

from rksc_agents.errors import ConfigError
from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.strategy import Outcome, Strategy
from rksc_agents.types import Branch


class BestOfN(Strategy):
    """Answer with the branch that scores best; the earliest of equals.

    Parameters
    ----------
    branches : int, default 8
        Branches to draw, 1 to 1024.
    score : "confidence", "verifier" or callable, default "confidence"
        What is compared: the branch's confidence, its verdict's score (verification is skipped where one branch is
        decisively confident), or what a function of the :class:`~rksc_agents.types.Branch` returns. The function runs
        outside the engine's thread.

    Examples
    --------
    >>> reasoner.reason("Q", strategy=BestOfN(branches=2)).answer
    '4'
    """

    name: ClassVar[str] = "best-of-n"

    branches: int = Field(default=8, ge=1, le=1024)
    score: Literal["confidence", "verifier"] | Callable[[Branch], float] = "confidence"

    async def solve(self, problem: Problem) -> Outcome:
        async with problem.branching(await problem.start(self.branches)) as ended:
            async for _ in ended:
                pass
        if self.score == "verifier":
            return await self._verified(problem)
        scores = await asyncio.gather(*(self._score(problem, branch) for branch in problem.branches))
        winner = max(range(len(scores)), key=lambda i: (scores[i], -i))
        return Outcome(
            winner, problem.branches[winner].answer, rule="confidence" if self.score == "confidence" else None
        )

    async def _verified(self, problem: Problem) -> Outcome:
        verdicts = await problem.verify(range(len(problem.branches)))
        scores = {index: verdict.score for index, verdict in enumerate(verdicts) if verdict.score is not None}
        if scores:
            winner, rule = max(scores, key=lambda i: (scores[i], -i)), "verifier"
        else:  # one branch was decisively confident, or there was no room to ask
            winner, rule = problem.surest(), "confidence"
        return Outcome(winner, problem.branches[winner].answer, rule=rule)

    async def _score(self, problem: Problem, branch: Branch) -> float:
        if not callable(self.score):
            return branch.confidence
        value = float(await problem.session.call(self.score, branch))
        if math.isnan(value):
            raise ConfigError("BestOfN.score returned NaN, which cannot be compared: return a finite number")
        return value
