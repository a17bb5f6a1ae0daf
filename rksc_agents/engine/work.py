"""Has work done for one request: queues jobs, waits for them, and computes again what was evicted meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from rksc_agents.cache.tree import Node
from rksc_agents.engine.cursor import Cursor, Graft
from rksc_agents.engine.decode import EvictedError
from rksc_agents.engine.jobs import PrefillJob
from rksc_agents.engine.ledger import Ledger
from rksc_agents.engine.probe import Groups, ProbeJob, Reading
from rksc_agents.engine.scheduler import Scheduler
from rksc_agents.engine.transplant import TransplantJob
from rksc_agents.errors import PromptTooLongError
from rksc_agents.model.exits import ExitRule

T = TypeVar("T")

Why = Literal["prompt", "continue", "evicted"]


class AwaitedJob(Protocol[T]):
    """A job with one result."""

    @property
    def done(self) -> asyncio.Future[T]: ...


class Work:
    """The jobs of one request.

    Attributes
    ----------
    scheduler : Scheduler
        Runs them.
    ledger : Ledger
        Counts what they take.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.ledger = Ledger()
        self._grafting = asyncio.Lock()

    def release(self, cursor: Cursor) -> None:
        """Give up a cursor; KV that nobody else claims is freed at once."""
        if not cursor.released:
            cursor.released = True
            cursor.logits = None
            self.ledger.cursors.discard(cursor)
            self.scheduler.tree.unref(cursor.node)

    async def done(self, job: AwaitedJob[T]) -> T:
        """Have a job run; whoever stops waiting for it cancels it."""
        self.scheduler.add(job)  # type: ignore[arg-type]
        try:
            return await job.done
        except asyncio.CancelledError:
            self.scheduler.cancel(job)  # type: ignore[arg-type]
            raise

    async def prefill(self, tokens: tuple[int, ...], *, depth: int, why: Why, under: Node | None = None) -> Cursor:
        limit = self.scheduler.context
        if not 0 < len(tokens) < limit:
            raise PromptTooLongError(len(tokens), limit)
        job = PrefillJob(self.ledger, tokens, asyncio.get_running_loop().create_future(), depth, why, under)
        with self.ledger.spending("prefill"):
            return await self.done(job)

    async def transplant(self, source: Cursor, graft: Graft, why: Literal["prompt", "evicted"]) -> Cursor:
        while True:
            if not source.node.alive or source.node.end < len(source.tokens):
                await self.ready([source])
            future: asyncio.Future[Cursor | None] = asyncio.get_running_loop().create_future()
            with self.ledger.spending("prefill"):
                cursor = await self.done(TransplantJob(self.ledger, source, graft, 0, future, why))
            if cursor is not None:
                return cursor

    async def probe(
        self,
        cursor: Cursor,
        extension: Sequence[int],
        *,
        wanted: int = 1,
        groups: Groups = (),
        rule: ExitRule | None = None,
    ) -> Reading:
        length = len(cursor.tokens) + len(extension)
        if length > self.scheduler.context:
            raise PromptTooLongError(length, self.scheduler.context)
        async with AsyncExitStack() as turn:
            waited = False
            while True:
                if not cursor.node.alive:
                    await self.ready([cursor])
                tokens = [*cursor.tokens[cursor.node.end :], *extension]
                done: asyncio.Future[Reading | None] = asyncio.get_running_loop().create_future()
                reading = await self.done(ProbeJob(self.ledger, cursor, tokens, done, wanted, groups, rule))
                if reading is not None:
                    return reading
                if not waited:
                    waited = True
                    await turn.enter_async_context(self.scheduler.turn)

    async def ready(self, cursors: list[Cursor]) -> None:
        """Compute what the cursors lack to be decoded; equal sequences once."""
        tree = self.scheduler.tree
        lacking: dict[tuple[tuple[int, ...], Graft | None], list[Cursor]] = {}
        for cursor in cursors:
            if not cursor.ready:
                lacking.setdefault((cursor.tokens, cursor.graft), []).append(cursor)
        grafts = dict.fromkeys(graft for _, graft in lacking if graft is not None)
        prompts = {graft: await self.grafted(graft) for graft in grafts}  # once for all branches of a prompt
        prefills = [self.continued(same[0], prompts) for same in lacking.values()]
        for fresh, same in zip(await all_of(prefills), lacking.values(), strict=True):
            for cursor in same:
                tree.unref(cursor.node)
                tree.ref(fresh.node)
                cursor.node, cursor.logits = fresh.node, fresh.logits
                if cursor.score is not None:
                    cursor.node.score = cursor.score
            self.release(fresh)
        for prompt in prompts.values():
            self.release(prompt)

    async def continued(self, cursor: Cursor, prompts: Mapping[Graft, Cursor]) -> Cursor:
        """A fresh cursor at the same place, with logits; `prompts` are the ends of grafted prompts."""
        why: Why = "continue" if cursor.node.alive else "evicted"
        if cursor.graft is None:
            return await self.prefill(cursor.tokens, depth=cursor.depth, why=why)
        prompt = prompts[cursor.graft]
        while True:
            again = None
            if not prompt.node.alive:
                prompt = again = await self.grafted(cursor.graft)
            try:
                if len(cursor.tokens) == len(prompt.tokens):
                    return self._at(
                        cursor.graft, prompt.node, prompt.logits if cursor.logits is None else cursor.logits
                    )
                fresh = await self.prefill(cursor.tokens, depth=cursor.depth, why=why, under=prompt.node)
            except EvictedError:  # the prompt, while this waited
                continue
            finally:
                if again is not None:
                    self.release(again)
            fresh.graft = cursor.graft
            return fresh

    async def grafted(self, graft: Graft) -> Cursor:
        """A fresh cursor at the end of a grafted prompt: where it is still there, else taken from its source again."""
        async with self._grafting:
            for cursor in self.ledger.cursors:
                if cursor.graft == graft and cursor.node.alive:
                    logits = cursor.logits if len(cursor.tokens) == len(graft.target) else None
                    return self._at(graft, next(node for node in cursor.node.path() if node.private), logits)
            source = await self.prefill(graft.source, depth=0, why="evicted")
            fresh = await self.transplant(source, graft, "evicted")
            self.release(source)
            return fresh

    def _at(self, graft: Graft, node: Node, logits: Tensor | None) -> Cursor:
        cursor = Cursor(graft.target, node, logits)
        cursor.graft = graft
        self.scheduler.tree.ref(node)
        self.ledger.cursors.add(cursor)
        return cursor


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in order; if one fails, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return [task.result() for task in tasks]
