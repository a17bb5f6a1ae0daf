"""What happens while a run goes on, as a stream tells it."""

from __future__ import annotations

from dataclasses import dataclass

from rksc_agents.result import ReasoningResult
from rksc_agents.types import FinishReason, Verdict, Vote


@dataclass(frozen=True, slots=True)
class BranchToken:
    """A branch grew by a `token`: `text` and `thinking` are what became readable, possibly nothing (held back).

    The texts of a branch add up to what it wrote outside and inside its thinking markers; tool calls are not shown.
    What an answer is in the end says :class:`BranchEnd`.

    Examples
    --------
    >>> texts = [event.text for event in reasoner.stream("Q", strategy="direct") if isinstance(event, BranchToken)]
    >>> "".join(texts)
    'The answer is 4.'
    """

    branch: int
    token: int
    text: str
    thinking: str = ""


@dataclass(frozen=True, slots=True)
class BranchEnd:
    """A branch ended: its `finish_reason`, the `text` it wrote, and the `answer` found in it, None where there is none.

    Examples
    --------
    >>> ends = [event for event in reasoner.stream("Q") if isinstance(event, BranchEnd)]
    >>> ends[0].answer
    '4'
    """

    branch: int
    finish_reason: FinishReason
    text: str
    answer: str | None


@dataclass(frozen=True, slots=True)
class BranchVerified:
    """A branch has its `verdict`.

    Examples
    --------
    >>> best = BestOfN(branches=2, score="verifier")
    >>> events = list(reasoner.stream("Q", strategy=best))
    >>> sum(isinstance(event, BranchVerified) for event in events)
    2
    """

    branch: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class VoteChanged:
    """The standing of the vote after a branch ended: its `votes`, best first.

    Examples
    --------
    >>> changes = [event for event in reasoner.stream("Q") if isinstance(event, VoteChanged)]
    >>> changes[-1].votes[0].answer
    '4'
    """

    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a run, with its `result`.

    Examples
    --------
    >>> *_, last = reasoner.stream("Q")
    >>> last.result.answer
    '4'
    """

    result: ReasoningResult


Event = BranchToken | BranchEnd | BranchVerified | VoteChanged | Answer
"""What a streaming run yields, the last one an :class:`Answer`."""
