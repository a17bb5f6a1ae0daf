"""Prompts that take KV from another prompt at other positions: ASKS, mode "aligned".

Like a probe, a transplant lives within one step. What the tree has exactly is shared exactly; of the rest, runs of
tokens that the source has too take its keys and values, the keys rotated to their new positions, and the tokens
between them are computed in one pass. The result is good for this prompt alone, so it becomes a private node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rksc_agents.cache.store import KV, Segment
from rksc_agents.cache.tree import Node
from rksc_agents.engine.cursor import Cursor, Graft
from rksc_agents.engine.ledger import Ledger
from rksc_agents.engine.space import Space, Verdict
from rksc_agents.model.plan import Run, Scattered
from rksc_agents.model.rotation import Rotation

Pairs = Sequence[tuple[int, int]]
"""Target position and source position of tokens that are taken."""


@dataclass(slots=True, eq=False)
class TransplantJob:
    """A prompt that takes KV from `source`, as far as the tree does not have it exactly.

    `done` receives None if the source's KV was evicted before the job was admitted.
    """

    ledger: Ledger
    source: Cursor
    graft: Graft
    depth: int
    done: asyncio.Future[Cursor | None]
    why: Literal["prompt", "evicted"] = "prompt"
    base: Node | None = None
    promised: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt."""
        return self.graft.target


class Transplants:
    """The transplants of a step.

    Parameters
    ----------
    space : Space
        Where the KV goes.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.jobs: list[TransplantJob] = []
        self._rotation: Rotation | None = None

    def most_bytes(self, job: TransplantJob) -> int:
        """Bytes the job holds at its peak, with the source's path."""
        source = self.space.bytes_of(self.space.on_paths([job.source.node]))
        return source + self._own_bytes(job, 0)

    def _own_bytes(self, job: TransplantJob, start: int) -> int:
        return self.space.runner.most_bytes([start], 2 * (len(job.tokens) - start))  # the parts, and merged

    def admit(self, job: TransplantJob) -> Verdict:
        """Let the job run in this step if there is room."""
        if not job.source.node.alive:
            job.done.set_result(None)
            return "failed"
        limit = len(job.tokens) - 1
        if job.why == "evicted":  # the tree may have more by now, which would change what is taken
            limit = min(limit, job.graft.pairs[0][0])
        base = self.space.tree.match(job.tokens, limit).node
        needed = self._own_bytes(job, base.end)
        if not self.space.reserve([base, job.source.node], needed):
            return "full"
        job.base, job.promised = base, needed
        job.ledger.start()
        self.jobs.append(job)
        return "running"

    def run(self, job: TransplantJob) -> Cursor:
        """Compute the prompt's KV, put it into the tree and return its end.

        Where nothing is left to take, the result is exact: no graft, and a node like any other.
        """
        base, budget, tree = job.base, self.space.budget, self.space.tree
        assert base is not None
        pairs = [(at, source) for at, source in job.graft.pairs if at >= base.end]
        taken = [at for at, _ in pairs]
        computed = sorted(set(range(base.end, len(job.tokens))) - set(taken))
        promised, job.promised = job.promised, 0
        budget.settle(promised)
        self.space.make_room(promised)
        kept = self._taken(job.source.node, pairs) if pairs else None
        budget.hold(kept.nbytes if kept is not None else 0)
        tail = self.space.runner.tail([base], len(computed), 0)
        try:
            tail.grow(len(computed))
            scattered = Scattered(kept, taken) if kept is not None else None
            run = Run(tail, [[job.tokens[at] for at in computed]], [base], 1, computed, scattered)
            logits = self.space.runner.forward([run])
            (own,) = tail.part([0], [])
            assert isinstance(own, Segment)
        except BaseException:
            budget.free(kept.nbytes if kept is not None else 0)
            raise
        finally:
            tail.close()
        if kept is None:
            node = tree.insert(base, job.tokens[base.end :], own, job.depth)
        else:
            parts = kept.nbytes + own.nbytes
            places = [(own, [at - base.end for at in computed]), (kept, [at - base.end for at in taken])]
            merged = Segment.merged(places)
            budget.hold(merged.nbytes)
            budget.free(parts)
            node = tree.insert_private(base, job.tokens[base.end :], merged, job.depth)
        tree.ref(node)
        cursor = Cursor(job.tokens, node, logits[0].clone(), job.depth)
        cursor.graft = replace(job.graft, pairs=tuple(pairs)) if pairs else None
        job.ledger.cursors.add(cursor)
        if job.why == "evicted":
            job.ledger.recomputed += len(computed)
        else:
            job.ledger.prompt_tokens += len(job.tokens)
            job.ledger.prompt_tokens_reused += len(job.tokens) - len(computed)
        return cursor

    def _taken(self, source: Node, pairs: Pairs) -> Segment:
        """The source's KV of the tokens that are taken, rotated to their new positions."""
        rotation = self.rotation()
        nodes = source.path()
        at = torch.tensor([position for _, position in pairs], dtype=torch.long)
        by = torch.tensor([new - old for new, old in pairs], dtype=torch.long)
        kv: dict[int, KV] = {}
        assert isinstance(nodes[0].payload, Segment)
        for layer in nodes[0].payload.kv:
            keys = _gathered([_payload(node).kv[layer][0] for node in nodes], at)
            values = _gathered([_payload(node).kv[layer][1] for node in nodes], at)
            kv[layer] = (rotation.moved(layer, keys, by.to(keys.device)), values)
        return Segment(kv)

    def rotation(self) -> Rotation:
        """How this model's keys turn with their position; found out when it is first needed.

        Raises
        ------
        UnsupportedModelError
            If they do not turn, or the model does not run on the tree.
        """
        if self._rotation is None:
            self._rotation = self.space.runner.rotation()
        return self._rotation

    def end(self, job: TransplantJob) -> None:
        """Take a job out and give back what it was promised."""
        self.jobs.remove(job)
        assert job.base is not None
        self.space.tree.unpin(job.base)
        self.space.tree.unpin(job.source.node)
        self.space.budget.settle(job.promised)
        job.promised = 0


def _payload(node: Node) -> Segment:
    assert isinstance(node.payload, Segment)
    return node.payload


def _gathered(pieces: list[torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """Tokens `at` of pieces that lie one after the other, [heads, tokens, width]."""
    whole = torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]
    return whole[:, at.to(whole.device)]
