"""Tree of thought: search over steps of reasoning instead of whole answers (Yao et al. 2023, arXiv 2305.10601)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from rksc_agents.engine.work import all_of
from rksc_agents.errors import ConfigError
from rksc_agents.events import VoteChanged
from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.strategy import Outcome, Strategy
from rksc_agents.reasoning.thoughts import Thoughts
from rksc_agents.reasoning.voting import bounded_weight, softmax_weights
from rksc_agents.types import Vote
from rksc_agents.verify.confidence import ceiling

_TEMPERATURE = 0.1  # of the softmax where leaves vote by confidence, as in self-consistency


class TreeOfThought(Strategy):
    """Propose several next steps, judge them, go on from the good ones; answer with the best line.

    A step is what the model writes up to the delimiter. A line ends where the model or one of the request's own stop
    texts ends it, or with its `depth`-th step, which the delimiter does not end: what ended is a leaf. Blank steps are
    given up. Proposals are drawn, so at temperature 0 all from one parent are equal.

    Parameters
    ----------
    proposals : int, default 4
        Steps proposed from each thought, 1 to 256.
    breadth : int, default 4
        "bfs": thoughts kept in each level. "dfs", "best-first": leaves after which the search ends; those scored
        under `threshold` do not count.
    depth : int, default 4
        Steps of a line at most, 1 to 256.
    search : "bfs", "dfs" or "best-first", default "bfs"
        "bfs" goes on from the best of each level (the paper's algorithm 1). "dfs" goes on from the best step and
        comes back for the next best where none is left (algorithm 2). "best-first" goes on from the best step
        anywhere in the tree.
    delimiter : str, default a line break
        What ends a step.
    step_tokens : int, default 64
        Tokens of a step at most; a longer one goes on as the next step. For the last step the request's `max_tokens`
        holds.
    evaluator : "verifier", "vote" or "confidence", default "verifier"
        What scores a thought: its verdict; 1 for the one that the model names among those of its parent, 0 for the
        others (their confidence, with a warning, where they do not fit the model's context); or its own confidence.
        Leaves of a "bfs" are judged together at the end, where level 1 of early exit may spare them.
    threshold : float, default 0.0
        Steps scored under it are given up.
    dedupe : bool, default True
        Whether equal thoughts of one parent (but for white space and case) are one.
    final : "best" or "vote", default "best"
        What the leaves' scores decide: the best leaf, or a vote over their answers in which each counts its score (by
        "confidence", its share of a softmax). Without answers the best leaf wins.
    budget : int or None, default None
        "dfs", "best-first": thoughts after which the search ends; None is proposals x breadth x depth, which at a
        breadth of 1 leaves none to come back with.

    Raises
    ------
    ConfigError
        If a value is outside its range, or no score could reach the threshold.

    Examples
    --------
    >>> reasoner.reason("Q", strategy=TreeOfThought(proposals=2, breadth=1, depth=1)).answer
    '4'
    """

    name: ClassVar[str] = "tree-of-thought"

    proposals: int = Field(default=4, ge=1, le=256)
    breadth: int = Field(default=4, ge=1, le=1024)
    depth: int = Field(default=4, ge=1, le=256)
    search: Literal["bfs", "dfs", "best-first"] = "bfs"
    delimiter: str = Field(default="\n", min_length=1)
    step_tokens: int = Field(default=64, ge=1)
    evaluator: Literal["verifier", "vote", "confidence"] = "verifier"
    threshold: float = Field(default=0.0, allow_inf_nan=False)
    dedupe: bool = True
    final: Literal["best", "vote"] = "best"
    budget: int | None = Field(default=None, ge=1)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.threshold >= self._perfect and not self.threshold == self._perfect == 1.0:
            raise ConfigError(
                f"TreeOfThought.threshold = {self.threshold} with evaluator = {self.evaluator!r}: no score is above "
                f"{self._perfect}, so give a threshold under it"
            )
        if self.budget is not None and self.search == "bfs":
            raise ConfigError(
                f"TreeOfThought.budget = {self.budget} with search = 'bfs', which proposals, breadth and depth bound: "
                "leave it out, or take 'dfs' or 'best-first'"
            )

    @property
    def _perfect(self) -> float:
        """The best score there is."""
        return ceiling(self.measure) if self.evaluator == "confidence" else 1.0

    async def solve(self, problem: Problem) -> Outcome:
        search = _Search(self, problem)
        leaves = await (search.by_level() if self.search == "bfs" else search.by_thought())
        return await search.decide(leaves)


class _Search:
    """One search."""

    def __init__(self, strategy: TreeOfThought, problem: Problem) -> None:
        self.strategy = strategy
        self.problem = problem
        self.tree = Thoughts(problem, strategy.delimiter, strategy.step_tokens, strategy.depth, strategy.dedupe)
        self._warned = False

    # -- searching ------------------------------------------------------------------------------

    async def by_level(self) -> list[int]:
        """Breadth first; return the leaves, not judged yet."""
        tree, leaves = self.tree, list[int]()
        frontier: Sequence[int | None] = [None]
        while frontier:
            grown = await tree.grow(frontier, self.strategy.proposals)
            leaves += (ended := [index for index in grown if tree.is_leaf(index)])
            steps = [index for index in grown if index not in ended]
            await self._evaluate(steps)
            frontier = tree.keep(self._promising(steps)[: self.strategy.breadth], steps)
        return leaves

    async def by_thought(self) -> list[int]:
        """Depth first or best first; return the leaves, all judged."""
        tree, strategy = self.tree, self.strategy
        left = strategy.budget or strategy.proposals * strategy.breadth * strategy.depth
        leaves, good = list[int](), 0
        stack: list[int | None] = [None]  # the next one last
        while stack and left > 0 and good < strategy.breadth:
            before = len(self.problem.branches)
            grown = await tree.grow([stack.pop()], min(strategy.proposals, left))
            left -= len(self.problem.branches) - before
            await self._evaluate(grown)
            ended = [index for index in grown if tree.is_leaf(index)]
            steps = [index for index in grown if index not in ended]
            leaves += ended
            good += len(self._promising(ended))
            if self._settled(ended):
                break
            new = tree.keep(self._promising(steps), steps)
            if strategy.search == "best-first":
                new = tree.ranked([*new, *(index for index in stack if index is not None)])
                stack.clear()
            stack += reversed(new)
        return leaves

    def _settled(self, leaves: Sequence[int]) -> bool:
        """Whether no later leaf can beat one of these; the named one of a family is only the best of its family."""
        first = self.strategy.final == "best" and self.strategy.evaluator != "vote"
        return first and any(self.tree.scores[index] >= self.strategy._perfect for index in leaves)

    def _promising(self, indices: Sequence[int]) -> list[int]:
        return [index for index in self.tree.ranked(indices) if self.tree.scores[index] >= self.strategy.threshold]

    # -- judging --------------------------------------------------------------------------------

    async def _evaluate(self, indices: Sequence[int]) -> None:
        if self.strategy.evaluator == "verifier":
            await self.tree.verify(indices)
            return
        if self.strategy.evaluator == "vote":
            families: dict[int | None, list[int]] = {}
            for index in indices:
                families.setdefault(self.problem.branch(index).parent, []).append(index)
            await all_of([self._name_best(family) for family in families.values()])
        else:
            self._by_confidence(indices)
        for index in indices:
            self.problem.session.score(self.problem.cursors[index], self._worth(self.tree.scores[index]))

    def _by_confidence(self, indices: Sequence[int]) -> None:
        self.tree.scores |= {index: self.problem.branch(index).confidence for index in indices}

    def _worth(self, score: float) -> float:
        """A score as a number from 0 to 1, in the same order."""
        top = self.strategy._perfect
        if top == 1.0:
            return min(max(score, 0.0), 1.0)
        return bounded_weight(score, 1.0, top) if math.isfinite(top) else max(score, 0.0) / (1.0 + max(score, 0.0))

    async def _name_best(self, family: Sequence[int]) -> bool:
        """Have the model name one of the lines that end in these thoughts; false where it could not."""
        texts = [self.problem.text_of(index) for index in family]
        named = 0 if len(family) == 1 else await self.problem.name_best(texts)
        if named is not None:
            self.tree.scores |= {index: float(at == named) for at, index in enumerate(family)}
            return True
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{len(family)} thoughts do not fit the model's context, so they were judged by their confidence: take "
                "fewer proposals or smaller step_tokens, or set evaluator='verifier'",
                stacklevel=2,
            )
        self._by_confidence(family)
        return False

    # -- deciding -------------------------------------------------------------------------------

    async def decide(self, leaves: Sequence[int]) -> Outcome:
        """The winner among the leaves; the best of the deepest thoughts where there are none."""
        problem = self.problem
        if not leaves:
            winner = self.tree.deepest()
            return Outcome(winner, problem.branch(winner).answer, rule=self.strategy.evaluator)
        rule = await self._judge(leaves)
        if self.strategy.final == "vote" and rule == self.strategy.evaluator:
            votes = await problem.session.call(self._count, leaves)
            if votes:
                if problem.emit is not None:
                    problem.emit(VoteChanged(votes))
                return Outcome(self._best(votes[0].branches), votes[0].answer, votes, "majority")
        winner = self._best(leaves) if rule == self.strategy.evaluator else problem.surest(leaves)
        return Outcome(winner, problem.branch(winner).answer, rule=rule)

    async def _judge(self, leaves: Sequence[int]) -> str:
        """Score the leaves; return the rule by which they compare."""
        if self.strategy.evaluator == "vote":
            return "vote" if await self._name_best(leaves) else "confidence"
        if self.strategy.evaluator == "confidence":
            self._by_confidence(leaves)
        elif new := [index for index in leaves if index not in self.tree.scores]:
            verdicts = await self.problem.verify(new)
            if any(verdict.score is None for verdict in verdicts):  # one leaf was decisively confident
                return "confidence"
            self.tree.scores |= {index: verdict.score or 0.0 for index, verdict in zip(new, verdicts, strict=True)}
        return self.strategy.evaluator

    def _best(self, leaves: Sequence[int]) -> int:
        branch = self.problem.branch
        return max(leaves, key=lambda index: (self.tree.scores[index], branch(index).confidence, -index))

    def _count(self, leaves: Sequence[int]) -> tuple[Vote, ...]:
        heard = self._promising(leaves) or list(leaves)
        weights: Sequence[float] = [self.tree.scores[index] for index in heard]
        if self.strategy.evaluator == "confidence":
            weights = softmax_weights(weights, _TEMPERATURE)
        ballot = self.problem.ballot()
        for index, weight in zip(heard, weights, strict=True):
            ballot.add(index, self.problem.branch(index).answer, weight)
        return ballot.standing()
