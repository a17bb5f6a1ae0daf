"""Branches being decoded, as a strategy sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from rksc_agents.config import Sampling
from rksc_agents.engine.cursor import Completion, Cursor
from rksc_agents.engine.decode import EvictedError
from rksc_agents.engine.jobs import DecodeJob, Doubt, OnToken
from rksc_agents.engine.work import Work

Score = Callable[[Tensor], Tensor]
"""Maps log-probabilities [rows, vocabulary] to a score per row."""


def top_probability(logprobs: Tensor) -> Tensor:
    """The likeliest token's probability in each row."""
    return logprobs.amax(-1).exp()


class Decoding:
    """Branches being decoded. Iterate for the completions in the order in which they end.

    ::

        async with session.decoding(cursors, sampling) as run:
            async for completion in run:
                if enough(completion):
                    break           # what still runs is cancelled and its KV freed
        run.completions             # all of them, in the order of the cursors

    Attributes
    ----------
    completions : list of Completion
        Complete after the block; branches that were cut short have the finish reason "cancelled".
    """

    def __init__(
        self,
        work: Work,
        cursors: list[Cursor],
        sampling: Sampling,
        generators: list[torch.Generator],
        *,
        score: Score,
        on_token: OnToken | None,
        doubt: Doubt | None,
        shown: frozenset[int],
    ) -> None:
        self._work = work
        self._cursors = cursors
        self._sampling = sampling
        self._generators = generators
        self._score = score
        self._on_token = on_token
        self._doubt = doubt
        self._shown = shown
        self._job: DecodeJob | None = None
        self._done: dict[int, Completion] = {}
        self.completions: list[Completion] = []

    async def __aenter__(self) -> Self:
        self._began = self._work.ledger.now
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._work.ledger.spent("decode", self._began)
        job = self._job
        if job is None:
            return
        for row in job.rows:
            row.pieces.append(row.stream.finish())
            self._done[row.index] = row.completion("cancelled", None)
        self._work.scheduler.cancel(job)
        while not job.finished.empty():  # ended in the step in which the others were cancelled
            item = job.finished.get_nowait()
            if isinstance(item, Completion):
                self._done[item.index] = item
        self.completions = [self._done[index] for index in sorted(self._done)]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Completion:
        if len(self._done) == len(self._cursors):
            raise StopAsyncIteration
        waited = False
        async with AsyncExitStack() as turn:
            while True:
                job = self._job or await self._start()
                item = await job.finished.get()
                if isinstance(item, Completion):
                    self._done[item.index] = item
                    return item
                if not isinstance(item, EvictedError):
                    raise item
                if not waited:
                    waited = True
                    await turn.enter_async_context(self._work.scheduler.turn)
                self._job = None  # evicted while it waited to be admitted: compute it again

    async def _start(self) -> DecodeJob:
        await self._work.ready(self._cursors)
        job = DecodeJob(
            ledger=self._work.ledger,
            cursors=self._cursors,
            sampling=self._sampling,
            generators=self._generators,
            score=self._score,
            on_token=self._on_token,
            finished=asyncio.Queue(),
            doubt=self._doubt,
            shown=self._shown,
        )
        self._work.scheduler.add(job)
        self._job = job
        return job
