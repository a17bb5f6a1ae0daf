"""Rows on their way to an end, a token per step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rksc_agents.engine.cursor import Cursor
from rksc_agents.engine.jobs import DecodeJob, Row
from rksc_agents.engine.space import Space, Verdict
from rksc_agents.model.plan import Run
from rksc_agents.model.sampling import RowState, Sampler, TokenHistory
from rksc_agents.model.text import TextCodec


class EvictedError(Exception):
    """A cursor's KV was evicted before its decoding was admitted; it has to be prefilled again."""


class Decodes:
    """The decode jobs that run.

    Parameters
    ----------
    space : Space
        Where the KV goes.
    codec : TextCodec
        Decodes tokens and knows which end a branch.
    context : int
        The model's context in tokens.
    max_rows : int
        Rows that run at once, unless a single job has more.
    """

    def __init__(self, space: Space, codec: TextCodec, context: int, max_rows: int) -> None:
        self.space = space
        self.codec = codec
        self.context = context
        self.max_rows = max_rows
        self.sampler = Sampler()
        self.jobs: list[DecodeJob] = []

    def most_bytes(self, job: DecodeJob) -> int:
        """Bytes the job holds at its peak, with everything on its paths, also what is evicted now."""
        ends = [cursor.node.end for cursor in job.cursors]
        rows = self.space.runner.most_bytes(ends, self._most(job))
        return self.space.path_bytes(job.cursors) + rows

    def _most(self, job: DecodeJob) -> int:
        """KV tokens a row of the job holds at most; its last token's KV is never computed."""
        longest = min(job.sampling.max_tokens, self.context - min(len(cursor.tokens) for cursor in job.cursors))
        return max(1, longest - 1)

    def admit(self, job: DecodeJob) -> Verdict:
        """Let the job run if there is room for its rows."""
        running = sum(len(other.rows) for other in self.jobs)
        if running and running + len(job.cursors) > self.max_rows:
            return "full"
        if not all(cursor.ready for cursor in job.cursors):
            job.finished.put_nowait(EvictedError())
            return "failed"
        bases = [cursor.node for cursor in job.cursors]
        most = self._most(job)
        needed = self.space.runner.most_bytes([base.end for base in bases], most)
        if not self.space.reserve(bases, needed):
            return "full"
        job.rows = [self._row(job, index, cursor) for index, cursor in enumerate(job.cursors)]
        self.jobs.append(job)  # from here on `end` gives everything back
        try:
            job.tail = self.space.tail(bases, most, needed)
        except BaseException:
            self.space.budget.settle(needed)
            raise
        job.logits = torch.stack([cursor.logits for cursor in job.cursors if cursor.logits is not None])
        job.ledger.start()
        self.observe(job)
        return "running"

    def _row(self, job: DecodeJob, index: int, cursor: Cursor) -> Row:
        history = TokenHistory(cursor.tokens if job.sampling.repetition_penalty != 1.0 else ())
        return Row(
            index=index,
            base=cursor,
            node=cursor.node,
            state=RowState(job.sampling, job.generators[index], history),
            stream=self.codec.stream(job.sampling.stop, shown=job.shown),
            most=min(job.sampling.max_tokens, self.context - len(cursor.tokens)),
            constraint=cursor.constraint.fork() if cursor.constraint is not None else None,
        )

    def run(self, job: DecodeJob) -> Run:
        """What the job computes in this step: each row's newest token."""
        assert job.tail is not None
        self.space.grow(job.tail, 1)
        return Run(job.tail, [[row.tokens[-1]] for row in job.rows], [row.node for row in job.rows])

    def draw(self, job: DecodeJob) -> None:
        """Draw the next token of each row that has logits; rows that end leave the batch."""
        if job.logits is None:
            return
        logits, job.logits = job.logits, None
        drawn = self.sampler.sample(logits, [row.state for row in job.rows], _allowed(job.rows, logits))
        every = logits.float().log_softmax(-1)
        tokens = [_taken(row, token) for row, token in zip(job.rows, drawn.tokens, strict=True)]
        logprobs = [
            known if token == kept else every[at, kept].item()
            for at, (token, kept, known) in enumerate(zip(drawn.tokens, tokens, drawn.logprobs, strict=True))
        ]
        scores = job.score(every).tolist()
        for row, token, logprob, score in zip(job.rows, tokens, logprobs, scores, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.scores.append(score)
            job.ledger.completion_tokens += 1
            text = self._read(job, row, token)
            row.pieces.append(text)
            if job.on_token is not None:
                job.on_token(row.index, token, text)
        if any(row.finish_reason for row in job.rows):
            self._part(job)

    def _read(self, job: DecodeJob, row: Row, token: int) -> str:
        """Decode a row's new token and see whether it ends the row."""
        if token in self.codec.eos_token_ids and not job.sampling.ignore_eos:
            row.finish_reason = "eos"
            return row.stream.finish()
        text = row.stream.push(token)
        if row.stream.stopped:
            row.finish_reason = "stop"
        elif row.constraint is not None and row.constraint.done:  # the model could only end it now
            row.finish_reason = "eos"
        elif len(row.tokens) >= row.most:
            row.finish_reason = "length"
        elif job.doubt is not None and job.doubt(row.scores, row.logprobs):
            row.finish_reason = "unsure"
        return text if row.finish_reason is None else text + row.stream.finish()

    def _part(self, job: DecodeJob) -> None:
        """Take the rows that ended out of the batch and hand them over."""
        assert job.tail is not None
        ended = [i for i, row in enumerate(job.rows) if row.finish_reason is not None]
        kept = [i for i, row in enumerate(job.rows) if row.finish_reason is None]
        has_kv = job.tail.length > 0
        payloads = iter(job.tail.part(ended if has_kv else [], kept))
        rows, job.rows = job.rows, [job.rows[i] for i in kept]
        tree = self.space.tree
        for row in (rows[i] for i in ended):
            assert row.finish_reason is not None
            node, depth = row.node, row.base.depth + 1
            if has_kv:  # the last token has no KV: nothing came after it
                node = tree.insert(row.node, tuple(row.tokens[:-1]), next(payloads), depth)
            tree.ref(node)
            tree.unpin(row.node)
            cursor = Cursor(row.base.tokens + tuple(row.tokens), node, None, depth)
            cursor.graft, cursor.constraint = row.base.graft, row.constraint
            job.ledger.cursors.add(cursor)
            job.finished.put_nowait(row.completion(row.finish_reason, cursor))
        if not job.rows:
            self.end(job)

    def end(self, job: DecodeJob) -> None:
        """Take a job out and free what its rows hold beside the tree."""
        self.jobs.remove(job)
        if job.tail is not None:
            job.tail.close()
        for row in job.rows:
            self.space.tree.unpin(row.node)
        job.tail = job.logits = None

    def observe(self, job: DecodeJob) -> None:
        """Note what the job's request holds now."""
        assert job.tail is not None
        ends = [row.node for row in job.rows] + job.ledger.finished()
        self.space.saw(job.ledger, ends, job.tail.nbytes)


def _taken(row: Row, token: int) -> int:
    """The row's next token: the one that was drawn, or one that ends its grammar in time."""
    return token if row.constraint is None else row.constraint.take(token, row.most - len(row.tokens))


def _allowed(rows: Sequence[Row], logits: Tensor) -> Tensor | None:
    """The tokens that each row's grammar allows, [rows, vocabulary]; None where no row has one."""
    if all(row.constraint is None for row in rows):
        return None
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for at, row in enumerate(rows):
        if row.constraint is not None:
            allowed[at] = torch.from_numpy(row.constraint.mask(logits.shape[-1]))
    return allowed.to(logits.device)
