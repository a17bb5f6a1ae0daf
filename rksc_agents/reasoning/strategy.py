"""What a strategy is, and what it works with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from rksc_agents.config import Config, Sampling
from rksc_agents.engine.cursor import Completion, Cursor
from rksc_agents.engine.session import Decoding, Session
from rksc_agents.errors import ConfigError
from rksc_agents.model.thinking import split_thinking
from rksc_agents.reasoning.answers import EXTRACTORS, AnswerExtractor
from rksc_agents.reasoning.voting import Ballot
from rksc_agents.types import Branch, BranchEnd, BranchToken, Event, Vote, VoteChanged
from rksc_agents.verify.confidence import Confidence, confidence


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy settled on: the winning branch's index, its answer, and the votes if there were any."""

    winner: int
    answer: str | None
    votes: tuple[Vote, ...] = ()


class Strategy(Config):
    """Base of all strategies: a frozen object with settings and one coroutine, :meth:`solve`.

    Attributes
    ----------
    name : str
        The strategy's name in results, the command line and JSON.
    confidence : str or Confidence, default "mean-top-probability"
        How sure a branch was of itself; see :mod:`rksc_agents.verify.confidence`.
    extract : str or callable, default "auto"
        Finds the answer in a branch's text; see :mod:`rksc_agents.reasoning.answers`.
    """

    name: ClassVar[str]

    confidence: str | Confidence = "mean-top-probability"
    extract: str | AnswerExtractor = "auto"

    def model_post_init(self, _: object) -> None:
        self.measure  # noqa: B018  (raises where the name is unknown)
        self.extractor  # noqa: B018

    @property
    def measure(self) -> Confidence:
        """The confidence measure that `confidence` names."""
        return confidence(self.confidence)

    @property
    def extractor(self) -> AnswerExtractor:
        """The extractor that `extract` names."""
        if not isinstance(self.extract, str):
            return self.extract
        if self.extract not in EXTRACTORS:
            raise ConfigError(f"extract = {self.extract!r}: give one of {', '.join(sorted(EXTRACTORS))}, or a function")
        return EXTRACTORS[self.extract]

    @abstractmethod
    async def solve(self, problem: Problem) -> Outcome:
        """Answer `problem` with its verbs; runs in the engine's thread and must not block."""


@dataclass(eq=False)
class Problem:
    """One request as a strategy sees it: the engine's verbs, with branches instead of completions.

    Attributes
    ----------
    session : Session
        The engine's verbs.
    tokens : tuple of int
        The prompt.
    sampling : Sampling
        How tokens are drawn.
    cursors : dict of int to Cursor
        Where each branch that ended can go on from.
    """

    session: Session
    tokens: tuple[int, ...]
    sampling: Sampling
    measure: Confidence
    extractor: AnswerExtractor
    thinking_opened: bool = False
    emit: Callable[[Event], None] | None = None
    cursors: dict[int, Cursor] = field(default_factory=dict)
    _ended_at: dict[int, Branch] = field(default_factory=dict)
    _forked: int = 0

    @property
    def branches(self) -> list[Branch]:
        """Branches that ended or were cancelled so far, in the order they were forked."""
        return [self._ended_at[index] for index in sorted(self._ended_at)]

    async def prefill(self) -> Cursor:
        """The prompt's end, ready to be forked."""
        return await self.session.prefill(self.tokens)

    @asynccontextmanager
    async def branching(self, cursors: list[Cursor]) -> AsyncIterator[AsyncIterator[tuple[int, Branch]]]:
        """Decode from each cursor; iterate for `(index, branch)` in the order in which the branches end.

        What still runs when the block ends is cancelled; `branches` then holds all of them.
        """
        first, self._forked = self._forked, self._forked + len(cursors)
        done: dict[int, Branch] = {}
        on_token = None
        if self.emit is not None:
            emit = self.emit

            def on_token(index: int, token: int, text: str) -> None:
                emit(BranchToken(first + index, token, text))

        run = self.session.decoding(cursors, self.sampling, score=self.measure.per_token, on_token=on_token)
        async with run:
            yield self._ended(run, first, done)
        for completion in run.completions:
            self._ended_at[first + completion.index] = done.get(completion.index) or await self._end(first, completion)

    async def _ended(self, run: Decoding, first: int, done: dict[int, Branch]) -> AsyncIterator[tuple[int, Branch]]:
        async for completion in run:
            branch = done[completion.index] = await self._end(first, completion)
            yield first + completion.index, branch

    async def _end(self, first: int, completion: Completion) -> Branch:
        thinking, text = split_thinking(completion.text, opened=self.thinking_opened)
        answer = None
        if completion.finish_reason != "cancelled":  # a text that was cut short has no answer yet
            answer = await self.session.call(self.extractor, text)
        branch = Branch(
            text=text,
            thinking=thinking,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            confidence=self.measure.of_branch(completion.scores, completion.logprobs),
            finish_reason=completion.finish_reason,
            answer=answer,
        )
        if completion.cursor is not None:
            self.cursors[first + completion.index] = completion.cursor
        if self.emit is not None:
            self.emit(BranchEnd(first + completion.index, branch.finish_reason, text, answer))
        return branch

    def voted(self, ballot: Ballot) -> None:
        """Tell whoever watches how the vote stands."""
        if self.emit is not None:
            self.emit(VoteChanged(ballot.standing()))

    def surest(self, among: tuple[int, ...] | None = None) -> int:
        """The index of the most confident branch (of those in `among`); the earliest of equals."""
        indices = range(len(self.branches)) if among is None else among
        ended = [i for i in indices if self.branches[i].finish_reason != "cancelled"] or list(indices)
        return max(ended, key=lambda i: (self.branches[i].confidence, -i))
