"""Who runs next: one step is one forward pass over everything that is awaited.

Running rows of all requests come first, one token each; what is left of the step goes to prompts, in
pieces, so that a long prompt does not stall them. Work is admitted in the order in which it came.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterator

from torch import Tensor

from rksc_agents.cache.budget import Budget
from rksc_agents.config import EngineConfig
from rksc_agents.engine.decode import Decodes, EvictedError
from rksc_agents.engine.jobs import DecodeJob, PrefillJob
from rksc_agents.engine.prefill import Prefills
from rksc_agents.engine.space import Space
from rksc_agents.errors import EngineError, KVBudgetError
from rksc_agents.model.plan import Run
from rksc_agents.model.protocol import Runner
from rksc_agents.model.text import TextCodec

Job = PrefillJob | DecodeJob


class Scheduler:
    """Runs prefill and decode jobs step by step. Belongs to the engine's thread.

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
        self.waiting: list[Job] = []
        self.wake = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self.waiting or self.prefills.jobs or self.decodes.jobs)

    def add(self, job: Job) -> None:
        """Queue a job.

        Raises
        ------
        KVBudgetError
            If the job alone needs more than the whole budget.
        """
        needed = self._most_bytes(job)
        if needed > self.budget.limit:
            raise KVBudgetError(needed, self.budget.limit)
        # The older request first, so that two requests cannot evict each other's prompts for ever.
        insort(self.waiting, job, key=lambda waiting: waiting.ledger.submitted)
        self.wake.set()

    def _most_bytes(self, job: Job) -> int:
        return self.prefills.most_bytes(job) if isinstance(job, PrefillJob) else self.decodes.most_bytes(job)

    def cancel(self, job: Job) -> None:
        """Drop a job and free what it holds, at once; a job that has ended is left alone."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif isinstance(job, PrefillJob) and job in self.prefills.jobs:
            self.prefills.end(job)
        elif isinstance(job, DecodeJob) and job in self.decodes.jobs:
            self.decodes.end(job)

    def step(self) -> None:
        """Admit what fits, draw a token for every row, and compute one pass."""
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

    def _plan(self, job: Job, runs: list[tuple[Job, Run]]) -> None:
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
                verdict = self.prefills.admit(job) if isinstance(job, PrefillJob) else self.decodes.admit(job)
            except Exception as error:
                self._fail(job, error)
                continue
            if verdict == "full" and not (self.prefills.jobs or self.decodes.jobs):
                self._fail(job, KVBudgetError(self._most_bytes(job), self.budget.limit))  # it would wait for ever
                continue
            if verdict in ("later", "full"):
                passed_over.append(job)
            if verdict == "full":  # nobody overtakes a job that waits for room, or it would wait for ever
                break
        self.waiting[:0] = passed_over

    def _take(self, job: Job, logits: Tensor) -> None:
        if isinstance(job, DecodeJob):
            job.logits = logits
        else:
            self.prefills.advance(job, logits)

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
            rows = len(run.tokens) if run.wants_logits else 0
            yield job, logits[at : at + rows]
            at += rows

    def _guard(self, job: Job, act: Callable[..., None], *args: object) -> None:
        """Run a piece of a job's work; what it raises goes to that job alone."""
        try:
            act(job, *args)
        except Exception as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, (EngineError, KVBudgetError, EvictedError)):
            wrapped = EngineError(f"the model failed inside a step: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self.cancel(job)
        if isinstance(job, DecodeJob):
            job.finished.put_nowait(error)
        elif not job.done.done():
            job.done.set_exception(error)
