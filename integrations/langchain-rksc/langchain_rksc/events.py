"""Progress of a run as custom events: what branches do while they run, under the model's own run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.callbacks.manager import BaseRunManager, ahandle_event, handle_event

from rksc_agents.adapter.progress import told
from rksc_agents.events import Event

_SILENT = (BaseCallbackHandler.on_custom_event, AsyncCallbackHandler.on_custom_event)


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
        if (custom := told(event)) is not None:
            handle_event(self.listeners, *self._call, *custom, **self._run)

    async def asend(self, event: Event) -> None:
        """Like :meth:`send`, awaiting asynchronous handlers."""
        if (custom := told(event)) is not None:
            await ahandle_event(self.listeners, *self._call, *custom, **self._run)

    @property
    def _call(self) -> tuple[str, str]:
        return "on_custom_event", "ignore_custom_event"

    @property
    def _run(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "tags": list(self.tags), "metadata": self.metadata}
