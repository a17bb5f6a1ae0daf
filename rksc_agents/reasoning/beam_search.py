"""Beam search over steps of reasoning, guided by a step verifier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.strategy import Outcome, Strategy
from rksc_agents.reasoning.thoughts import Thoughts


class BeamSearch(Strategy):
    """Grow several lines a step at a time and keep the best; answer with the best line.

    A line's score is an aggregate of its steps' verdicts. Lines that have ended (the model or one of the request's own
    stop texts ended them, or they have `depth` steps) compete with the others as they are. Every step is verified:
    level 1 of early exit spares none, since the beam compares all of them.

    Parameters
    ----------
    beams : int, default 4
        Lines that are kept, 1 to 1024.
    expansions : int, default 4
        Steps proposed from each line, 1 to 256.
    depth : int, default 8
        Steps of a line at most, 1 to 256; the delimiter does not end the last one.
    delimiter : str, default a line break
        What ends a step.
    step_tokens : int, default 64
        Tokens of a step at most; a longer one goes on as the next step. For the last step the request's `max_tokens`
        holds.
    aggregate : "mean", "product", "min" or "last", default "mean"
        How the scores of a line's steps make its own.
    dedupe : bool, default True
        Whether equal steps of one line (but for white space and case) are one.

    Examples
    --------
    >>> reasoner.reason("Q", strategy=BeamSearch(beams=2, expansions=2, depth=1)).answer
    '4'
    """

    name: ClassVar[str] = "beam-search"

    beams: int = Field(default=4, ge=1, le=1024)
    expansions: int = Field(default=4, ge=1, le=256)
    depth: int = Field(default=8, ge=1, le=256)
    delimiter: str = Field(default="\n", min_length=1)
    step_tokens: int = Field(default=64, ge=1)
    aggregate: Literal["mean", "product", "min", "last"] = "mean"
    dedupe: bool = True

    async def solve(self, problem: Problem) -> Outcome:
        tree = Thoughts(problem, self.delimiter, self.step_tokens, self.depth, self.dedupe)
        steps: dict[int, float] = {}  # each thought's own score; the tree has those of whole lines
        ended: list[int] = []
        growing: Sequence[int | None] = [None]
        while growing:
            grown = await tree.grow(growing, self.expansions)
            await tree.verify(grown)
            steps |= {index: tree.scores[index] for index in grown}
            tree.scores |= {index: self._of_line([steps[at] for at in problem.line(index)]) for index in grown}
            pool = [*ended, *grown]
            best = tree.keep(tree.ranked(pool)[: self.beams], pool)
            ended = [index for index in best if tree.is_leaf(index)]
            growing = [index for index in best if index not in ended]
        winner = tree.ranked(ended)[0] if ended else tree.deepest()
        return Outcome(winner, problem.branch(winner).answer, rule="verifier")

    def _of_line(self, scores: Sequence[float]) -> float:
        match self.aggregate:
            case "mean":
                return math.fsum(scores) / len(scores)
            case "product":
                return math.prod(scores)
            case "min":
                return min(scores)
            case "last":
                return scores[-1]
