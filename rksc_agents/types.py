"""What goes in and what comes out: messages, results, events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["eos", "stop", "length", "cancelled"]
"""Why a branch ended: the model ended it, a stop text, max_tokens or the context, the vote was decided."""

Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings with "role" and "content", as chat templates take them."""

Prompt = str | Messages
"""A question (one user turn) or a conversation."""


class Record(BaseModel):
    """A frozen result object that prints as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Branch(Record):
    """One finished line of reasoning.

    Attributes
    ----------
    text : str
        What the branch wrote, without its thinking.
    thinking : str
        The text between thinking markers such as ``<think>``; empty for other models.
    tokens : tuple of int
        Generated token ids.
    logprobs : tuple of float
        Log-probability of each token under the model (before temperature and filters).
    confidence : float
        In the measure that the strategy uses; the mean top-1 probability by default.
    finish_reason : str
        "eos", "stop", "length" or "cancelled".
    answer : str or None
        The extracted answer, None where there is none.
    """

    text: str
    thinking: str = ""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    confidence: float
    finish_reason: FinishReason
    answer: str | None = None


class Vote(Record):
    """One candidate answer with its support.

    Attributes
    ----------
    answer : str
        The answer as the first branch that gave it wrote it.
    weight : float
        Sum of the weights of its branches (their count in a majority vote).
    branches : tuple of int
        Indices of the branches that gave it.
    """

    answer: str
    weight: float
    branches: tuple[int, ...]


class Usage(Record):
    """Tokens counted. `prompt_tokens` = computed + reused."""

    prompt_tokens: int
    prompt_tokens_computed: int
    prompt_tokens_reused: int
    completion_tokens: int
    completion_tokens_winner: int


class KVUsage(Record):
    """KV cache of one request.

    Attributes
    ----------
    peak_bytes : int
        Most bytes of KV the request's branches held at once, each shared run counted once.
    bytes_if_copied : int
        What the same branches would have held at that moment with a copy of the prefix each.
    tokens_shared : int
        Token positions that were read from a shared run instead of a copy, at that moment.
    evicted : int
        Nodes evicted while the request ran.
    recomputed : int
        Tokens computed again because their KV had been evicted.
    """

    peak_bytes: int = 0
    bytes_if_copied: int = 0
    tokens_shared: int = 0
    evicted: int = 0
    recomputed: int = 0


class Timings(Record):
    """Seconds of wall-clock time."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


class ReasoningResult(Record):
    """The answer with its evidence.

    Attributes
    ----------
    answer : str or None
        The answer that the strategy settled on; the winning branch's text where none can be extracted.
    text : str
        The winning branch's text.
    strategy : str
        Name of the strategy, such as "self-consistency".
    branches : tuple of Branch
        All branches in the order they were forked.
    winner : int
        Index of the winning branch.
    votes : tuple of Vote
        Best first; empty for strategies that do not vote.
    usage, kv, timings
        What it took.
    """

    answer: str | None
    text: str
    strategy: str
    branches: tuple[Branch, ...]
    winner: int
    votes: tuple[Vote, ...] = ()
    usage: Usage
    kv: KVUsage
    timings: Timings


@dataclass(frozen=True, slots=True)
class BranchToken:
    """A branch grew: `text` is what became readable, possibly empty (held back)."""

    branch: int
    token: int
    text: str


@dataclass(frozen=True, slots=True)
class BranchEnd:
    """A branch ended."""

    branch: int
    finish_reason: FinishReason
    text: str
    answer: str | None


@dataclass(frozen=True, slots=True)
class VoteChanged:
    """The standing of the vote after a branch ended, best first."""

    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a run."""

    result: ReasoningResult


Event = BranchToken | BranchEnd | VoteChanged | Answer
"""What a streaming run yields, the last one an :class:`Answer`."""
