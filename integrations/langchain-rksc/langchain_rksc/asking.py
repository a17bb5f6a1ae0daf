"""One question to a live reasoner: one answer, several, or a stream of chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from langchain_rksc.call import Call
from langchain_rksc.chunks import Chunks
from langchain_rksc.events import Progress
from langchain_rksc.messages import Message
from langchain_rksc.outputs import generation_of, message_of, metadata_of
from rksc_agents.adapter.results import PROVIDER, each_branch
from rksc_agents.errors import ConfigError
from rksc_agents.events import Answer, Event
from rksc_agents.result import ReasoningResult

if TYPE_CHECKING:
    from rksc_agents import Options, RKSCReasoner, Strategy

DIRECT = "direct"
"""The strategy of a single branch, whose text is the answer."""


@dataclass(frozen=True)
class Ask:
    """A question, and how it is to be answered.

    Attributes
    ----------
    reasoner : RKSCReasoner
    call : Call
    prompt : list of Message
        The conversation.
    progress : Progress or None
        Where custom events go.
    """

    reasoner: RKSCReasoner
    call: Call
    prompt: list[Message]
    progress: Progress | None = None

    @cached_property
    def strategy(self) -> Strategy:
        """What answers."""
        return self.call.strategy(self.reasoner)

    @property
    def single(self) -> bool:
        """Whether the answer is the text of the only branch."""
        return self.strategy.name == DIRECT

    @property
    def shown(self) -> bool:
        """Whether the message holds the branches' texts."""
        return self.call.stream_reasoning and not self.single and self.call.n == 1

    # -- answers --------------------------------------------------------------------------------

    def answer(self) -> ChatResult:
        """All answers, from one prefill where they are samples of one prompt."""
        if self.shown:
            with closing(self.chunks()) as chunks:
                return generate_from_stream(chunks)
        if self.call.n == 1:
            return self._told([self._watched() if self._watching else self._reason(self.call.options)])
        if self.single:
            return self._told(each_branch(self._reason(self._drawing()), DIRECT))
        with ThreadPoolExecutor(self.call.n) as pool:  # asked at the same time they run as one batch
            return self._told(list(pool.map(self._reason, self._seeded())))

    async def aanswer(self) -> ChatResult:
        """Like :meth:`answer`, without blocking the event loop; cancelling it frees its rows and KV."""
        if self.shown:
            async with aclosing(self.achunks()) as chunks:
                return generate_from_stream(iter([chunk async for chunk in chunks]))
        if self.call.n == 1:
            return self._told([await self._awatched() if self._watching else await self._areason(self.call.options)])
        if self.single:
            return self._told(each_branch(await self._areason(self._drawing()), DIRECT))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._areason(options)) for options in self._seeded()]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return self._told([task.result() for task in tasks])

    def _reason(self, options: Options) -> ReasoningResult:
        return self.reasoner.reason(self.prompt, **options)

    async def _areason(self, options: Options) -> ReasoningResult:
        return await self.reasoner.areason(self.prompt, **options)

    @property
    def _watching(self) -> bool:
        return not self.single and self.progress is not None and bool(self.progress.listeners)

    def _watched(self) -> ReasoningResult:
        with closing(self._events()) as events:
            for event in events:
                if isinstance(event, Answer):
                    return event.result
                self._tell(event)
        raise AssertionError("a run ends with an answer or an error")

    async def _awatched(self) -> ReasoningResult:
        async with aclosing(self._aevents()) as events:
            async for event in events:
                if isinstance(event, Answer):
                    return event.result
                await self._atell(event)
        raise AssertionError("a run ends with an answer or an error")

    def _drawing(self) -> Options:
        """The options that draw `n` direct answers from one prompt."""
        from rksc_agents.reasoning import BestOfN

        kept = {name: getattr(self.strategy, name) for name in ("confidence", "extract", "verifier")}
        return {**self.call.options, "strategy": BestOfN(branches=self.call.n, **kept)}

    def _seeded(self) -> list[Options]:
        """The options of `n` runs, each with a seed of its own."""
        first = self.call.options.get("seed", self.reasoner.sampling.seed)
        return [{**self.call.options, "seed": first + more} for more in range(self.call.n)]

    def _told(self, results: Sequence[ReasoningResult]) -> ChatResult:
        messages = [message_of(result, self._metadata(result), self._asked) for result in results]
        told = {"model_name": self.reasoner.name, "model_provider": PROVIDER}
        return ChatResult(generations=[generation_of(message) for message in messages], llm_output=told)

    # -- chunks ---------------------------------------------------------------------------------

    def chunks(self) -> Generator[ChatGenerationChunk]:
        """The answer as it comes; the chunks add up to what :meth:`answer` gives for the same seed."""
        chunks = self._chunks()
        with closing(self._events()) as events:
            for event in events:
                if isinstance(event, Answer):
                    yield from self._end(chunks, event.result)
                    return
                self._tell(event)
                yield from chunks.push(event)

    async def achunks(self) -> AsyncGenerator[ChatGenerationChunk]:
        """Like :meth:`chunks`, without blocking the event loop. Closing it frees its rows and KV."""
        chunks = self._chunks()
        async with aclosing(self._aevents()) as events:
            async for event in events:
                if isinstance(event, Answer):
                    for chunk in self._end(chunks, event.result):
                        yield chunk
                    return
                await self._atell(event)
                for chunk in chunks.push(event):
                    yield chunk

    def _chunks(self) -> Chunks:
        if self.call.n > 1:
            raise ConfigError(f"n = {self.call.n}: several answers are not streamed; use generate or invoke, or n = 1")
        return Chunks(single=self.single, reasoning=self.call.stream_reasoning)

    def _end(self, chunks: Chunks, result: ReasoningResult) -> Iterator[ChatGenerationChunk]:
        return chunks.end(result, self._metadata(result), self._asked, usage=self.call.stream_usage)

    # -- events ---------------------------------------------------------------------------------

    def _events(self) -> Generator[Event]:
        return cast("Generator[Event]", self.reasoner.stream(self.prompt, **self.call.options))

    def _aevents(self) -> AsyncGenerator[Event]:
        return cast("AsyncGenerator[Event]", self.reasoner.astream(self.prompt, **self.call.options))

    def _tell(self, event: Event) -> None:
        if not self.single and self.progress is not None:
            self.progress.send(event)

    async def _atell(self, event: Event) -> None:
        if not self.single and self.progress is not None:
            await self.progress.asend(event)

    # -- what a message tells -------------------------------------------------------------------

    def _metadata(self, result: ReasoningResult) -> dict[str, Any]:
        return metadata_of(result, self.reasoner.name, decode=self.reasoner.decode if self.call.logprobs else None)

    @property
    def _asked(self) -> str:
        return json.dumps(self.prompt, sort_keys=True, default=str)
