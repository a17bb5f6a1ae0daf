"""Results in the terms that OpenAI's API made common: finish reasons, ids of calls, log-probabilities of tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from rksc_agents.result import ReasoningResult

PROVIDER = "rksc"
"""What frameworks call this library beside a model's name."""

_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


def finish_reason(result: ReasoningResult) -> str:
    """Why the winner ended: "stop", "length", "tool_calls", or the core's own word for what cut it short."""
    if result.tool_calls:
        return "tool_calls"
    return _FINISH.get(result.finish_reason, result.finish_reason)


def call_ids(result: ReasoningResult, asked: object) -> list[str]:
    """Ids of the winner's tool calls, the same for the same calls in answer to the same conversation `asked`."""
    return [id_of(asked, index, call.name, call.arguments) for index, call in enumerate(result.tool_calls)]


def calls_of(result: ReasoningResult, asked: object) -> list[dict[str, Any]]:
    """The winner's tool calls in OpenAI's form, with their ids; see :func:`call_ids`."""
    return [
        {"id": id_, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for id_, call in zip(call_ids(result, asked), result.tool_calls, strict=True)
    ]


def usage_of(result: ReasoningResult) -> dict[str, Any]:
    """Tokens in OpenAI's form; those of losing branches and thinking count as reasoning."""
    usage = result.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.prompt_tokens_reused},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def id_of(*parts: object) -> str:
    """An id that is made of `parts` alone."""
    return "call_" + hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def logprobs_of(result: ReasoningResult, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """The winner's tokens with their log-probabilities, in OpenAI's form.

    The bytes of a token that holds a part of a character are not known: None.
    """
    content = []
    for branch in result.line:
        for token, logprob in zip(branch.tokens, branch.logprobs, strict=True):
            text = decode([token])
            known = "\N{REPLACEMENT CHARACTER}" not in text
            content.append(
                {
                    "token": text,
                    "bytes": list(text.encode()) if known else None,
                    "logprob": logprob,
                    "top_logprobs": [],
                }
            )
    return content


def each_branch(result: ReasoningResult, strategy: str) -> list[ReasoningResult]:
    """One result per branch, in the order of the branches, where every branch is an answer that was asked for.

    Each tells what the whole request took; no branch has lost, so none counts as reasoning.
    """
    usage = result.usage.model_copy(update={"completion_tokens_winner": result.usage.completion_tokens})
    return [
        result.model_copy(
            update={
                "answer": branch.answer,
                "text": branch.text,
                "tool_calls": branch.tool_calls,
                "invalid_tool_calls": branch.invalid_tool_calls,
                "strategy": strategy,
                "rule": None,
                "winner": index,
                "usage": usage,
            }
        )
        for index, branch in enumerate(result.branches)
    ]
