"""Throw-away extensions of sequences: their logits are read, nothing is kept.

A probe lives within one step. Probes that wait together share a pass of their own, apart from decoding rows, because
a watched pass may end before the last layer, and its KV is then good for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from rksc_agents.cache.tree import Node
from rksc_agents.engine.cursor import Cursor
from rksc_agents.engine.ledger import Ledger
from rksc_agents.engine.space import Space, Verdict
from rksc_agents.model.exits import ExitRule, Trace
from rksc_agents.model.plan import Run
from rksc_agents.model.protocol import RunningTail

Groups = tuple[tuple[int, ...], ...]
"""Groups of target tokens, such as the forms of YES and the forms of NO."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a probe read.

    Attributes
    ----------
    logits : Tensor [wanted, vocabulary] or None
        After the last `wanted` tokens of the extension; None after a watched pass.
    values : tuple of float
        Per group of targets the log-sum-exp of their logits. Where the row settled early, the log-odds of the first
        group that the exit rule saw there, and 0.
    layers : int
        Layers that the pass computed.
    tokens : int
        Tokens computed for this row alone.
    trace : Trace
        What the watch saw; empty where there was none.
    """

    logits: Tensor | None
    values: tuple[float, ...]
    layers: int
    tokens: int
    trace: Trace = field(default_factory=Trace)

    @property
    def exit_layer(self) -> int | None:
        """The layer at which the row settled, counted from 1; None at full depth."""
        return self.trace.settled


@dataclass(slots=True, eq=False)
class ProbeJob:
    """One row: `tokens` go on from the KV of `cursor`.

    `done` receives None if that KV was evicted before the probe was admitted.
    """

    ledger: Ledger
    cursor: Cursor
    tokens: list[int]
    done: asyncio.Future[Reading | None]
    wanted: int = 1
    groups: Groups = ()
    rule: ExitRule | None = None
    promised: int = 0

    @property
    def kind(self) -> tuple[ExitRule | None, Groups]:
        """Rows of one kind can share a pass."""
        return (self.rule, self.groups) if self.rule is not None else (None, ())

    @property
    def shape(self) -> tuple[int, bool]:
        """Rows of one shape are one run; recurrent states keep rows with and without a past apart."""
        return len(self.tokens), self.cursor.node.parent is None


class Probes:
    """The probes of a step.

    Parameters
    ----------
    space : Space
        Where the KV goes meanwhile.
    chunk : int
        Tokens per pass, unless a single row has more.
    """

    def __init__(self, space: Space, chunk: int) -> None:
        self.space = space
        self.chunk = chunk
        self.jobs: list[ProbeJob] = []

    def most_bytes(self, job: ProbeJob) -> int:
        """Bytes the job holds at its peak, with everything on its path."""
        node = job.cursor.node
        return self.space.bytes_of(self.space.on_paths([node])) + self._own_bytes(job, node)

    def _own_bytes(self, job: ProbeJob, node: Node) -> int:
        return self.space.runner.most_bytes([node.end], len(job.tokens))

    def admit(self, job: ProbeJob) -> Verdict:
        """Let the job run in this step if there is room."""
        node = job.cursor.node
        if not node.alive:
            job.done.set_result(None)
            return "failed"
        needed = self._own_bytes(job, node)
        if not self.space.reserve([node], needed):
            return "full"
        job.promised = needed
        job.ledger.start()
        self.jobs.append(job)
        return "running"

    def next_pass(self) -> list[ProbeJob]:
        """The rows that share the next pass: of one kind, as many as fit the chunk, at least one."""
        chosen: list[ProbeJob] = []
        tokens = 0
        for job in self.jobs:
            if chosen and (job.kind != chosen[0].kind or tokens + len(job.tokens) > self.chunk):
                continue
            if chosen and not self.space.runner.splittable and job.shape != chosen[0].shape:
                continue
            chosen.append(job)
            tokens += len(job.tokens)
        return sorted(chosen, key=lambda job: job.shape)

    def run(self, jobs: list[ProbeJob]) -> list[Reading]:
        """Compute one pass over rows that are sorted by shape; everything it held but the readings is given back."""
        tails: list[RunningTail] = []
        try:
            runs = [self._open(rows, tails) for rows in _by_shape(jobs)]
            return self._watched(jobs, runs) if jobs[0].rule is not None else self._whole(jobs, runs)
        finally:
            for tail in tails:
                tail.close()

    def _open(self, rows: list[ProbeJob], tails: list[RunningTail]) -> Run:
        bases, width = [job.cursor.node for job in rows], len(rows[0].tokens)
        promised = sum(job.promised for job in rows)
        tail = self.space.tail(bases, width, promised)
        tails.append(tail)
        for job in rows:
            job.promised = 0  # the tail has it now
        self.space.grow(tail, width)
        for job in rows:
            own = tail.nbytes // len(rows)
            self.space.saw(job.ledger, [*job.ledger.finished(), job.cursor.node], own)
            job.ledger.probe_tokens += width
        return Run(tail, [job.tokens for job in rows], bases, wanted=max(job.wanted for job in rows))

    def _whole(self, jobs: list[ProbeJob], runs: list[Run]) -> list[Reading]:
        runner = self.space.runner
        wanted = [run.wanted for run in runs for _ in run.tokens]
        rows = runner.forward(runs).split(wanted)
        return [
            Reading(row[len(row) - job.wanted :].clone(), (), runner.depth, len(job.tokens))
            for job, row in zip(jobs, rows, strict=True)
        ]

    def _watched(self, jobs: list[ProbeJob], runs: list[Run]) -> list[Reading]:
        rule, groups = jobs[0].kind
        assert rule is not None
        targets = [token for group in groups for token in group]
        ends = [sum(map(len, groups[: i + 1])) for i in range(len(groups))]
        places = tuple(tuple(range(end - len(group), end)) for group, end in zip(groups, ends, strict=True))
        watch = rule.watch(len(jobs), places)
        final, layers = self.space.runner.forward_watched(runs, watch, targets)
        readings = []
        for row, (job, trace) in enumerate(zip(jobs, watch.traces, strict=True)):
            values = tuple(final[row, list(place)].logsumexp(0).item() for place in places)
            if trace.settled is not None:
                values = (trace.log_odds[trace.settled], 0.0)
            else:
                assert layers == self.space.runner.depth, "the pass ended before this row had settled"
            readings.append(Reading(None, values, layers, len(job.tokens), trace))
        return readings

    def end(self, job: ProbeJob) -> None:
        """Take a job out and give back what it was promised."""
        self.jobs.remove(job)
        self.space.tree.unpin(job.cursor.node)
        self.space.budget.settle(job.promised)
        job.promised = 0


def _by_shape(jobs: list[ProbeJob]) -> Iterator[list[ProbeJob]]:
    groups: dict[tuple[int, bool], list[ProbeJob]] = {}
    for job in jobs:
        groups.setdefault(job.shape, []).append(job)
    yield from groups.values()
