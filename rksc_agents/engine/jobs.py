"""Work that the scheduler runs: prompts being prefilled, groups of rows being decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rksc_agents.cache.tree import Node
from rksc_agents.config import Sampling
from rksc_agents.engine.cursor import Completion, Cursor
from rksc_agents.engine.ledger import Ledger
from rksc_agents.model.constraint import Constraint
from rksc_agents.model.protocol import RunningTail
from rksc_agents.model.sampling import RowState
from rksc_agents.model.text import TextStream
from rksc_agents.types import FinishReason

OnToken = Callable[[int, int, str], None]
"""Called with a row's index, its new token and the text that became readable."""

Doubt = Callable[[Sequence[float], Sequence[float]], bool]
"""Called with a row's token scores and log-probabilities so far; true ends the row as "unsure"."""


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A sequence whose KV is to be in the tree, with the logits after its last token.

    `base` ends what the tree had; the rest is computed piece by piece up to each of `cuts`, and each
    piece has its share of the promised bytes. `under` is a private node that it is to go on from.
    `why` says where its tokens are counted: as the request's prompt, as a branch being continued, or as KV that had
    been evicted.
    """

    ledger: Ledger
    tokens: tuple[int, ...]
    done: asyncio.Future[Cursor]
    depth: int = 0
    why: Literal["prompt", "continue", "evicted"] = "prompt"
    under: Node | None = None
    base: Node | None = None
    tail: RunningTail | None = None
    cuts: list[int] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)

    @property
    def computed(self) -> int:
        """Tokens of the sequence that have KV."""
        assert self.base is not None and self.tail is not None
        return self.base.end + self.tail.length


@dataclass(slots=True, eq=False)
class Row:
    """One branch while it runs."""

    index: int
    base: Cursor
    node: Node
    state: RowState
    stream: TextStream
    most: int
    constraint: Constraint | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def completion(self, finish_reason: FinishReason, cursor: Cursor | None) -> Completion:
        return Completion(
            self.index, tuple(self.tokens), tuple(self.logprobs), tuple(self.scores), self.stream.text, finish_reason,
            self.base.depth, cursor, tuple(self.pieces),
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class DecodeJob:
    """Rows that run in step from their cursors until each ends.

    `score` maps log-probabilities [rows, vocabulary] to a score per row, kept for each token.
    `doubt` is asked after each token whether a row that could go on should rather end.
    `finished` receives each row's end, or an error that ends the job.
    `shown` are special tokens whose text is kept.
    """

    ledger: Ledger
    cursors: list[Cursor]
    sampling: Sampling
    generators: list[torch.Generator]
    score: Callable[[Tensor], Tensor]
    on_token: OnToken | None
    finished: asyncio.Queue[Completion | BaseException]
    doubt: Doubt | None = None
    shown: frozenset[int] = frozenset()
    rows: list[Row] = field(default_factory=list)
    tail: RunningTail | None = None
    logits: Tensor | None = None
    """[rows, vocabulary] to draw the next tokens from."""
