"""The verbs of one request: what a strategy awaits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from rksc_agents.config import Sampling
from rksc_agents.engine.cursor import Completion, Cursor
from rksc_agents.engine.decode import EvictedError
from rksc_agents.engine.jobs import DecodeJob, OnToken, PrefillJob
from rksc_agents.engine.ledger import Ledger
from rksc_agents.engine.scheduler import Scheduler
from rksc_agents.errors import ConfigError, PromptTooLongError
from rksc_agents.model.sampling import Sampler

P = ParamSpec("P")
T = TypeVar("T")

Score = Callable[[Tensor], Tensor]
Why = Literal["prompt", "continue", "evicted"]


def top_probability(logprobs: Tensor) -> Tensor:
    """The likeliest token's probability in each row."""
    return logprobs.amax(-1).exp()


class Session:
    """One request's view of the engine. A strategy awaits its verbs and never touches a tensor.

    Every cursor it hands out is released when the request ends, whatever happened.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.ledger = Ledger()
        self._evicted_before = scheduler.tree.evicted
        self._next_generator = 0

    async def prefill(self, tokens: Sequence[int], *, keep: bool = True) -> Cursor:
        """Put the KV of `tokens` into the tree, computing only what is not there.

        Parameters
        ----------
        tokens : sequence of int
            The whole sequence, at least one token.
        keep : bool, default True
            Keep it as a cached prefix for later requests.

        Returns
        -------
        Cursor
            With the logits after the last token.

        Raises
        ------
        PromptTooLongError
            If it leaves no room for a token in the model's context.
        KVBudgetError
            If it can never fit the KV budget.
        """
        cursor = await self._prefill(tuple(tokens), depth=0, why="prompt")
        if keep:
            self._scheduler.tree.keep(cursor.node)
        return cursor

    async def _prefill(self, tokens: tuple[int, ...], *, depth: int, why: Why) -> Cursor:
        limit = self._scheduler.context
        if not 0 < len(tokens) < limit:
            raise PromptTooLongError(len(tokens), limit)
        began = time.perf_counter()
        job = PrefillJob(self.ledger, tokens, asyncio.get_running_loop().create_future(), depth, why)
        self._scheduler.add(job)
        try:
            cursor = await job.done
        except asyncio.CancelledError:
            self._scheduler.cancel(job)
            raise
        self.ledger.prefill_s += time.perf_counter() - began
        return cursor

    def fork(self, cursor: Cursor, n: int) -> list[Cursor]:
        """Make `n` cursors at the place of `cursor`. Computes and copies nothing."""
        if cursor.released:
            raise ConfigError("a released cursor cannot be forked: release it after its last use")
        forks = [Cursor(cursor.tokens, cursor.node, cursor.logits, cursor.depth) for _ in range(n)]
        for fork in forks:
            self._scheduler.tree.ref(fork.node)
        self.ledger.cursors.update(forks)
        return forks

    def decoding(
        self,
        cursors: Sequence[Cursor],
        sampling: Sampling,
        *,
        score: Score = top_probability,
        on_token: OnToken | None = None,
    ) -> Decoding:
        """Decode from each cursor, one branch each; see :class:`Decoding`.

        Parameters
        ----------
        cursors : sequence of Cursor
            Where the branches start; the same place any number of times.
        sampling : Sampling
            How tokens are drawn. Every branch of the request has a generator of its own.
        score : callable
            Maps log-probabilities [rows, vocabulary] to a score per row, kept for each token.
        on_token : callable or None
            Called in the engine's thread with index, token and new text; must not block.
        """
        if any(cursor.released for cursor in cursors):
            raise ConfigError("a released cursor cannot be decoded: release it after its last use")
        first = self._next_generator
        self._next_generator += len(cursors)
        generators = [Sampler.generator(sampling.seed, first + i) for i in range(len(cursors))]
        return Decoding(self, list(cursors), sampling, generators, score=score, on_token=on_token)

    async def decode(
        self,
        cursors: Sequence[Cursor],
        sampling: Sampling,
        *,
        score: Score = top_probability,
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """Decode from each cursor until every branch has ended; the completions come in the cursors' order."""
        async with self.decoding(cursors, sampling, score=score, on_token=on_token) as run:
            async for _ in run:
                pass
        return run.completions

    def keep(self, cursor: Cursor) -> None:
        """Keep the cursor's KV as a cached prefix for later requests, such as the next turn."""
        if cursor.node.alive:
            self._scheduler.tree.keep(cursor.node)

    def release(self, cursor: Cursor) -> None:
        """Give up a cursor. KV that nobody else claims is freed at once."""
        if not cursor.released:
            cursor.released = True
            cursor.logits = None
            self.ledger.cursors.discard(cursor)
            self._scheduler.tree.unref(cursor.node)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run user code in a thread of its own, so that it does not stall the engine."""
        return await asyncio.to_thread(function, *args, **kwargs)

    def evicted(self) -> int:
        """How many nodes were evicted since the request began."""
        return self._scheduler.tree.evicted - self._evicted_before

    def close(self) -> None:
        """Release every cursor."""
        for cursor in list(self.ledger.cursors):
            self.release(cursor)

    async def _ready(self, cursors: list[Cursor]) -> None:
        """Compute what the cursors lack to be decoded; equal sequences once."""
        tree = self._scheduler.tree
        lacking: dict[tuple[int, ...], list[Cursor]] = {}
        for cursor in cursors:
            if not cursor.ready:
                lacking.setdefault(cursor.tokens, []).append(cursor)
        tasks = []
        try:
            async with asyncio.TaskGroup() as group:  # if one fails, the others are cancelled
                for tokens, same in lacking.items():
                    why: Why = "continue" if same[0].node.alive else "evicted"
                    tasks.append(group.create_task(self._prefill(tokens, depth=same[0].depth, why=why)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for task, same in zip(tasks, lacking.values(), strict=True):
            fresh = task.result()
            for cursor in same:
                tree.unref(cursor.node)
                tree.ref(fresh.node)
                cursor.node, cursor.logits = fresh.node, fresh.logits
            self.release(fresh)


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
        session: Session,
        cursors: list[Cursor],
        sampling: Sampling,
        generators: list[torch.Generator],
        *,
        score: Score,
        on_token: OnToken | None,
    ) -> None:
        self._session = session
        self._cursors = cursors
        self._sampling = sampling
        self._generators = generators
        self._score = score
        self._on_token = on_token
        self._job: DecodeJob | None = None
        self._done: dict[int, Completion] = {}
        self.completions: list[Completion] = []

    async def __aenter__(self) -> Self:
        self._began = time.perf_counter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.ledger.decode_s += time.perf_counter() - self._began
        job = self._job
        if job is None:
            return
        for row in job.rows:
            row.stream.finish()
            self._done[row.index] = row.completion("cancelled", None)
        self._session._scheduler.cancel(job)
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
        while True:
            job = self._job or await self._start()
            item = await job.finished.get()
            if isinstance(item, Completion):
                self._done[item.index] = item
                return item
            if not isinstance(item, EvictedError):
                raise item
            self._job = None  # evicted while it waited to be admitted: compute it again

    async def _start(self) -> DecodeJob:
        await self._session._ready(self._cursors)
        job = DecodeJob(
            ledger=self._session.ledger,
            cursors=self._cursors,
            sampling=self._sampling,
            generators=self._generators,
            score=self._score,
            on_token=self._on_token,
            finished=asyncio.Queue(),
        )
        self._session._scheduler.add(job)
        self._job = job
        return job
