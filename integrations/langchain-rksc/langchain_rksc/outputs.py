"""Results of the core as LangChain messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.messages import AIMessage, InvalidToolCall, ToolCall
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.outputs import ChatGeneration
from langchain_core.utils.json import parse_partial_json

from rksc_agents.adapter.results import PROVIDER, call_ids, finish_reason, id_of, logprobs_of
from rksc_agents.result import ReasoningResult

Content = str | list[str | dict[str, Any]]


def message_of(result: ReasoningResult, metadata: dict[str, Any], asked: str) -> AIMessage:
    """The winning answer as a message.

    Parameters
    ----------
    result : ReasoningResult
    metadata : dict
        From :func:`metadata_of`.
    asked : str
        What the ids of tool calls are made from, beside the calls.
    """
    return AIMessage(
        content=content_of(result.thinking, result.text),
        tool_calls=tool_calls_of(result, asked),
        invalid_tool_calls=invalid_tool_calls_of(result, asked),
        usage_metadata=usage_of(result),
        response_metadata=metadata,
    )


def generation_of(message: AIMessage) -> ChatGeneration:
    """A message as a generation."""
    return ChatGeneration(message=message, generation_info=generation_info(message.response_metadata))


def generation_info(metadata: dict[str, Any]) -> dict[str, Any]:
    """What of the metadata LangChain expects beside the message too."""
    return {name: metadata[name] for name in ("finish_reason", "logprobs") if name in metadata}


def content_of(thinking: str, text: str) -> Content:
    """The content of a message: the text, or blocks where the model thought before it."""
    if not thinking:
        return text
    return [reasoning_block(thinking, 0), *([text_block(text, 1)] if text else [])]


def reasoning_block(text: str, index: int) -> dict[str, Any]:
    """A piece of reasoning; pieces with one index add up."""
    return {"type": "reasoning", "reasoning": text, "index": index}


def text_block(text: str, index: int) -> dict[str, Any]:
    """A piece of text; pieces with one index add up."""
    return {"type": "text", "text": text, "index": index}


# -- tool calls ---------------------------------------------------------------------------------


def tool_calls_of(result: ReasoningResult, asked: str) -> list[ToolCall]:
    """The winner's tool calls. Their ids are the same for the same calls in answer to the same conversation."""
    ids = call_ids(result, asked)
    return [
        tool_call(name=call.name, args=call.arguments, id=id_) for id_, call in zip(ids, result.tool_calls, strict=True)
    ]


def invalid_tool_calls_of(result: ReasoningResult, asked: str) -> list[InvalidToolCall]:
    """What looks like a call of the winner and is none."""
    calls = []
    for index, call in enumerate(result.invalid_tool_calls):
        id_ = id_of(asked, index, call.text)
        calls.append(invalid_tool_call(name=call.name, args=_unreadable(call.text), id=id_, error=call.error))
    return calls


def _unreadable(text: str) -> str:
    """The text of a call that is none, such that LangChain does not mend it into one while it adds up a stream."""
    try:
        mended = parse_partial_json(text)
    except ValueError:
        return text
    return json.dumps(text) if isinstance(mended, dict) else text


# -- usage and metadata -------------------------------------------------------------------------


def usage_of(result: ReasoningResult) -> UsageMetadata:
    """The tokens of a request; those of losing branches and of thinking count as reasoning."""
    usage = result.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.prompt_tokens_reused),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )


def metadata_of(
    result: ReasoningResult, model: str, *, decode: Callable[[Sequence[int]], str] | None = None
) -> dict[str, Any]:
    """What `response_metadata` tells of a result.

    Parameters
    ----------
    result : ReasoningResult
    model : str
        The model's name.
    decode : callable or None
        Turns tokens into text; where given, the log-probabilities of the winner's tokens are told.
    """
    metadata = {
        "model_name": model,
        "model_provider": PROVIDER,
        "finish_reason": finish_reason(result),
        "rksc": result.evidence(),
    }
    if decode is not None:
        metadata["logprobs"] = {"content": logprobs_of(result, decode)}
    return metadata
