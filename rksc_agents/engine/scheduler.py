"""Who runs next: one step is one forward pass over everything that is awaited.

Running rows of all requests come first, one token each; what is left of the step goes to prompts, in
pieces, so that a long prompt does not stall them. Work is admitted in the order it came, and only
when the KV it may need at most can be held; so it never has to stop for lack of memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rksc_agents.cache.budget import Budget
from rksc_agents.config import EngineConfig
from rksc_agents.engine.cursor import Cursor
from rksc_agents.engine.jobs import DecodeJob, PrefillJob, Row
from rksc_agents.errors import EngineError, KVBudgetError
from rksc_agents.model.plan import Run
from rksc_agents.model.protocol import Runner
from rksc_agents.model.sampling import RowState, Sampler, TokenHistory
from rksc_agents.model.text import TextCodec

Job = PrefillJob | DecodeJob


class Evicted(Exception):
    """A cursor's KV was evicted before its decoding was admitted; it has to be prefilled again."""


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

    def __init__(
        self, runner: Runner, budget: Budget, codec: TextCodec, config: EngineConfig, context: int
    ) -> None:
        self.runner = runner
        self.budget = budget
        self.codec = codec
        self.config = config
        self.context = context
        self.tree = runner.tree()
        self.sampler = Sampler()
        self.waiting: deque[Job] = deque()
        self.prefills: list[PrefillJob] = []
        self.decodes: list[DecodeJob] = []
        self.wake = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self.waiting or self.prefills or self.decodes)

    def add(self, job: Job) -> None:
        """Queue a job. One that can never fit the budget is refused.

        Raises
        ------
        KVBudgetError
            If the job alone needs more than the whole budget.
        """
        needed = self._most_bytes(job)
        if needed > self.budget.limit:
            raise KVBudgetError(needed, self.budget.limit)
        self.waiting.append(job)
        self.wake.set()

    def _most_bytes(self, job: Job) -> int:
        """Bytes a job holds at its peak, with everything on its paths."""
        if isinstance(job, PrefillJob):
            return self.runner.most_bytes([0], len(job.tokens))
        paths = {id(node): node for cursor in job.cursors for node in cursor.node.path()}
        below = sum(node.payload.nbytes for node in paths.values() if node.payload is not None)
        return below + self.runner.most_bytes([cursor.node.end for cursor in job.cursors], self._most(job))

    def _most(self, job: DecodeJob) -> int:
        """KV tokens a row of the job holds at most; its last token's KV is never computed."""
        longest = min(job.sampling.max_tokens, self.context - min(len(c.tokens) for c in job.cursors))
        return max(1, longest - 1)

    def cancel(self, job: Job) -> None:
        """Drop a job and free what it holds; between steps this takes effect at once."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif isinstance(job, PrefillJob) and job in self.prefills:
            self.prefills.remove(job)
            self._end_prefill(job)
        elif isinstance(job, DecodeJob) and job in self.decodes:
            self.decodes.remove(job)
            self._end_decode(job)

    # -- one step -------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit what fits, draw a token for every row, and compute one pass."""
        self._admit()
        for job in list(self.decodes):
            self._guard(job, self._draw)
        runs = self._runs()
        if not runs:
            return
        for job, _ in runs:
            job.ledger.start()
            self._observe(job)
        for job, logits in self._forward(runs):
            self._guard(job, self._take, logits)

    def _guard(self, job: Job, act: Callable[..., None], *args: Tensor) -> None:
        """Run a piece of a job's work; what it raises goes to that job alone."""
        try:
            act(job, *args)
        except Exception as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: BaseException) -> None:
        if not isinstance(error, (EngineError, KVBudgetError, Evicted)):
            wrapped = EngineError(f"the model failed inside a step: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self.cancel(job)
        if isinstance(job, DecodeJob):
            job.finished.put_nowait(error)
        elif not job.done.done():
            job.done.set_exception(error)

    def _forward(self, runs: list[tuple[Job, Run]]) -> Iterator[tuple[Job, Tensor]]:
        try:
            logits = self.runner.forward([run for _, run in runs])
        except Exception as error:
            if len(runs) == 1 or not self.runner.splittable:
                for job, _ in runs:  # recurrent states may be half updated: none of these can go on
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

    def _take(self, job: Job, logits: Tensor) -> None:
        if isinstance(job, DecodeJob):
            job.logits = logits
        else:
            self._advance_prefill(job, logits)

    # -- admission ------------------------------------------------------------------------------

    def _admit(self) -> None:
        deferred: list[Job] = []
        while self.waiting:
            job = self.waiting.popleft()
            if isinstance(job, PrefillJob):
                verdict = self._admit_prefill(job)
            else:
                verdict = self._admit_decode(job)
            if verdict == "later":
                deferred.append(job)  # it will reuse what another prefill is computing now
            elif verdict == "full":
                deferred.append(job)
                break
        self.waiting.extendleft(reversed(deferred))

    def _reserve(self, needed: int) -> bool:
        """Promise bytes to new work if they can be had, by eviction if need be."""
        budget = self.budget
        if budget.held - self.tree.evictable() + budget.promised + needed > budget.limit:
            return False
        budget.promise(needed)
        return True

    def _admit_prefill(self, job: PrefillJob) -> str:
        # At least one token is computed: its logits are what decoding starts from.
        match = self.tree.match(job.tokens, len(job.tokens) - 1)
        base = match.node
        if any(_common_length(job.tokens, other.tokens) > base.end + match.beyond for other in self.prefills):
            return "later"
        total = len(job.tokens)
        cuts = {total} if self.runner.splittable else {base.end + match.beyond, total - 1, total}
        job.cuts = sorted(cut for cut in cuts if cut > base.end)
        starts = [base.end, *job.cuts[:-1]]
        shares = [self.runner.most_bytes([at], cut - at) for at, cut in zip(starts, job.cuts, strict=True)]
        self.tree.pin(base)
        if not self._reserve(sum(shares)):
            self.tree.unpin(base)
            return "full"
        job.base, job.shares = base, shares
        if job.why == "evicted":
            job.ledger.recomputed += total - base.end
        elif job.why == "prompt":
            job.ledger.prompt_tokens += total
            job.ledger.prompt_tokens_reused += base.end
        self.prefills.append(job)
        self._open_piece(job)
        return "running"

    def _admit_decode(self, job: DecodeJob) -> str:
        running = sum(len(other.rows) for other in self.decodes)
        if running and running + len(job.cursors) > self.config.max_rows:
            return "full"
        if not all(cursor.ready for cursor in job.cursors):
            job.finished.put_nowait(Evicted())
            return "failed"
        bases = [cursor.node for cursor in job.cursors]
        for base in bases:
            self.tree.pin(base)
        most = self._most(job)
        ends = [base.end for base in bases]
        needed = self.runner.most_bytes(ends, most)
        if not self._reserve(needed):
            for base in bases:
                self.tree.unpin(base)
            return "full"
        self.tree.evict(self.budget.missing(self.runner.most_bytes(ends, 0)))
        job.tail = self.runner.tail(bases, most, needed)
        job.rows = [self._row(job, index, cursor) for index, cursor in enumerate(job.cursors)]
        job.logits = torch.stack([cursor.logits for cursor in job.cursors if cursor.logits is not None])
        job.ledger.start()
        self.decodes.append(job)
        return "running"

    def _row(self, job: DecodeJob, index: int, cursor: Cursor) -> Row:
        sampling = job.sampling
        history = TokenHistory(cursor.tokens if sampling.repetition_penalty != 1.0 else ())
        return Row(
            index=index,
            base=cursor,
            node=cursor.node,
            state=RowState(sampling, job.generators[index], history),
            stream=self.codec.stream(sampling.stop),
            most=min(sampling.max_tokens, self.context - len(cursor.tokens)),
        )

    # -- prefill --------------------------------------------------------------------------------

    def _open_piece(self, job: PrefillJob) -> None:
        assert job.base is not None
        share = job.shares.pop(0)
        self.tree.evict(self.budget.missing(share))
        job.tail = self.runner.tail([job.base], job.cuts[0] - job.base.end, share)

    def _advance_prefill(self, job: PrefillJob, logits: Tensor) -> None:
        assert job.base is not None and job.tail is not None
        if job.computed < job.cuts[0]:
            return
        tokens = job.tokens[job.base.end : job.cuts[0]]
        (payload,) = job.tail.part([0], [])
        job.tail.close()
        node = self.tree.insert(job.base, tokens, payload, job.depth)
        self.tree.pin(node)
        self.tree.unpin(job.base)
        job.base = node
        job.cuts.pop(0)
        if job.cuts:
            self._open_piece(job)
            return
        self.prefills.remove(job)
        self.tree.ref(node)
        self.tree.unpin(node)
        job.base = job.tail = None
        cursor = Cursor(job.tokens, node, logits[0].clone(), job.depth)
        if job.done.cancelled():
            self.tree.unref(node)
        else:
            job.done.set_result(cursor)

    def _end_prefill(self, job: PrefillJob) -> None:
        if job.tail is not None:
            job.tail.close()
        if job.base is not None:
            self.tree.unpin(job.base)
        self.budget.settle(sum(job.shares))
        job.base, job.tail, job.shares = None, None, []

    # -- decode ---------------------------------------------------------------------------------

    def _draw(self, job: DecodeJob) -> None:
        """Draw the next token of each row that has logits; rows that end leave the batch."""
        if job.logits is None:
            return
        logits, job.logits = job.logits, None
        drawn = self.sampler.sample(logits, [row.state for row in job.rows])
        scores = job.score(logits.float().log_softmax(-1)).tolist()
        for row, token, logprob, score in zip(job.rows, drawn.tokens, drawn.logprobs, scores, strict=True):
            self._accept(job, row, token, logprob, score)
        if any(row.finish_reason for row in job.rows):
            self._part(job)

    def _accept(self, job: DecodeJob, row: Row, token: int, logprob: float, score: float) -> None:
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.scores.append(score)
        job.ledger.completion_tokens += 1
        text = ""
        if token in self.codec.eos_token_ids and not job.sampling.ignore_eos:
            row.finish_reason = "eos"
        else:
            text = row.stream.push(token)
            if row.stream.stopped:
                row.finish_reason = "stop"
            elif len(row.tokens) >= row.most:
                row.finish_reason = "length"
        if row.finish_reason is not None:
            text += row.stream.finish()
        if job.on_token is not None:
            job.on_token(row.index, token, text)

    def _part(self, job: DecodeJob) -> None:
        """Take the rows that ended out of the batch and hand them over."""
        assert job.tail is not None
        ended = [i for i, row in enumerate(job.rows) if row.finish_reason is not None]
        kept = [i for i, row in enumerate(job.rows) if row.finish_reason is None]
        has_kv = job.tail.length > 0
        payloads = job.tail.part(ended if has_kv else [], kept)
        rows = job.rows
        job.rows = [rows[i] for i in kept]
        for order, i in enumerate(ended):
            row = rows[i]
            assert row.finish_reason is not None
            node = row.node
            depth = row.base.depth + 1
            if has_kv:  # the last token has no KV: nothing came after it
                node = self.tree.insert(row.node, tuple(row.tokens[:-1]), payloads[order], depth)
            self.tree.ref(node)
            cursor = Cursor(row.base.tokens + tuple(row.tokens), node, None, depth)
            job.ledger.cursors.add(cursor)
            self.tree.unpin(row.node)
            job.finished.put_nowait(row.completion(row.finish_reason, cursor))
        if not job.rows:
            self.decodes.remove(job)
            self._end_decode(job)

    def _end_decode(self, job: DecodeJob) -> None:
        if job.tail is not None:
            job.tail.close()
        for row in job.rows:
            self.tree.unpin(row.node)
            row.stream.finish()
        job.tail = job.logits = None

    # -- the pass -------------------------------------------------------------------------------

    def _runs(self) -> list[tuple[Job, Run]]:
        runs: list[tuple[Job, Run]] = []
        for job in self.decodes:
            assert job.tail is not None
            self._grow(job, 1)
            runs.append((job, Run(job.tail, [[row.tokens[-1]] for row in job.rows], [row.node for row in job.rows])))
        room = self.config.prefill_chunk if self.runner.chunked else None
        for prefill in self.prefills:
            assert prefill.tail is not None and prefill.base is not None
            width = prefill.cuts[0] - prefill.computed
            if room is not None:
                width = min(width, room)
                room -= width
            if width == 0:
                break
            start = prefill.computed
            self._grow(prefill, width)
            last = start + width == len(prefill.tokens)
            piece = list(prefill.tokens[start : start + width])
            runs.append((prefill, Run(prefill.tail, [piece], [prefill.base], wants_logits=last)))
        return runs

    def _grow(self, job: Job, tokens: int) -> None:
        assert job.tail is not None
        self.tree.evict(self.budget.missing(job.tail.growth(tokens)))
        job.tail.grow(tokens)

    def _observe(self, job: Job) -> None:
        """Note what the job's request holds now."""
        if not isinstance(job, DecodeJob) or job.tail is None:
            return
        ends = [row.node for row in job.rows] + job.ledger.finished()
        paths = {id(node): node for end in ends for node in end.path()}
        held = sum(node.payload.nbytes for node in paths.values() if node.payload is not None) + job.tail.nbytes
        shared = 0
        if self.runner.shares:
            shared = sum(end.end for end in ends) - sum(len(node.tokens) for node in paths.values())
        job.ledger.saw(held, held + shared * self.runner.token_bytes, shared)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
