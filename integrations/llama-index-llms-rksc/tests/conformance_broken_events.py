"""Mocks that do not conform in what they tell listeners, and what they count."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from conformance_mock import FAILING, Mock, MockError, completion_of, fails
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    MessageRole,
)
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback
from llama_index.core.prompts import BasePromptTemplate
from llama_index_instrumentation import get_dispatcher

# -- events --------------------------------------------------------------------------------------


@fails(
    "a_failure_is_told",
    "an_output_parser_writes_prompts",
    "callbacks_hear_of_failures",
    "callbacks_hear_start_and_end",
    "chat_is_told",
    "no_secret_is_told",
    "prediction_is_told",
    "the_system_prompt_is_read",
    "the_token_counter_counts_each_call_once",
)
class UntoldChat(Mock):
    """Tells nothing of its chats."""

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self.answer(messages, **kwargs)


@fails(
    "a_failure_is_told",
    "achat_is_told",
    "an_output_parser_writes_prompts",
    "callbacks_hear_start_and_end",
    "prediction_is_told",
    "the_system_prompt_is_read",
    "the_token_counter_counts_each_call_once",
)
class Untold(Mock):
    """Tells nothing of its asynchronous calls."""

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self.aanswer(messages, **kwargs)


@fails(
    "a_failure_is_told",
    "achat_is_told",
    "callbacks_hear_start_and_end",
    "the_token_counter_counts_each_call_once",
)
class ToldTwice(Mock):
    """Completes by chatting, and tells both."""

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        await asyncio.gather(*(asyncio.sleep(0) for _ in range(4)))
        for _ in range(4):
            await asyncio.sleep(0)
        return self.chat(messages, **kwargs)


@fails(
    "callbacks_hear_completions",
    "complete_is_told",
    "the_token_counter_counts_each_call_once",
)
class UntoldCompletion(Mock):
    """Tells nothing of its completions."""

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return completion_of(self.answer([ChatMessage(prompt)], **kwargs))


@fails(
    "a_failure_of_a_stream_is_told",
    "callbacks_hear_of_failures",
    "callbacks_hear_start_and_end",
    "stream_chat_is_told",
    "the_token_counter_counts_each_call_once",
)
class UntoldStream(Mock):
    """Tells nothing of its streams."""

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self.steps(messages, **kwargs)  # type: ignore[return-value]


@fails(
    "astream_complete_is_told",
    "callbacks_hear_completions",
    "stream_complete_is_told",
    "the_token_counter_counts_each_call_once",
)
class UntoldCompletionStreams(Mock):
    """Tells nothing of streams of completions."""

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return (completion_of(step) for step in self.steps([ChatMessage(prompt)], **kwargs))

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        return (completion_of(step) async for step in self.asteps([ChatMessage(prompt)], **kwargs))


@fails(
    "a_failure_of_a_stream_is_told",
    "acomplete_is_told",
    "astream_chat_is_told",
    "callbacks_hear_completions",
    "callbacks_hear_start_and_end",
    "the_token_counter_counts_each_call_once",
)
class UntoldLater(Mock):
    """Tells nothing of its asynchronous completions and streams."""

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return completion_of(await self.aanswer([ChatMessage(prompt)], **kwargs))

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return self.asteps(messages, **kwargs)


@fails("prediction_is_told")
class UntoldPrediction(Mock):
    """Tells nothing of its predictions."""

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        messages = self._get_messages(prompt, **prompt_args)
        return self._parse_output(self.chat(messages).message.content or "")


@fails(
    "a_failure_is_told",
    "spans_are_closed",
)
class OpenSpans(Mock):
    """Opens a span that it does not close."""

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        get_dispatcher().span_enter(id_=f"open-{uuid4()}", bound_args=inspect.signature(len).bind(messages))
        return self.answer(messages, **kwargs)


# -- failures ------------------------------------------------------------------------------------


@fails(
    "a_failure_is_told",
    "after_a_failure_the_llm_answers",
    "callbacks_hear_of_failures",
)
class Swallowing(Mock):
    """Answers with its errors."""

    def answer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        try:
            return super().answer(messages, **asked)
        except MockError as error:
            return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=str(error)))


@fails(
    "a_failure_of_a_stream_is_told",
    "callbacks_hear_of_failures",
)
class EndsQuietly(Mock):
    """Ends streams that fail as if they were whole."""

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        with suppress(MockError):
            yield from self.steps(messages, **kwargs)


@fails("after_a_failure_the_llm_answers")
class BrokenByFailing(Mock):
    """Cannot be asked again once a call failed."""

    _failed: bool = PrivateAttr(default=False)

    def answer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        self._failed = self._failed or messages[-1].content == FAILING
        return super().answer([ChatMessage(FAILING)] if self._failed else messages, **asked)


# -- tokens --------------------------------------------------------------------------------------


@fails(
    "a_system_message_is_read",
    "all_blocks_of_text_are_read",
    "an_output_parser_writes_prompts",
    "earlier_turns_are_read",
    "longer_questions_have_more_tokens",
    "results_are_read",
    "the_system_prompt_is_read",
)
class CountsWriting(Mock):
    """Counts no tokens that it reads."""

    def last(self, response: ChatResponse, read: int, written: int) -> ChatResponse:
        return super().last(response, 1, written)


@fails(
    "answers_count_tokens",
    "streams_count_tokens",
    "the_token_counter_counts_each_call_once",
)
class CountsWrongly(Mock):
    """Its totals are no totals."""

    def answer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        answer = super().answer(messages, **asked)
        assert isinstance(answer.raw, dict)
        return answer.model_copy(update={"raw": {"usage": {**answer.raw["usage"], "total_tokens": 1}}})


@fails(
    "streams_count_tokens",
    "the_token_counter_counts_each_call_once",
)
class UncountedStream(Mock):
    """Its streams count no tokens."""

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return (step.model_copy(update={"raw": None}) for step in self.steps(messages, **kwargs))
