"""Room for KV: the tree, the budget, and what running work has been promised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rksc_agents.cache.budget import Budget
from rksc_agents.cache.tree import Node
from rksc_agents.model.protocol import Runner, RunningTail

Verdict = Literal["running", "failed", "later", "full"]
"""What came of a job that asked to run: "later" waits for another job, "full" for bytes or rows."""


class Space:
    """The KV tree of a runner under its budget.

    Work is admitted only when the KV it may need at most can be held, so it never has to stop for lack of memory.
    """

    def __init__(self, runner: Runner, budget: Budget) -> None:
        self.runner = runner
        self.budget = budget
        self.tree = runner.tree()

    def reserve(self, bases: Sequence[Node], nbytes: int) -> bool:
        """Pin `bases` and promise bytes to new work if they can be had, by eviction if need be; else do nothing."""
        for base in bases:
            self.tree.pin(base)
        budget = self.budget
        if budget.held - self.tree.evictable() + budget.promised + nbytes <= budget.limit:
            budget.promise(nbytes)
            return True
        for base in bases:
            self.tree.unpin(base)
        return False

    def tail(self, bases: Sequence[Node], most: int, promised: int) -> RunningTail:
        """A tail for rows after `bases`, with room for what it holds from the start."""
        self.make_room(min(promised, self.runner.most_bytes([base.end for base in bases], 0)))
        return self.runner.tail(bases, most, promised)

    def grow(self, tail: RunningTail, tokens: int) -> None:
        """Let a tail take `tokens` more tokens per row, of the bytes it was promised."""
        self.make_room(tail.growth(tokens))
        tail.grow(tokens)

    def make_room(self, nbytes: int) -> None:
        """Evict until `nbytes` more can be held."""
        self.tree.evict(self.budget.missing(nbytes))
