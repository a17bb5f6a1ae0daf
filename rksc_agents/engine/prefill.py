"""Prompts on their way into the tree, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rksc_agents.engine.cursor import Cursor
from rksc_agents.engine.decode import EvictedError
from rksc_agents.engine.jobs import PrefillJob
from rksc_agents.engine.space import Space, Verdict
from rksc_agents.model.plan import Run


class Prefills:
    """The prefill jobs that run.

    Parameters
    ----------
    space : Space
        Where the KV goes.
    chunk : int
        Tokens per step, over all jobs.
    """

    def __init__(self, space: Space, chunk: int) -> None:
        self.space = space
        self.chunk = chunk
        self.jobs: list[PrefillJob] = []

    def most_bytes(self, job: PrefillJob) -> int:
        """Bytes the job holds at its peak if nothing of it is there yet."""
        return sum(self._shares(self._cuts(job, 0, 0), 0))

    def _cuts(self, job: PrefillJob, start: int, known: int) -> list[int]:
        """Where nodes end: at the sequence's end, and where a model with recurrent states can go on from later."""
        total = len(job.tokens)
        cuts = {total} if self.space.runner.splittable else {known, total - 1, total}
        return sorted(cut for cut in cuts if cut > start)

    def _shares(self, cuts: list[int], start: int) -> list[int]:
        """Bytes each piece takes at most."""
        most_bytes = self.space.runner.most_bytes
        return [most_bytes([at], cut - at) for at, cut in zip([start, *cuts[:-1]], cuts, strict=True)]

    def admit(self, job: PrefillJob) -> Verdict:
        """Let the job run, unless another computes tokens now that it can reuse, or there is no room."""
        if job.under is not None and not job.under.alive:
            raise EvictedError
        space, total = self.space, len(job.tokens)
        # At least one token is computed: its logits are what decoding starts from.
        match = space.tree.match(job.tokens, total - 1, under=job.under)
        base, known = match.node, match.node.end + match.beyond
        alike = (other.tokens for other in self.jobs if other.under is job.under)
        if any(min(_common_length(job.tokens, tokens), total - 1) > known for tokens in alike):
            return "later"
        job.cuts = self._cuts(job, base.end, known)
        shares = self._shares(job.cuts, base.end)
        if not space.reserve([base], sum(shares)):
            return "full"
        job.base, job.shares = base, shares
        if job.why == "evicted":
            job.ledger.recomputed += total - base.end
        elif job.why == "prompt":
            job.ledger.prompt_tokens += total
            job.ledger.prompt_tokens_reused += base.end
        self.jobs.append(job)
        self._open_piece(job)
        return "running"

    def _open_piece(self, job: PrefillJob) -> None:
        assert job.base is not None
        job.tail = self.space.tail([job.base], job.cuts[0] - job.base.end, job.shares[0])
        job.shares.pop(0)  # the tail has it now

    def run(self, job: PrefillJob, taken: int) -> Run | None:
        """What the job computes in this step, in which other prompts have taken `taken` tokens; None if nothing."""
        assert job.tail is not None and job.base is not None
        start = job.computed
        width = job.cuts[0] - start
        if self.space.runner.chunked:
            width = min(width, self.chunk - taken)
        if width <= 0:
            return None
        self.space.grow(job.tail, width)
        last = start + width == len(job.tokens)
        return Run(job.tail, [list(job.tokens[start : start + width])], [job.base], wanted=int(last))

    def advance(self, job: PrefillJob, logits: Tensor) -> None:
        """Seal a piece that is complete, and hand over the cursor after the last one."""
        assert job.base is not None and job.tail is not None
        if job.computed < job.cuts[0]:
            return
        tree = self.space.tree
        (payload,) = job.tail.part([0], [])
        job.tail.close()
        node = tree.insert(job.base, job.tokens[job.base.end : job.cuts[0]], payload, job.depth)
        tree.pin(node)
        tree.unpin(job.base)
        job.base, job.tail = node, None
        job.cuts.pop(0)
        if job.cuts:
            self._open_piece(job)
            return
        if not job.done.done():
            tree.ref(node)
            cursor = Cursor(job.tokens, node, logits[0].clone(), job.depth)
            job.ledger.cursors.add(cursor)  # here, since whoever waits may be cancelled before it hears of it
            job.done.set_result(cursor)
        self.end(job)

    def end(self, job: PrefillJob) -> None:
        """Take a job out and free what it holds beside the tree."""
        self.jobs.remove(job)
        if job.tail is not None:
            job.tail.close()
        if job.base is not None:
            self.space.tree.unpin(job.base)
        self.space.budget.settle(sum(job.shares))
        job.base, job.tail, job.shares = None, None, []


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
