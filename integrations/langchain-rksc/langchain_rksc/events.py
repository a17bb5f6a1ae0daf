"""Progress of a run as custom events: what branches do while they run, under the model's own run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.callbacks.manager import BaseRunManager, ahandle_event, handle_event

from rksc_agents.types import BranchEnd, BranchVerified, Event, VoteChanged

BRANCH_END = "rksc_branch_end"
BRANCH_VERIFIED = "rksc_branch_verified"
VOTES = "rksc_votes"

_SILENT = (BaseCallbackHandler.on_custom_event, AsyncCallbackHandler.on_custom_event)


def custom_event(event: Event) -> tuple[str, dict[str, Any]] | None:
    """Name and data of the custom event for what happened; None where there is none.

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


@dataclass(frozen=True)
class Progress:
    """Where the custom events of one run go.

    Attributes
    ----------
    run_id : UUID
        The model's run.
    handlers : sequence of BaseCallbackHandler
        Those of the run.
    tags, metadata
        Of the run.
    """

    run_id: UUID
    handlers: Sequence[BaseCallbackHandler] = ()
    tags: Sequence[str] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run_manager: BaseRunManager) -> Self:
        """The progress of a run that has begun."""
        return cls(run_manager.run_id, run_manager.handlers, run_manager.tags, run_manager.metadata)

    @property
    def listeners(self) -> list[BaseCallbackHandler]:
        """The handlers that do something with custom events."""
        return [handler for handler in self.handlers if type(handler).on_custom_event not in _SILENT]

    def send(self, event: Event) -> None:
        """Tell the handlers what happened."""
        if (custom := custom_event(event)) is not None:
            handle_event(self.listeners, *self._call, *custom, **self._run)

    async def asend(self, event: Event) -> None:
        """Like :meth:`send`, awaiting asynchronous handlers."""
        if (custom := custom_event(event)) is not None:
            await ahandle_event(self.listeners, *self._call, *custom, **self._run)

    @property
    def _call(self) -> tuple[str, str]:
        return "on_custom_event", "ignore_custom_event"

    @property
    def _run(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "tags": list(self.tags), "metadata": self.metadata}
