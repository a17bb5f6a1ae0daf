"""One request as a strategy sees it: the engine's verbs, with branches instead of completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rksc_agents.config import Sampling, Sharing
from rksc_agents.engine.asks import Root, audit, roots
from rksc_agents.engine.cursor import Completion, Cursor
from rksc_agents.engine.decoding import Decoding
from rksc_agents.engine.jobs import Doubt
from rksc_agents.engine.session import Session
from rksc_agents.events import BranchEnd, BranchToken, BranchVerified, Event, VoteChanged
from rksc_agents.model.constraint import Constraint
from rksc_agents.model.live import thinking_length
from rksc_agents.model.thinking import split_thinking
from rksc_agents.reasoning.judging import judge
from rksc_agents.reasoning.reading import Reader, Said
from rksc_agents.reasoning.universal import name_best
from rksc_agents.reasoning.voting import Ballot
from rksc_agents.types import Branch, Prompt, SharingRecord, Verdict
from rksc_agents.verify.confidence import Confidence
from rksc_agents.verify.gates import ExitConfig
from rksc_agents.verify.verifier import Verifier


@dataclass(frozen=True, slots=True)
class Settings:
    """How a request is to be answered.

    Attributes
    ----------
    sampling : Sampling
        How tokens are drawn.
    measure, reader, verifier
        What tells how sure a branch was, reads what it said, and says how right it is.
    exits : ExitConfig
        When verification is skipped or stops early.
    sharing : Sharing
        What branches with other prompts take from the first one's KV.
    differing : tuple of str
        What is not as the certificate behind `exits` was made for; told when something is verified.
    constraint : Constraint or None
        The grammar that every branch follows.
    like : tuple of tuple of int
        Earlier prompts whose cached KV the first prompt may take, with sharing "aligned".
    """

    sampling: Sampling
    measure: Confidence
    reader: Reader
    verifier: Verifier
    exits: ExitConfig
    sharing: Sharing
    differing: tuple[str, ...] = ()
    constraint: Constraint | None = None
    like: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Life:
    """When a branch ran, in seconds since the request was submitted, and what came of it token by token."""

    start_s: float
    end_s: float
    completion: Completion


@dataclass(eq=False)
class Problem:
    """A question with everything that a strategy may do about it.

    Attributes
    ----------
    session : Session
        The engine's verbs.
    question : str or sequence of messages
        What was asked.
    prompts : list of tuple of int
        The prompt, then other phrasings of it; branches take them in turn.
    settings : Settings
        How it is to be answered.
    thinking_opened : bool, default False
        Whether the prompt ends inside thinking markers.
    emit : callable or None
        Called with each event, in the engine's thread; None where nobody watches.
    cursors : dict of int to Cursor
        Where each branch that ended can go on from.
    lives : dict of int to Life
        When each branch ran.
    pruned : set of int
        Branches that a search gave up without going on from them.

    Examples
    --------
    See :class:`Strategy`, whose coroutine gets one.

    >>> Problem.verify.__name__
    'verify'
    """

    session: Session
    question: Prompt
    prompts: Sequence[tuple[int, ...]]
    settings: Settings
    thinking_opened: bool = False
    emit: Callable[[Event], None] | None = None
    cursors: dict[int, Cursor] = field(default_factory=dict)
    lives: dict[int, Life] = field(default_factory=dict)
    pruned: set[int] = field(default_factory=set)
    _ended_at: dict[int, Branch] = field(default_factory=dict)
    _said: dict[int, Said] = field(default_factory=dict)
    _parents: dict[int, int | None] = field(default_factory=dict)
    _roots: list[Root] = field(default_factory=list)
    _started: list[Root] = field(default_factory=list)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def branches(self) -> list[Branch]:
        """Branches that ended or were cancelled so far, in the order they were forked."""
        return [self._ended_at[index] for index in sorted(self._ended_at)]

    def branch(self, index: int) -> Branch:
        """A branch that ended or was cancelled."""
        return self._ended_at[index]

    # -- growing --------------------------------------------------------------------------------

    async def start(self, count: int) -> list[Cursor]:
        """Cursors for `count` new branches at their prompts' ends, ready to be decoded."""
        async with self._lock:  # two groups may start at once
            wanted = self.prompts[: len(self._started) + count]  # what no branch is asked is not computed
            self._roots = await roots(self.session, wanted, self.settings.sharing, self._roots, self.settings.like)
            chosen = [self._roots[(len(self._started) + i) % len(self.prompts)] for i in range(count)]
            self._started += chosen
        cursors = [self.session.fork(root.cursor, 1)[0] for root in chosen]
        for cursor in cursors:
            cursor.constraint = self.settings.constraint
        return cursors

    @asynccontextmanager
    async def branching(
        self,
        cursors: Sequence[Cursor],
        doubt: Doubt | None = None,
        *,
        parents: Sequence[int | None] | None = None,
        sampling: Sampling | None = None,
    ) -> AsyncIterator[AsyncIterator[tuple[int, Branch]]]:
        """Decode from each cursor; iterate for `(index, branch)` in the order in which the branches end.

        What still runs when the block ends is cancelled; `branches` then holds all of them.

        Parameters
        ----------
        cursors : sequence of Cursor
            From :meth:`start`, or from :attr:`cursors` to go on from branches that ended.
        doubt : callable or None
            Ends a branch as "unsure", from its token scores and log-probabilities so far.
        parents : sequence of int or None
            The branches that the new ones go on from; None where they start at the prompt. A branch that ends before a
            stop text which is not the request's own is then a step of a line, and has no answer yet.
        sampling : Sampling or None
            Instead of the request's own.
        """
        first = len(self._parents)
        above = list(parents) if parents is not None else [None] * len(cursors)
        self._parents.update({first + i: parent for i, parent in enumerate(above)})
        done: dict[int, Branch] = {}
        began = self.session.ledger.now
        on_token = None
        if self.emit is not None:
            emit = self.emit

            live = {
                index: self.settings.reader.live(self.thinking_opened and parent is None)
                for index, parent in enumerate(above)
            }

            def on_token(index: int, token: int, text: str) -> None:
                thinking, answer = live[index].push(text)
                emit(BranchToken(first + index, token, answer, thinking))

        run = self.session.decoding(
            cursors,
            sampling if sampling is not None else self.settings.sampling,
            score=self.settings.measure.per_token,
            on_token=on_token,
            doubt=doubt,
            shown=self.settings.reader.shown,
        )
        stepwise = parents is not None
        async with run:
            yield self._ended(run, first, done, stepwise, began)
        for completion in run.completions:
            index = first + completion.index
            if index not in self.lives:
                self.lives[index] = Life(began, self.session.ledger.now, completion)
            branch = done.get(completion.index) or await self._end(first, completion, stepwise)
            self._ended_at[index] = await self._audited(index, branch)

    async def _ended(
        self, run: Decoding, first: int, done: dict[int, Branch], stepwise: bool, began: float
    ) -> AsyncIterator[tuple[int, Branch]]:
        async for completion in run:
            self.lives[first + completion.index] = Life(began, self.session.ledger.now, completion)
            branch = done[completion.index] = await self._end(first, completion, stepwise)
            yield first + completion.index, branch

    async def _end(self, first: int, completion: Completion, stepwise: bool) -> Branch:
        index = first + completion.index
        parent = self._parents[index]
        thinking, text = split_thinking(completion.text, opened=self.thinking_opened and parent is None)
        said = Said(text)
        cut = completion.finish_reason in ("cancelled", "unsure")  # what was cut short has no answer yet
        step = stepwise and completion.finish_reason == "stop" and not self._stopped(parent, completion.tokens)
        if not cut and not step:
            line = text if parent is None else self.text_of(parent, completion.tokens)
            said = self._said[index] = await self.session.call(self.settings.reader.read, line)
            text = said.text if parent is None else text
        branch = Branch(
            text=text,
            thinking=thinking,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            confidence=self.settings.measure.of_branch(completion.scores, completion.logprobs),
            finish_reason=completion.finish_reason,
            answer=said.answer,
            tool_calls=said.calls,
            invalid_tool_calls=said.invalid,
            depth=completion.depth,
            parent=parent,
            sharing=self._sharing(index, parent),
        )
        if completion.cursor is not None:
            self.cursors[index] = completion.cursor
        if self.emit is not None:
            self.emit(BranchEnd(index, branch.finish_reason, text, said.answer))
        return branch

    def _sharing(self, index: int, parent: int | None) -> SharingRecord:
        """What the branch took: the first to start at a prompt as the prompt did, the others all of it."""
        at = self._place(index)
        if parent is not None or at >= len(self._started):
            return SharingRecord()
        root = self._started[at]
        if root in self._started[:at]:
            return root.record.model_copy(update={"reused": len(root.cursor.tokens), "recomputed": 0})
        return root.record

    def _place(self, index: int) -> int:
        """The how-manieth branch it is among those that start at a prompt."""
        return sum(self._parents[before] is None for before in range(index))

    async def _audited(self, index: int, branch: Branch) -> Branch:
        at = self._place(index)
        if not (self.settings.sharing.audit and branch.parent is None and at < len(self._started) and branch.tokens):
            return branch
        root = self._started[at]
        lossy = root.cursor.graft is not None or root.cursor.tokens != root.prompt
        kl, agreement = await audit(self.session, root, branch.tokens) if lossy else (0.0, 1.0)
        record = branch.sharing.model_copy(update={"kl": kl, "agreement": agreement})
        return branch.model_copy(update={"sharing": record})

    # -- judging --------------------------------------------------------------------------------

    async def verify(self, indices: Sequence[int], *, finished: bool = True, gate: bool = True) -> list[Verdict]:
        """Say how right branches are, and note it in them.

        Finished branches are not verified where one of them is decisively confident (level 1); their verdicts then
        say `skipped`. Verification may stop at the layer where it has settled (level 2). Where there is no room left in
        the context to ask about the branches, a warning says so and the verdicts have no score.

        Parameters
        ----------
        indices : sequence of int
            Branches that ended and were not cancelled.
        finished : bool, default True
            False for steps of longer lines.
        gate : bool, default True
            False where every verdict is needed, so that level 1 may not spare them.
        """
        verdicts = await judge(self, indices, finished=finished, gate=gate)
        for index, verdict in zip(indices, verdicts, strict=True):
            if verdict.score is not None:
                self.session.score(self.cursors[index], verdict.score)
            self._ended_at[index] = self._ended_at[index].model_copy(update={"verdict": verdict})
            if self.emit is not None:
                self.emit(BranchVerified(index, verdict))
        return verdicts

    async def name_best(self, texts: Sequence[str]) -> int | None:
        """Which of several answers the model finds most consistent; None where they do not fit its context."""
        return await name_best(self.session, self.question, texts)

    def ballot(self) -> Ballot:
        """A new count of answers."""
        return Ballot(self.settings.reader.same)

    def voted(self, ballot: Ballot) -> None:
        """Tell whoever watches how the vote stands."""
        if self.emit is not None:
            self.emit(VoteChanged(ballot.standing()))

    def surest(self, among: Sequence[int] | None = None) -> int:
        """The index of the most confident branch (of those in `among`); the earliest of equals."""
        indices = range(len(self.branches)) if among is None else among
        ended = [i for i in indices if self.branches[i].finish_reason != "cancelled"] or list(indices)
        return max(ended, key=lambda i: (self.branches[i].confidence, -i))

    # -- lines ----------------------------------------------------------------------------------

    def line(self, index: int) -> list[int]:
        """The branches from the prompt to branch `index`."""
        path: list[int] = []
        at: int | None = index
        while at is not None:
            path.append(at)
            at = self._parents[at]
        return path[::-1]

    def text_of(self, index: int, more: Sequence[int] = ()) -> str:
        """What was written from the prompt to the end of branch `index`, and `more` tokens, without thinking.

        Of a line that has ended it is what it said, without tool calls.
        """
        branch = self._ended_at[index]
        if not more and index in self._said:
            return self._said[index].text
        if not more and branch.parent is None:
            return branch.text
        text = self.session.codec.decode([*self._tokens(index), *more], shown=self.settings.reader.shown)
        stops = [at for at in map(text.find, self.settings.sampling.stop) if at >= 0]
        return split_thinking(text[: min(stops, default=len(text))], opened=self.thinking_opened)[1]

    def thinking_length(self, index: int) -> int:
        """How many tokens of the line that ends in branch `index` were written before its answer, as thinking."""
        return thinking_length(self._tokens(index), self.session.codec.decode, opened=self.thinking_opened)

    def complete(self, index: int) -> bool:
        """Whether the model or one of the request's own stop texts ended the line, not the end of a step."""
        branch = self._ended_at[index]
        if branch.finish_reason == "stop":
            return self._stopped(branch.parent, branch.tokens)
        return branch.finish_reason == "eos"

    def drop(self, index: int) -> None:
        """Give up a branch's KV: nothing more goes on from it."""
        if index not in self._parents.values():
            self.pruned.add(index)
        self.session.release(self.cursors.pop(index))

    def _tokens(self, index: int | None) -> list[int]:
        return [] if index is None else [token for at in self.line(index) for token in self._ended_at[at].tokens]

    def _stopped(self, parent: int | None, tokens: Sequence[int]) -> bool:
        """Whether a line holds one of the request's own stop texts, which may have begun in an earlier step."""
        text = self.session.codec.decode([*self._tokens(parent), *tokens], skip_special_tokens=False)
        return any(stop in text for stop in self.settings.sampling.stop)
