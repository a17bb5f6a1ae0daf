"""Mocks that do not conform in what they tell of themselves, answer and stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from conformance_mock import Mock, MockError, completion_of, fails
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

# -- what it tells of itself ---------------------------------------------------------------------


@fails("metadata")
class WithoutWindow(Mock):
    """Has no context window."""

    @property
    def metadata(self) -> LLMMetadata:
        return super().metadata.model_copy(update={"context_window": 0})


@fails("the_model_has_a_name")
class WithoutName(Mock):
    """Does not name its model."""

    @property
    def metadata(self) -> LLMMetadata:
        return super().metadata.model_copy(update={"model_name": "unknown"})


@fails("class_name")
class Nameless(Mock):
    """Has the name of its base class."""

    @classmethod
    def class_name(cls) -> str:
        return super(Mock, cls).class_name()


class _Later:
    def __init__(self, awaited: Any) -> None:
        self.awaited = awaited

    def __await__(self) -> Any:
        return self.awaited.__await__()


@fails("async_methods_are_awaited")
class NoCoroutine(Mock):
    """Gives something else to await than a coroutine."""

    def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        return _Later(super().achat(messages, **kwargs))


# -- answers -------------------------------------------------------------------------------------


@fails(
    "a_chat_model_is_asked_in_one_user_message",
    "a_system_prompt_holds_for_streams_too",
    "acomplete_answers_as_complete_does",
    "astream_complete_ends_with_the_answer",
    "complete",
    "gathered_completions",
    "stream_complete_ends_with_the_answer",
)
class NoText(Mock):
    """Answers whole questions with nothing."""

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text="", raw={"usage": self.answer([ChatMessage(prompt)]).raw["usage"]})


@fails(
    "acomplete",
    "acomplete_answers_as_complete_does",
    "gathered_completions",
)
class NoTextLater(Mock):
    """Completes with nothing, asynchronously."""

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        found = completion_of(await self.aanswer([ChatMessage(prompt)], **kwargs))
        return found.model_copy(update={"text": ""})


@fails(
    "a_call_bounds_its_answer",
    "achat_answers_as_chat_does",
    "acomplete_answers_as_complete_does",
    "an_output_parser_reads_answers",
    "answers_count_tokens",
    "any_text_can_be_asked",
    "apredict",
    "gathered_calls",
    "gathered_completions",
    "one_event_loop_after_another",
    "threads_beside_the_event_loop",
)
class AnotherTextAwaited(Mock):
    """What it answers asynchronously is another answer."""

    async def aanswer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        return await super().aanswer([ChatMessage("Well,"), *messages], **asked)


@fails(
    "equal_calls_give_equal_answers",
    "gathered_completions",
)
class Restless(Mock):
    """Completes otherwise each time."""

    _count: int = PrivateAttr(default=0)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self._count += 1
        return completion_of(self.answer([ChatMessage(prompt)] * self._count, **kwargs))


@fails("the_prompt_is_not_echoed")
class Echoing(Mock):
    """Begins its answers with the question."""

    def write(self, messages: Sequence[ChatMessage]) -> str:
        return f"{messages[-1].content} {super().write(messages)}"


@fails(
    "a_call_bounds_its_answer",
    "a_call_stops_at_its_texts",
)
class Unbounded(Mock):
    """Does not hear what calls ask for."""

    def steps(self, messages: Sequence[ChatMessage], **asked: Any) -> Iterator[ChatResponse]:
        return super().steps(messages, **{name: asked[name] for name in asked if name not in ("max_tokens", "stop")})


# -- streams -------------------------------------------------------------------------------------


@fails(
    "a_call_stops_at_its_texts",
    "any_text_can_be_asked",
    "stream",
    "stream_chat_grows",
    "the_system_prompt_is_read_in_streams_too",
)
class RepeatingDeltas(Mock):
    """Its deltas are the whole text so far."""

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        for step in self.steps(messages, **kwargs):
            yield step.model_copy(update={"delta": step.message.content})


@fails("astream_complete_grows")
class WithoutDeltas(Mock):
    """Its completions have no deltas."""

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        steps = self.asteps([ChatMessage(prompt)], **kwargs)
        return (completion_of(step).model_copy(update={"delta": None}) async for step in steps)


@fails(
    "a_system_prompt_holds_for_streams_too",
    "stream_complete_ends_with_the_answer",
    "stream_complete_grows",
)
class NotCumulative(Mock):
    """Its chunks have nothing but what is new."""

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        for step in self.steps([ChatMessage(prompt)], **kwargs):
            yield completion_of(step).model_copy(update={"text": step.delta})


@fails(
    "any_text_can_be_asked",
    "astream",
    "astream_chat_ends_with_the_answer",
    "gathered_streams",
    "one_event_loop_after_another",
    "streams_count_tokens",
    "the_system_prompt_is_read_in_streams_too",
)
class AnotherTextStreamed(Mock):
    """What it streams asynchronously is another answer than the one that it gives whole."""

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return self.asteps([ChatMessage("Well,"), *messages], **kwargs)


@fails(
    "a_call_bounds_its_answer",
    "a_system_prompt_holds_for_streams_too",
    "any_text_can_be_asked",
    "stream",
    "stream_chat_ends_with_the_answer",
    "streams_count_tokens",
    "streams_in_turns",
    "the_system_prompt_is_read_in_streams_too",
)
class AnotherTextStreamedAtOnce(Mock):
    """What it streams is another answer than the one that it gives whole."""

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self.steps([ChatMessage("Well,"), *messages], **kwargs)  # type: ignore[return-value]


@fails(
    "an_async_stream_can_be_left",
    "astream_complete_ends_with_the_answer",
    "astream_complete_grows",
    "astream_complete_is_told",
    "async_streams_are_awaited_for_a_generator",
    "callbacks_hear_completions",
    "spans_are_closed",
    "the_loop_goes_on_during_astream_complete",
)
class EmptyStream(Mock):
    """Streams nothing."""

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        return (completion_of(step) async for step in self.asteps([ChatMessage(prompt)], **kwargs) if step is None)


@fails(
    "a_stream_can_be_left",
    "streams_are_generators",
)
class IteratorForStream(Mock):
    """Streams an iterator that cannot be closed."""

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return iter(list(super().stream_complete(prompt, formatted, **kwargs)))  # type: ignore[return-value]


@fails(
    "an_async_stream_can_be_left",
    "astream_complete_ends_with_the_answer",
    "astream_complete_grows",
    "astream_complete_is_told",
    "async_streams_are_awaited_for_a_generator",
    "callbacks_hear_completions",
    "spans_are_closed",
    "the_loop_goes_on_during_astream_complete",
)
class UnawaitedStream(Mock):
    """Its asynchronous stream is not awaited."""

    async def astream_complete(  # type: ignore[override]
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncIterator[CompletionResponse]:
        async for step in self.asteps([ChatMessage(prompt)], **kwargs):
            yield completion_of(step)


@fails("a_system_prompt_holds_for_streams_too")
class WithoutSystemInStreams(Mock):
    """Streams do not hear the system prompt."""

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        system = [ChatMessage(self.system_prompt)] if self.system_prompt else []
        return completion_of(self.answer([*system, ChatMessage(prompt)], **kwargs))


@fails("a_stream_can_be_left")
class StuckStream(Mock):
    """Cannot be asked again once a stream was left."""

    _streaming: bool = PrivateAttr(default=False)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        self._streaming = True
        yield from super().steps(messages, **kwargs)
        self._streaming = False

    def answer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        if self._streaming:
            raise MockError("still streaming")
        return super().answer(messages, **asked)


@fails(
    "a_timeout_ends_astream_chat",
    "an_async_stream_can_be_left",
    "astream_chat_can_be_cancelled",
    "gathered_streams",
)
class StuckLater(Mock):
    """Cannot be asked again once an asynchronous stream was left."""

    _streaming: bool = PrivateAttr(default=False)

    async def asteps(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponseAsyncGen:
        if self._streaming:
            raise MockError("still streaming")
        self._streaming = True
        async for step in super().asteps(messages, **asked):
            yield step
        self._streaming = False

    async def aanswer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        if self._streaming:
            raise MockError("still streaming")
        for _ in range(8):
            await asyncio.sleep(0)
        return self.answer(messages, **asked)
