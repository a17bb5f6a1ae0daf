"""A tree of thoughts: growing it step by step, and giving up what leads nowhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from rksc_agents.engine.cursor import Cursor
from rksc_agents.engine.work import all_of
from rksc_agents.reasoning.problem import Problem
from rksc_agents.types import Branch


@dataclass(eq=False)
class Thoughts:
    """The thoughts of one problem. A thought is a branch that goes on from its parent until the next delimiter.

    Attributes
    ----------
    problem : Problem
        What is to be solved.
    delimiter : str
        What ends a step, besides the model and the request's own stop texts. Those end the line.
    step_tokens : int
        Tokens of a step at most; a longer one goes on as the next step.
    depth : int
        Thoughts of a line at most; in the last one nothing but the request's own settings ends it.
    dedupe : bool
        Whether equal thoughts of one parent are one.
    scores : dict of int to float
        How good the thoughts are, of those that were judged.
    """

    problem: Problem
    delimiter: str
    step_tokens: int
    depth: int
    dedupe: bool = True
    scores: dict[int, float] = field(default_factory=dict)

    async def grow(self, parents: Sequence[int | None], proposals: int) -> list[int]:
        """Propose next thoughts from each parent, all of one depth, and give the parents up.

        Each parent's thoughts (at the prompt, each phrasing's) are a job of their own, so a small KV budget takes
        them one after the other.

        Parameters
        ----------
        parents : sequence of int or None
            Branches; None stands for the prompt.
        proposals : int
            Thoughts from each.

        Returns
        -------
        list of int
            The new thoughts, without blank and equal ones, by index.
        """
        problem = self.problem
        above = next((problem.branch(p).depth + 1 for p in parents if p is not None), 0)
        own = problem.settings.sampling
        stop = (self.delimiter, *own.stop)
        sampling = own if above + 1 >= self.depth else own.replace(stop=stop, max_tokens=self.step_tokens)
        first = len(problem.branches)
        starts = await problem.start(proposals) if None in parents else []
        families: list[tuple[int | None, list[Cursor]]] = [(None, [start]) for start in starts]
        if len(problem.prompts) == 1 and starts:
            families = [(None, starts)]
        families += [(p, [problem.cursors[p]] * proposals) for p in parents if p is not None]
        async with AsyncExitStack() as blocks:
            runs = []
            for parent, cursors in families:  # the order in which they are entered settles indices and random numbers
                block = problem.branching(cursors, parents=[parent] * len(cursors), sampling=sampling)
                runs.append(await blocks.enter_async_context(block))
            await all_of([_drain(run) for run in runs])
        for start in starts:
            problem.session.release(start)
        for parent in parents:
            if parent is not None:
                problem.drop(parent)
        return self._sifted(range(first, len(problem.branches)))

    def _sifted(self, indices: Sequence[int]) -> list[int]:
        branches = self.problem.branches
        seen: set[tuple[int | None, bool, str]] = set()
        kept: list[int] = []
        for index in indices:
            branch, leaf = branches[index], self.is_leaf(index)
            words = f"{branch.thinking} {branch.text}".casefold().split()
            key = (branch.parent, leaf, " ".join(words))
            if (words or leaf) and not (self.dedupe and key in seen):
                kept.append(index)
                seen.add(key)
            else:
                self.problem.drop(index)
        return kept

    def is_leaf(self, index: int) -> bool:
        """Whether nothing goes on from a thought: its line has ended, or has no room for more."""
        branch = self.problem.branch(index)
        full = branch.depth + 1 >= self.depth or len(self.problem.cursors[index].tokens) >= self.problem.session.context
        return full or self.problem.complete(index)

    async def verify(self, indices: Sequence[int]) -> None:
        """Score thoughts by their verdicts; leaves as finished lines, and whatever their confidence."""
        leaves = [index for index in indices if self.is_leaf(index)]
        steps = [index for index in indices if index not in leaves]
        for each, finished in ((steps, False), (leaves, True)):
            if each:
                verdicts = await self.problem.verify(each, finished=finished, gate=False)
                self.scores |= {i: verdict.score or 0.0 for i, verdict in zip(each, verdicts, strict=True)}

    def ranked(self, indices: Sequence[int]) -> list[int]:
        """Best score first, of equals the earliest."""
        return sorted(indices, key=lambda index: (-self.scores[index], index))

    def keep(self, indices: Sequence[int], among: Sequence[int]) -> list[int]:
        """Give up the other thoughts `among` which `indices` are; return `indices`."""
        for index in among:
            if index not in indices:
                self.problem.drop(index)
        return list(indices)

    def deepest(self) -> int:
        """The best of the deepest thoughts: the answer where no line came to its end."""
        branches = self.problem.branches
        judged = list(self.scores) or range(len(branches))
        return max(judged, key=lambda i: (branches[i].depth, self.scores.get(i, 0.0), branches[i].confidence, -i))


async def _drain(run: AsyncIterator[tuple[int, Branch]]) -> None:
    async for _ in run:
        pass
