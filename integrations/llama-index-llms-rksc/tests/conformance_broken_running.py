"""Mocks that do not conform in copies, several calls at once, and the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

from conformance_mock import Mock, MockError, completion_of, fails
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

# -- copies and what is written down -------------------------------------------------------------


@fails("pickling")
class Unpicklable(Mock):
    """Cannot be pickled."""

    def __getstate__(self) -> Any:
        raise TypeError("cannot pickle a mock")


@fails("pickling")
class LosesSettings(Mock):
    """A pickled copy has the default settings."""

    def __reduce__(self) -> Any:
        return type(self), ()


@fails("deep_copies")
class SharedCopies(Mock):
    """Its deep copies are itself."""

    def __deepcopy__(self, memo: Any = None) -> Any:
        return self


@fails("copies_with_other_settings")
class SharedSettings(Mock):
    """Its copies do not have the settings that they are given."""

    def model_copy(self, *, update: Any = None, deep: bool = False) -> Any:
        return super().model_copy(deep=deep)


@fails(
    "no_secret_is_written_down",
    "settings_survive_a_round_trip",
    "what_is_written_down_is_json",
)
class Unwritten(Mock):
    """Has a setting that cannot be written as JSON."""

    lock: Any = Field(default_factory=threading.Lock)

    def __deepcopy__(self, memo: Any = None) -> Any:
        return self.model_copy()


@fails("no_secret_is_written_down")
class LeakyDump(Mock):
    """Writes its key down."""

    api_key: str = Field(default="", repr=False)


@fails("no_secret_is_told")
class LeakyEvents(Mock):
    """Tells its key to listeners."""

    def to_payload(self) -> dict[str, Any]:
        return {**super().to_payload(), "key": self.api_key}


# -- several calls at once -----------------------------------------------------------------------


@fails(
    "gathered_calls",
    "gathered_completions",
    "threads_beside_the_event_loop",
)
class SharedState(Mock):
    """Keeps the conversation that it answers where other calls put theirs."""

    _messages: Any = PrivateAttr(default=None)

    async def aanswer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        self._messages = messages
        for _ in range(4):
            await asyncio.sleep(0)
        return super().answer(self._messages, **asked)


@fails("threads")
class SharedByThreads(Mock):
    """Keeps the conversation where other threads put theirs."""

    _messages: Any = PrivateAttr(default=None)

    def answer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        self._messages = messages
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        return super().answer(self._messages, **asked)


@fails("streams_in_turns")
class SharedByStreams(Mock):
    """Keeps the conversation where other streams put theirs."""

    _messages: Any = PrivateAttr(default=None)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        self._messages = messages
        yield ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=""), delta="")
        yield from self.steps(self._messages, **kwargs)


@fails("gathered_streams")
class SharedByAsyncStreams(Mock):
    """Keeps the conversation where other asynchronous streams put theirs."""

    _messages: Any = PrivateAttr(default=None)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        self._messages = messages
        for _ in range(8):
            await asyncio.sleep(0)
        return self.asteps(self._messages, **kwargs)


@fails("one_event_loop_after_another")
class OneLoop(Mock):
    """Belongs to the event loop of its first call."""

    _loop: Any = PrivateAttr(default=None)

    async def aanswer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        self._loop = self._loop or asyncio.get_running_loop()
        if self._loop is not asyncio.get_running_loop():
            raise MockError("another event loop")
        return await super().aanswer(messages, **asked)


# -- the event loop ------------------------------------------------------------------------------


@fails(
    "a_timeout_ends_achat",
    "achat_can_be_cancelled",
    "the_loop_goes_on_during_achat",
    "the_loop_goes_on_during_achat_with_tools",
    "the_loop_goes_on_during_prediction",
)
class BlockingChat(Mock):
    """Does not let the event loop go on while it answers."""

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self.answer(messages, **kwargs)


@fails(
    "acomplete_can_be_cancelled",
    "the_loop_goes_on_during_acomplete",
)
class BlockingCompletion(Mock):
    """Does not let the event loop go on while it completes."""

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return completion_of(self.answer([ChatMessage(prompt)], **kwargs))


@fails(
    "a_timeout_ends_astream_chat",
    "astream_chat_can_be_cancelled",
    "the_loop_goes_on_during_astream_chat",
    "the_loop_goes_on_during_astream_complete",
)
class BlockingStreams(Mock):
    """Does not let the event loop go on while it streams."""

    async def asteps(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponseAsyncGen:
        for step in self.steps(messages, **asked):
            yield step

    async def aanswer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        for _ in range(8):
            await asyncio.sleep(0)
        return self.answer(messages, **asked)


@fails("the_loop_goes_on_during_structured_prediction")
class BlockingStructured(Mock):
    """Does not let the event loop go on while it predicts objects."""

    async def astructured_predict(self, *args: Any, **kwargs: Any) -> Any:
        return self.structured_predict(*args, **kwargs)


@fails(
    "a_timeout_ends_achat",
    "achat_can_be_cancelled",
    "acomplete_can_be_cancelled",
)
class BrokenByCancelling(Mock):
    """Cannot be asked again once a call was given up."""

    _busy: bool = PrivateAttr(default=False)

    async def aanswer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        if self._busy:
            raise MockError("still busy")
        try:
            return await super().aanswer(messages, **asked)
        except asyncio.CancelledError:
            self._busy = True
            raise


@fails(
    "a_timeout_ends_achat",
    "achat_can_be_cancelled",
    "acomplete_can_be_cancelled",
)
class Uncancelled(Mock):
    """Goes on when it is cancelled."""

    async def aanswer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        try:
            return await super().aanswer(messages, **asked)
        except asyncio.CancelledError:
            return self.answer(messages, **asked)
