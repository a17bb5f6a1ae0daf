"""One branch: what a plain chat model does."""

from __future__ import annotations

from typing import ClassVar

from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.strategy import Outcome, Strategy


class Direct(Strategy):
    """Answer with a single branch.

    Examples
    --------
    >>> len(reasoner.reason("Q", strategy=Direct()).branches)
    1
    """

    name: ClassVar[str] = "direct"

    async def solve(self, problem: Problem) -> Outcome:
        async with problem.branching(await problem.start(1)) as ended:
            async for _, branch in ended:
                answer = branch.answer
        return Outcome(0, answer)
