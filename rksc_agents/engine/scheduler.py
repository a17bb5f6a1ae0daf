"""Who runs next: one step is one forward pass over everything that is awaited.

Running rows of all requests come first, one token each; what is left of the step goes to prompts, in
pieces, so that a long prompt does not stall them. Work is admitted in the order in which it came.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from rksc_agents.cache.budget import Budget
from rksc_agents.config import EngineConfig
from rksc_agents.engine.decode import Decodes, EvictedError
from rksc_agents.engine.jobs import DecodeJob, PrefillJob
from rksc_agents.engine.prefill import Prefills
from rksc_agents.engine.probe import ProbeJob, Probes, Reading
from rksc_agents.engine.space import Space, Verdict
from rksc_agents.engine.transplant import TransplantJob, Transplants
from rksc_agents.errors import ConfigError, EngineError, KVBudgetError, UnsupportedModelError
from rksc_agents.model.plan import Run
from rksc_agents.model.protocol import Runner
from rksc_agents.model.text import TextCodec

Job = PrefillJob | DecodeJob | ProbeJob | TransplantJob


class Lane(Protocol):
    """What runs jobs of one kind."""

    jobs: list[Any]

    def most_bytes(self, job: Any) -> int:
        """Bytes the job holds at its peak."""
        ...

    def admit(self, job: Any) -> Verdict:
        """Let the job run if there is room."""
        ...

    def end(self, job: Any) -> None:
        """Take a job out and give back what it holds."""
        ...


class Scheduler:
    """Runs jobs step by step. Belongs to the engine's thread.

    Parameters
    ----------
    runner : Runner
        Runs the model.
    budget : Budget
        The KV budget that the runner's tails and the tree count against.
    codec : TextCodec
        Decodes tokens and knows which end a branch.
    config : EngineConfig
        Sizes of a step.
    context : int
        The model's context in tokens.
    """

    def __init__(self, runner: Runner, budget: Budget, codec: TextCodec, config: EngineConfig, context: int) -> None:
        self.runner = runner
        self.budget = budget
        self.context = context
        self.space = Space(runner, budget)
        self.tree = self.space.tree
        self.prefills = Prefills(self.space, config.prefill_chunk)
        self.decodes = Decodes(self.space, codec, context, config.max_rows)
        self.probes = Probes(self.space, config.prefill_chunk)
        self.transplants = Transplants(self.space)
        self._lanes: dict[type, Lane] = {
            PrefillJob: self.prefills,
            DecodeJob: self.decodes,
            ProbeJob: self.probes,
            TransplantJob: self.transplants,
        }
        self.waiting: list[Job] = []
        self.wake = asyncio.Event()
        self.on_step: list[Callable[[float], None]] = []
        # Held by whoever computes again what was evicted before it could run: two of them at the same time would evict
        # each other's KV for ever.
        self.turn = asyncio.Lock()

    @property
    def codec(self) -> TextCodec:
        """The model's text."""
        return self.decodes.codec

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self.waiting or self._running)

    @property
    def _running(self) -> bool:
        return any(lane.jobs for lane in self._lanes.values())

    def add(self, job: Job) -> None:
        """Queue a job.

        Raises
        ------
        KVBudgetError
            If the job alone needs more than the whole budget.
        """
        needed = self._lane(job).most_bytes(job)
        if needed > self.budget.limit:
            raise KVBudgetError(needed, self.budget.limit)
        # The older request first, so that two requests cannot evict each other's prompts for ever.
        insort(self.waiting, job, key=lambda waiting: waiting.ledger.submitted)
        self.wake.set()

    def cancel(self, job: Job) -> None:
        """Drop a job and free what it holds, at once; a job that has ended is left alone."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self._lane(job).jobs:
            self._lane(job).end(job)

    def _lane(self, job: Job) -> Lane:
        return self._lanes[type(job)]

    def step(self) -> None:
        """Admit what fits, draw a token for every row, compute one pass, and the probes in passes of their own."""
        began = time.perf_counter()
        self._work()
        for watch in self.on_step:
            watch(time.perf_counter() - began)

    def _work(self) -> None:
        self._admit()
        for decode in list(self.decodes.jobs):
            self._guard(decode, self.decodes.draw)
        runs: list[tuple[Job, Run]] = []
        jobs: list[Job] = [*self.decodes.jobs, *self.prefills.jobs]
        for job in jobs:
            self._guard(job, self._plan, runs)
        if runs:
            for job, logits in self._forward(runs):
                self._guard(job, self._take, logits)
        for transplant in list(self.transplants.jobs):
            self._guard(transplant, self._transplant)
        while probes := self.probes.next_pass():
            self._probe(probes)

    def _plan(self, job: PrefillJob | DecodeJob, runs: list[tuple[Job, Run]]) -> None:
        """Add what the job computes in this step to `runs`."""
        run: Run | None
        if isinstance(job, DecodeJob):
            run = self.decodes.run(job)
            self.decodes.observe(job)
        else:
            run = self.prefills.run(job, sum(r.width for other, r in runs if isinstance(other, PrefillJob)))
        if run is not None:
            job.ledger.start()
            runs.append((job, run))

    def _admit(self) -> None:
        passed_over: list[Job] = []
        while self.waiting:
            job = self.waiting.pop(0)
            try:
                verdict = self._lane(job).admit(job)
            except Exception as error:
                self._fail(job, error)
                continue
            if verdict == "full" and not self._running:
                self._fail(
                    job, KVBudgetError(self._lane(job).most_bytes(job), self.budget.limit)
                )  # it would wait for ever
                continue
            if verdict in ("later", "full"):
                passed_over.append(job)
            if verdict == "full":  # nobody overtakes a job that waits for room, or it would wait for ever
                break
        self.waiting[:0] = passed_over

    def _take(self, job: PrefillJob | DecodeJob, logits: Tensor) -> None:
        if isinstance(job, DecodeJob):
            job.logits = logits
        else:
            self.prefills.advance(job, logits)

    def _transplant(self, job: TransplantJob) -> None:
        cursor = self.transplants.run(job)
        self.transplants.end(job)
        if job.done.done():  # whoever waited was cancelled; the request releases the cursor when it ends
            return
        job.done.set_result(cursor)

    def _probe(self, jobs: list[ProbeJob]) -> None:
        readings: list[Reading | Exception]
        try:
            readings = list(self.probes.run(jobs))
        except Exception as error:
            if len(jobs) > 1 and self.runner.retryable:
                for each in jobs:  # find out whose fault it is
                    self._probe([each])
                return
            readings = [error] * len(jobs)
        for job, reading in zip(jobs, readings, strict=True):
            if isinstance(reading, Exception):
                self._fail(job, reading)
                continue
            self.probes.end(job)
            if not job.done.done():
                job.done.set_result(reading)

    def _forward(self, runs: list[tuple[Job, Run]]) -> Iterator[tuple[Job, Tensor]]:
        try:
            logits = self.runner.forward([run for _, run in runs])
        except Exception as error:
            if len(runs) == 1 or not self.runner.retryable:
                for job, _ in runs:
                    self._fail(job, error)
                return
            for each in runs:  # find out whose fault it is
                yield from self._forward([each])
            return
        at = 0
        for job, run in runs:
            rows = len(run.tokens) * run.wanted
            yield job, logits[at : at + rows]
            at += rows

    def _guard(self, job: Job, act: Callable[..., None], *args: object) -> None:
        """Run a piece of a job's work; what it raises goes to that job alone."""
        try:
            act(job, *args)
        except Exception as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, (EngineError, KVBudgetError, EvictedError, UnsupportedModelError, ConfigError)):
            wrapped = EngineError(f"the model failed inside a step: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self.cancel(job)
        if isinstance(job, DecodeJob):
            job.finished.put_nowait(error)
        elif not job.done.done():
            job.done.set_exception(error)
