"""What happens while a run goes on, as a stream tells it."""

from __future__ import annotations

from dataclasses import dataclass

from rksc_agents.result import ReasoningResult
from rksc_agents.types import FinishReason, Verdict, Vote


@dataclass(frozen=True, slots=True)
class BranchToken:
    """A branch grew: `text` and `thinking` are what became readable, possibly nothing (held back).

    The texts of a branch add up to what it wrote outside and inside its thinking markers; tool calls are not shown.
    What an answer is in the end says :class:`BranchEnd`.
    """

    branch: int
    token: int
    text: str
    thinking: str = ""


@dataclass(frozen=True, slots=True)
class BranchEnd:
    """A branch ended."""

    branch: int
    finish_reason: FinishReason
    text: str
    answer: str | None


@dataclass(frozen=True, slots=True)
class BranchVerified:
    """A branch has its verdict."""

    branch: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class VoteChanged:
    """The standing of the vote after a branch ended, best first."""

    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a run."""

    result: ReasoningResult


Event = BranchToken | BranchEnd | BranchVerified | VoteChanged | Answer
"""What a streaming run yields, the last one an :class:`Answer`."""
