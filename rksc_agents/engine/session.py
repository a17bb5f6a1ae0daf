"""The verbs of one request: what a strategy awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from torch import Tensor

from rksc_agents.config import Sampling
from rksc_agents.engine.cursor import Completion, Cursor, Graft
from rksc_agents.engine.decoding import Decoding, Score, top_probability
from rksc_agents.engine.jobs import Doubt, OnToken
from rksc_agents.engine.ledger import Ledger
from rksc_agents.engine.probe import Groups, Reading
from rksc_agents.engine.scheduler import Scheduler
from rksc_agents.engine.work import Work, all_of
from rksc_agents.errors import ConfigError, PromptTooLongError
from rksc_agents.model.exits import ExitRule
from rksc_agents.model.sampling import Sampler
from rksc_agents.model.text import TextCodec
from rksc_agents.types import Quantization

P = ParamSpec("P")
T = TypeVar("T")


class Session:
    """One request's view of the engine. A strategy awaits its verbs and never touches a tensor.

    Every cursor it hands out is released when the request ends, whatever happened.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._work = Work(scheduler)
        self._evicted_before = scheduler.tree.evicted
        self._next_generator = 0

    @property
    def ledger(self) -> Ledger:
        """What the request took so far."""
        return self._work.ledger

    @property
    def codec(self) -> TextCodec:
        """The model's text."""
        return self._work.scheduler.codec

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return self._work.scheduler.runner.depth

    @property
    def readable(self) -> bool:
        """Whether a probe can look at middle layers."""
        return self._work.scheduler.runner.readout is not None

    @property
    def quantization(self) -> Quantization | None:
        """What 8-bit weights changed, where there are any."""
        return self._work.scheduler.runner.quantization

    @property
    def kv_limit(self) -> int:
        """The KV budget in bytes."""
        return self._work.scheduler.budget.limit

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token."""
        return self._work.scheduler.runner.token_bytes

    @property
    def context(self) -> int:
        """The model's context in tokens."""
        return self._work.scheduler.context

    async def prefill(self, tokens: Sequence[int], *, keep: bool = True, counted: bool = True) -> Cursor:
        """Put the KV of `tokens` into the tree, computing only what is not there.

        Parameters
        ----------
        tokens : sequence of int
            The whole sequence, at least one token.
        keep : bool, default True
            Keep it as a cached prefix for later requests.
        counted : bool, default True
            Count its tokens as the request's prompt.

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
        cursor = await self._work.prefill(tuple(tokens), depth=0, why="prompt" if counted else "continue")
        if keep:
            self._work.scheduler.tree.keep(cursor.node)
        return cursor

    def cached(self, tokens: Sequence[int], limit: int) -> Cursor:
        """A cursor at the longest prefix of `tokens` with KV, at most `limit` tokens long; computes nothing."""
        node = self._work.scheduler.tree.match(tokens, limit).node
        cursor = Cursor(tuple(tokens[: node.end]), node)
        self._work.scheduler.tree.ref(node)
        self.ledger.cursors.add(cursor)
        return cursor

    async def transplant(self, source: Cursor, tokens: Sequence[int], pairs: Sequence[tuple[int, int]]) -> Cursor:
        """Put a prompt's KV into the tree that takes tokens from another prompt, at other positions (ASKS "aligned").

        Parameters
        ----------
        source : Cursor
            The prompt that tokens are taken from.
        tokens : sequence of int
            The whole prompt.
        pairs : sequence of (int, int)
            Position in `tokens` and position in the source of each token that is taken, ascending; not the last one.

        Returns
        -------
        Cursor
            With the logits after the last token; its `graft` says what was taken, None where the tree had all that
            was to be taken, so that the result is exact.

        Raises
        ------
        ConfigError
            If the source is not exact itself, or the pairs are not as said.
        UnsupportedModelError
            If the model's keys do not turn with their position.
        """
        if source.released or source.graft is not None:
            raise ConfigError("tokens can be taken from a prompt that was prefilled and is still held: prefill it anew")
        if not 0 < len(tokens) < self.context:
            raise PromptTooLongError(len(tokens), self.context)
        graft = Graft(source.tokens, tuple(tokens), tuple(pairs))
        last = -1
        for at, taken in graft.pairs:
            if not (
                last < at < len(tokens) - 1 and 0 <= taken < len(source.tokens) and tokens[at] == source.tokens[taken]
            ):
                raise ConfigError(
                    f"pairs holds ({at}, {taken}): give ascending positions of the {len(tokens)} tokens but the last, "
                    f"and positions of the same tokens among the source's {len(source.tokens)}"
                )
            last = at
        return await self._work.transplant(source, graft, "prompt")

    async def exact(self, cursor: Cursor) -> Cursor:
        """The same sequence on exact KV: the cursor itself, or a fresh one where its prompt took KV from elsewhere.

        The tokens computed for it are none of the prompt's; like any branch it lacks the KV of its last token.
        """
        if cursor.graft is None:
            return cursor
        fresh = await self._work.prefill(cursor.tokens[:-1], depth=cursor.depth, why="continue")
        fresh.tokens, fresh.logits, fresh.constraint = cursor.tokens, None, cursor.constraint
        return fresh

    def fork(self, cursor: Cursor, n: int) -> list[Cursor]:
        """Make `n` cursors at the place of `cursor`. Computes and copies nothing."""
        if cursor.released:
            raise ConfigError("a released cursor cannot be forked: release it after its last use")
        forks = [Cursor(cursor.tokens, cursor.node, cursor.logits, cursor.depth) for _ in range(n)]
        for fork in forks:
            fork.graft, fork.constraint = cursor.graft, cursor.constraint
            self._work.scheduler.tree.ref(fork.node)
        self.ledger.cursors.update(forks)
        return forks

    def decoding(
        self,
        cursors: Sequence[Cursor],
        sampling: Sampling,
        *,
        score: Score = top_probability,
        on_token: OnToken | None = None,
        doubt: Doubt | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> Decoding:
        """Decode from each cursor, one branch each, within its grammar if it has one; see :class:`Decoding`.

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
        doubt : callable or None
            Called in the engine's thread after each token that does not end its branch, with the branch's scores and
            log-probabilities so far; true ends the branch with the finish reason "unsure". Must not block.
        shown : frozenset of int, default empty
            Special tokens whose text is kept, such as the markers of tool calls.
        """
        if any(cursor.released for cursor in cursors):
            raise ConfigError("a released cursor cannot be decoded: release it after its last use")
        first = self._next_generator
        self._next_generator += len(cursors)
        generators = [Sampler.generator(sampling.seed, first + i) for i in range(len(cursors))]
        return Decoding(
            self._work, list(cursors), sampling, generators, score=score, on_token=on_token, doubt=doubt, shown=shown
        )

    async def decode(
        self,
        cursors: Sequence[Cursor],
        sampling: Sampling,
        *,
        score: Score = top_probability,
        on_token: OnToken | None = None,
        doubt: Doubt | None = None,
    ) -> list[Completion]:
        """Decode from each cursor until every branch has ended; the completions come in the cursors' order."""
        async with self.decoding(cursors, sampling, score=score, on_token=on_token, doubt=doubt) as run:
            async for _ in run:
                pass
        return run.completions

    async def probe(
        self,
        cursors: Sequence[Cursor],
        extensions: Sequence[Sequence[int]],
        groups: Groups,
        *,
        exit_rule: ExitRule | None = None,
    ) -> list[Reading]:
        """Extend sequences for the time of one pass, and read how likely each group of tokens comes next.

        Nothing is written to the tree. What a sequence lacks of its own KV (a finished branch's last token, or all of
        it after an eviction) is computed too.

        Parameters
        ----------
        cursors : sequence of Cursor
            The sequences.
        extensions : sequence of sequence of int
            The tokens that follow each.
        groups : tuple of tuple of int
            Groups of target tokens, such as the forms of YES and the forms of NO.
        exit_rule : ExitRule or None
            When the pass may end before the last layer; None for never.

        Returns
        -------
        list of Reading
            `values` hold the log-sum-exp of each group's logits.

        Raises
        ------
        ConfigError
            If a cursor was released, or an extension is empty.
        PromptTooLongError
            If a sequence does not fit the model's context with its extension.
        UnsupportedModelError
            If there is an exit rule and the model's passes cannot end early.
        """
        pairs = list(zip(cursors, extensions, strict=True))
        for cursor, extension in pairs:
            _check_probe(cursor, extension)
        with self.ledger.spending("verify"):
            readings = await all_of([self._work.probe(c, e, groups=groups, rule=exit_rule) for c, e in pairs])
        return [reading if reading.logits is None else _grouped(reading, groups) for reading in readings]

    async def logits_along(self, cursor: Cursor, tokens: Sequence[int]) -> Tensor:
        """Logits [len(tokens), vocabulary] after each of `tokens`, read in that order after the cursor's sequence."""
        _check_probe(cursor, tokens)
        reading = await self._work.probe(cursor, tokens, wanted=len(tokens))
        assert reading.logits is not None
        return reading.logits

    def score(self, cursor: Cursor, score: float) -> None:
        """Tell how good a branch is: under a tight budget the KV of deep and doubtful ones goes first (RSBCM).

        Parameters
        ----------
        cursor : Cursor
            Where the branch stands.
        score : float
            From 0 to 1.
        """
        if not 0.0 <= score <= 1.0:
            raise ConfigError(f"score = {score!r} of a branch: give a number from 0 to 1")
        cursor.score = score
        if cursor.node.alive:
            cursor.node.score = score

    def keep(self, cursor: Cursor) -> None:
        """Keep the cursor's KV as a cached prefix for later requests, such as the next turn."""
        if cursor.node.alive and cursor.graft is None:  # a private node is never found again
            self._work.scheduler.tree.keep(cursor.node)

    def release(self, cursor: Cursor) -> None:
        """Give up a cursor. KV that nobody else claims is freed at once."""
        self._work.release(cursor)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run user code in a thread of its own, so that it does not stall the engine."""
        return await asyncio.to_thread(function, *args, **kwargs)

    def evicted(self) -> int:
        """How many nodes were evicted since the request began."""
        return self._work.scheduler.tree.evicted - self._evicted_before

    def close(self) -> None:
        """Release every cursor."""
        for cursor in list(self.ledger.cursors):
            self.release(cursor)

    async def ready(self, cursor: Cursor) -> None:
        """Compute what a cursor lacks to be decoded: KV that was evicted, or its logits."""
        await self._work.ready([cursor])


def _check_probe(cursor: Cursor, extension: Sequence[int]) -> None:
    if cursor.released:
        raise ConfigError("a released cursor cannot be probed: release it after its last use")
    if not extension:
        raise ConfigError("a probe without a token: give at least one token that follows the sequence")


def _grouped(reading: Reading, groups: Groups) -> Reading:
    assert reading.logits is not None
    last = reading.logits[-1].float()
    values = tuple(last[list(group)].logsumexp(0).item() for group in groups)
    return Reading(None, values, reading.layers, reading.tokens)
