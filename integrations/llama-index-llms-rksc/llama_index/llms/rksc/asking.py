"""One question to a live reasoner: its answer, or a stream of responses."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from llama_index.core.base.llms.types import ChatResponse
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.span import active_span_id

from llama_index.llms.rksc.events import instrumentation_event
from llama_index.llms.rksc.responses import Growing, response_of
from rksc_agents.events import Answer, Event
from rksc_agents.result import ReasoningResult

if TYPE_CHECKING:
    from rksc_agents import Options, RKSCReasoner, Strategy
    from rksc_agents.types import Prompt

DIRECT = "direct"
"""The strategy of a single branch, whose text is the answer."""

dispatcher = get_dispatcher(__name__)


@dataclass(frozen=True)
class Ask:
    """A question, and how it is to be answered.

    Attributes
    ----------
    reasoner : RKSCReasoner
    prompt : str or list of messages
        What is asked.
    options : dict
        For the reasoner: what differs from its own settings.
    logprobs : bool
        Whether the response tells the log-probabilities of its tokens.
    span_id : str or None
        The span in which it is asked; events go there.
    """

    reasoner: RKSCReasoner
    prompt: Prompt
    options: Options
    logprobs: bool = False
    span_id: str | None = None

    @classmethod
    def of(cls, reasoner: RKSCReasoner, prompt: Prompt, options: Options, *, logprobs: bool) -> Ask:
        """A question that is asked in the span that is active now."""
        return cls(reasoner, prompt, options, logprobs, active_span_id.get())

    @cached_property
    def strategy(self) -> Strategy:
        """What answers."""
        from rksc_agents.request import strategy_of

        given = self.options.get("strategy")
        return self.reasoner.strategy if given is None else strategy_of(given)

    @property
    def single(self) -> bool:
        """Whether the answer is the text of the only branch."""
        return self.strategy.name == DIRECT

    # -- answers --------------------------------------------------------------------------------

    def answer(self) -> ChatResponse:
        """The answer."""
        return self._told(self.result())

    async def aanswer(self) -> ChatResponse:
        """Like :meth:`answer`, without blocking the event loop; cancelling it frees its rows and KV."""
        return self._told(await self.aresult())

    def result(self) -> ReasoningResult:
        """The answer with all its evidence; what branches do is told while they run."""
        if self.single:
            return self.reasoner.reason(self.prompt, **self.options)
        with closing(self._events()) as events:
            for event in events:
                if isinstance(event, Answer):
                    return event.result
                self._tell(event)
        raise AssertionError("a run ends with an answer or an error")

    async def aresult(self) -> ReasoningResult:
        """Like :meth:`result`, without blocking the event loop."""
        if self.single:
            return await self.reasoner.areason(self.prompt, **self.options)
        async with aclosing(self._aevents()) as events:
            async for event in events:
                if isinstance(event, Answer):
                    return event.result
                self._tell(event)
        raise AssertionError("a run ends with an answer or an error")

    # -- streams --------------------------------------------------------------------------------

    def stream(self) -> Generator[ChatResponse, None, None]:
        """The answer as it grows; the last response is what :meth:`answer` gives for the same seed."""
        growing = Growing(single=self.single)
        with closing(self._events()) as events:
            for event in events:
                if isinstance(event, Answer):
                    yield growing.end(self._told(event.result), event.result)
                    return
                self._tell(event)
                if (response := growing.push(event)) is not None:
                    yield response

    async def astream(self) -> AsyncGenerator[ChatResponse, None]:
        """Like :meth:`stream`, without blocking the event loop. Closing it frees its rows and KV."""
        growing = Growing(single=self.single)
        async with aclosing(self._aevents()) as events:
            async for event in events:
                if isinstance(event, Answer):
                    yield growing.end(self._told(event.result), event.result)
                    return
                self._tell(event)
                if (response := growing.push(event)) is not None:
                    yield response

    # -- events ---------------------------------------------------------------------------------

    def _events(self) -> Generator[Event, None, None]:
        return cast("Generator[Event, None, None]", self.reasoner.stream(self.prompt, **self.options))

    def _aevents(self) -> AsyncGenerator[Event, None]:
        return cast("AsyncGenerator[Event, None]", self.reasoner.astream(self.prompt, **self.options))

    def _tell(self, event: Event) -> None:
        if not self.single and (told := instrumentation_event(event, self.span_id)) is not None:
            dispatcher.event(told)

    def _told(self, result: ReasoningResult) -> ChatResponse:
        decode = self.reasoner.decode if self.logprobs else None
        return response_of(result, self.reasoner.name, self._asked, decode)

    @property
    def _asked(self) -> str:
        return json.dumps(cast("Sequence[Any]", self.prompt), sort_keys=True, default=str)
