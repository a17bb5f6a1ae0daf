"""A strategy of your own: draft, then vote, and stop as soon as two drafts in a row agree.

python examples/10_own_strategy.py
"""

from typing import ClassVar

from rksc_agents import Outcome, Problem, RKSCReasoner, Strategy


class UntilTwoAgree(Strategy):
    """Draws one branch after the other until two in a row give the same answer.

    Parameters
    ----------
    most : int, default 6
        Branches at most.
    """

    name: ClassVar[str] = "until-two-agree"
    most: int = 6

    async def solve(self, problem: Problem) -> Outcome:
        """Draw until two agree; the surest branch wins where none do."""
        before: str | None = None
        for _ in range(self.most):
            async with problem.branching(await problem.start(1)) as ended:
                async for index, branch in ended:
                    if branch.answer is not None and branch.answer == before:
                        return Outcome(index, branch.answer)
                    before = branch.answer
        winner = problem.surest()
        return Outcome(winner, problem.branch(winner).answer)


with RKSCReasoner.from_pretrained() as reasoner:
    result = reasoner.reason("What is 9 + 8? Answer with a number.", strategy=UntilTwoAgree(), max_tokens=24, seed=0)
print(result.answer, "after", len(result.branches), "branches")
