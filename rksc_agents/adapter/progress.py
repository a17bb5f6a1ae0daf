"""What a run's events tell while it runs: names and data of events, and the answer as it grows."""

from __future__ import annotations

from typing import Any

from rksc_agents.events import BranchEnd, BranchVerified, Event, VoteChanged

BRANCH_END = "rksc_branch_end"
BRANCH_VERIFIED = "rksc_branch_verified"
VOTES = "rksc_votes"


def told(event: Event) -> tuple[str, dict[str, Any]] | None:
    """Name and data, as JSON values, by which a framework's listeners hear what happened; None for the rest.

    - "rksc_branch_end": `branch`, `finish_reason`, `answer`, `text`.
    - "rksc_branch_verified": `branch` and the fields of its :class:`~rksc_agents.types.Verdict`.
    - "rksc_votes": `votes`, best first, each with `answer`, `weight` and `branches`.
    """
    match event:
        case BranchEnd(branch=branch, finish_reason=reason, text=text, answer=answer):
            return BRANCH_END, {"branch": branch, "finish_reason": reason, "answer": answer, "text": text}
        case BranchVerified(branch=branch, verdict=verdict):
            return BRANCH_VERIFIED, {"branch": branch, **verdict.model_dump()}
        case VoteChanged(votes=votes):
            return VOTES, {"votes": [vote.model_dump(mode="json") for vote in votes]}
        case _:
            return None


class Grown:
    """A text that grows piece by piece, its last white space held back: the whole may not have it."""

    def __init__(self) -> None:
        self.shown = ""
        self._held = ""

    def push(self, piece: str) -> str:
        """Add a piece; return what may be shown."""
        self._held += piece
        new = self._held.rstrip()
        self._held = self._held[len(new) :]
        self.shown += new
        return new

    def rest(self, whole: str) -> str:
        """What of the whole is left to be shown."""
        new = whole.removeprefix(self.shown) if whole.startswith(self.shown) else ""
        self.shown += new
        return new
