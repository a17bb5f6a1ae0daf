"""Results of the core as LlamaIndex responses, whole and while they grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import Field

from rksc_agents.adapter.progress import Grown
from rksc_agents.adapter.results import call_ids, calls_of, finish_reason, logprobs_of, usage_of
from rksc_agents.events import BranchToken, Event
from rksc_agents.result import ReasoningResult

Decode = Callable[[Sequence[int]], str]


class Answered(ChatResponse):
    """A response that knows how it was found.

    Attributes
    ----------
    result : ReasoningResult
        The answer with all its branches; no part of what is serialized.
    """

    result: ReasoningResult = Field(exclude=True, repr=False)


def response_of(result: ReasoningResult, model: str, asked: object, decode: Decode | None = None) -> Answered:
    """The winning answer.

    Parameters
    ----------
    result : ReasoningResult
    model : str
        The model's name.
    asked : object
        What the ids of tool calls are made from, beside the calls.
    decode : callable or None
        Turns tokens into text; where given, the log-probabilities of the winner's tokens are told.
    """
    return Answered(
        result=result,
        message=message_of(result, asked),
        raw=raw_of(result, model),
        logprobs=None if decode is None else _logprobs(result, decode),
        additional_kwargs={"rksc": result.evidence()},
    )


def message_of(result: ReasoningResult, asked: object) -> ChatMessage:
    """The winner as a message: thinking, text and calls, each in blocks of its own."""
    ids = call_ids(result, asked)
    blocks = _blocks(result.thinking, result.text, thought=result.usage.completion_tokens_thinking)
    if result.tool_calls and not result.text:
        blocks = blocks[:-1]  # an empty text beside a call would be read as an answer
    blocks += [
        ToolCallBlock(tool_call_id=id_, tool_name=call.name, tool_kwargs=call.arguments)
        for id_, call in zip(ids, result.tool_calls, strict=True)
    ]
    calls = calls_of(result, asked)
    # programs that stream look for calls there
    return ChatMessage(
        role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs={"tool_calls": calls} if calls else {}
    )


def raw_of(result: ReasoningResult, model: str) -> dict[str, Any]:
    """What `raw` tells of a result: usage in OpenAI's form, the finish reason, and the `rksc` record."""
    raw: dict[str, Any] = {
        "model": model,
        "finish_reason": finish_reason(result),
        "usage": usage_of(result),
        "rksc": result.evidence(),
    }
    if result.invalid_tool_calls:
        raw["invalid_tool_calls"] = [call.model_dump() for call in result.invalid_tool_calls]
    return raw


def completion_of(response: ChatResponse) -> CompletionResponse:
    """An answer to a text."""
    return CompletionResponse(
        text=response.message.content or "",
        raw=response.raw,
        logprobs=response.logprobs,
        delta=response.delta,
        additional_kwargs=response.additional_kwargs,
    )


def _blocks(thinking: str, text: str, *, thought: int | None = None) -> list[ContentBlock]:
    blocks: list[ContentBlock] = [ThinkingBlock(content=thinking, num_tokens=thought)] if thinking else []
    return [*blocks, TextBlock(text=text)]


def _logprobs(result: ReasoningResult, decode: Decode) -> list[list[LogProb]]:
    return [
        [LogProb(token=item["token"], logprob=item["logprob"], bytes=item["bytes"] or [])]
        for item in logprobs_of(result, decode)
    ]


class Growing:
    """Turns one run's events into responses, each with the text so far and what is new in it.

    Parameters
    ----------
    single : bool
        The run has one branch, whose text is the answer. Of several branches the winning answer comes at the end.
    """

    def __init__(self, *, single: bool) -> None:
        self._single = single
        self._thinking, self._text = Grown(), Grown()

    def push(self, event: Event) -> ChatResponse | None:
        """The response that an event brings, if any."""
        if not (self._single and isinstance(event, BranchToken)):
            return None
        return self._grown(self._thinking.push(event.thinking), self._text.push(event.text))

    def end(self, response: ChatResponse, result: ReasoningResult) -> ChatResponse:
        """The whole answer, with everything that is known only now."""
        thinking, text = self._thinking.rest(result.thinking), self._text.rest(result.text)
        told = {**response.additional_kwargs, **({"thinking_delta": thinking} if thinking else {})}
        return response.model_copy(update={"delta": text, "additional_kwargs": told})

    def _grown(self, thinking: str, text: str) -> ChatResponse | None:
        if not thinking and not text:
            return None
        message = ChatMessage(role=MessageRole.ASSISTANT, blocks=_blocks(self._thinking.shown, self._text.shown))
        told = {"thinking_delta": thinking} if thinking else {}
        return ChatResponse(message=message, delta=text, additional_kwargs=told)
