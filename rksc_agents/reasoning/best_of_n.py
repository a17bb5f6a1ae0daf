"""Best of n: score every branch, keep the best."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field

from rksc_agents.errors import ConfigError
from rksc_agents.reasoning.strategy import Outcome, Problem, Strategy
from rksc_agents.types import Branch


class BestOfN(Strategy):
    """Answer with the branch that scores best; the earliest of equals.

    Parameters
    ----------
    branches : int, default 8
        Branches to draw, 1 to 1024.
    score : "confidence" or callable, default "confidence"
        What is compared: the branch's confidence, or what a function of the :class:`~rksc_agents.types.Branch`
        returns. The function runs outside the engine's thread.
    """

    name: ClassVar[str] = "best-of-n"

    branches: int = Field(default=8, ge=1, le=1024)
    score: Literal["confidence"] | Callable[[Branch], float] = "confidence"

    async def solve(self, problem: Problem) -> Outcome:
        root = await problem.prefill()
        async with problem.branching(problem.session.fork(root, self.branches)) as ended:
            async for _ in ended:
                pass
        scores = await asyncio.gather(*(self._score(problem, branch) for branch in problem.branches))
        winner = max(range(len(scores)), key=lambda i: (scores[i], -i))
        return Outcome(winner, problem.branches[winner].answer)

    async def _score(self, problem: Problem, branch: Branch) -> float:
        if self.score == "confidence":
            return branch.confidence
        value = float(await problem.session.call(self.score, branch))
        if math.isnan(value):
            raise ConfigError("BestOfN.score returned NaN, which cannot be compared: return a finite number")
        return value
