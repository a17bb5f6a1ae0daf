"""Room for KV: the tree, the budget, and what running work has been promised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rksc_agents.cache.budget import Budget
from rksc_agents.cache.tree import Node
from rksc_agents.engine.cursor import Cursor
from rksc_agents.engine.ledger import Ledger
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

    # -- what a request holds -------------------------------------------------------------------

    def saw(self, ledger: Ledger, ends: Sequence[Node], beside: int) -> None:
        """Note that a request holds the paths to `ends` now, and `beside` more bytes."""
        nodes = self.on_paths(ends)
        held = self.bytes_of(nodes) + beside
        shared = 0
        if self.runner.shares:
            shared = sum(end.end for end in ends) - sum(len(node.tokens) for node in nodes)
        ledger.saw(held, held + shared * self.runner.token_bytes, shared, self.budget.held)

    def path_bytes(self, cursors: Sequence[Cursor]) -> int:
        """Bytes of the KV behind sequences, each shared token once, whether it is held now or evicted."""
        if not self.runner.splittable:  # nodes hold states too, so only what is there can be told
            return self.bytes_of(self.on_paths([cursor.node for cursor in cursors]))
        tokens = 0
        before: tuple[int, ...] = ()
        for sequence in sorted({cursor.tokens for cursor in cursors}):
            common = next((i for i, pair in enumerate(zip(before, sequence, strict=False)) if pair[0] != pair[1]), None)
            tokens += len(sequence) - (min(len(before), len(sequence)) if common is None else common)
            before = sequence
        return tokens * self.runner.token_bytes

    @staticmethod
    def on_paths(ends: Iterable[Node]) -> list[Node]:
        """The nodes on the paths to `ends`, each once."""
        return list({id(node): node for end in ends for node in end.path()}.values())

    @staticmethod
    def bytes_of(nodes: Iterable[Node]) -> int:
        """Bytes that nodes hold."""
        return sum(node.payload.nbytes for node in nodes if node.payload is not None)
