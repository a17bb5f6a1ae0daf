"""What branches do while they run, as LlamaIndex instrumentation events."""

from __future__ import annotations

from typing import Any

from llama_index_instrumentation.base import BaseEvent

from rksc_agents.adapter.progress import BRANCH_END, BRANCH_VERIFIED, VOTES, told
from rksc_agents.events import Event


class BranchEndEvent(BaseEvent):
    """A branch ended: its index, why, its answer and its text."""

    branch: int
    finish_reason: str
    answer: str | None
    text: str

    @classmethod
    def class_name(cls) -> str:
        """The event's name, the same in all frameworks."""
        return BRANCH_END


class BranchVerifiedEvent(BaseEvent):
    """A branch has its verdict; the fields are those of :class:`~rksc_agents.types.Verdict`."""

    branch: int
    score: float | None
    skipped: bool
    exit_layer: int | None
    layers: int
    tokens_computed: int

    @classmethod
    def class_name(cls) -> str:
        """The event's name, the same in all frameworks."""
        return BRANCH_VERIFIED


class VotesEvent(BaseEvent):
    """The standing of the vote: each answer with its weight and its branches, best first."""

    votes: list[dict[str, Any]]

    @classmethod
    def class_name(cls) -> str:
        """The event's name, the same in all frameworks."""
        return VOTES


_KINDS: dict[str, type[BaseEvent]] = {
    kind.class_name(): kind for kind in (BranchEndEvent, BranchVerifiedEvent, VotesEvent)
}


def instrumentation_event(event: Event, span_id: str | None) -> BaseEvent | None:
    """The instrumentation event for what happened in a span; None where there is none."""
    custom = told(event)
    return None if custom is None else _KINDS[custom[0]](span_id=span_id, **custom[1])
