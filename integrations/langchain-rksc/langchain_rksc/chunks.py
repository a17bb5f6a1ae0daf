"""Events of a run as chunks of a message: they add up to the message that a call without streaming returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk

from langchain_rksc.outputs import (
    Content,
    generation_info,
    invalid_tool_calls_of,
    reasoning_block,
    text_block,
    tool_calls_of,
    usage_of,
)
from rksc_agents.adapter.progress import Grown
from rksc_agents.events import BranchToken, Event
from rksc_agents.result import ReasoningResult


class Chunks:
    """Turns one run's events into chunks.

    A single branch is streamed token by token, its thinking as reasoning blocks. Of several branches the winning answer
    comes at the end; before it come the branches' texts, each as a reasoning block of its own, if that is asked for.

    Parameters
    ----------
    single : bool
        The run has one branch, whose text is the answer.
    reasoning : bool
        Show several branches while they run.
    """

    def __init__(self, *, single: bool, reasoning: bool) -> None:
        self._single = single
        self._reasoning = reasoning and not single
        self._thinking, self._text = Grown(), Grown()
        self._branches: dict[int, str] = {}  # what its last piece was: "thinking" or "text"

    def push(self, event: Event) -> Iterator[ChatGenerationChunk]:
        """The chunks that an event brings."""
        if not isinstance(event, BranchToken):
            return
        if self._single:
            yield from self._grow(self._thinking.push(event.thinking), self._text.push(event.text))
        elif self._reasoning:
            for kind, text in (("thinking", event.thinking), ("text", event.text)):
                if text:
                    yield _chunk([self._piece(event.branch, kind, text)])

    def end(
        self, result: ReasoningResult, metadata: dict[str, Any], asked: str, *, usage: bool = True
    ) -> Iterator[ChatGenerationChunk]:
        """The rest of the answer, then the last chunk, with everything that is known only now."""
        if self._reasoning:
            if result.text:
                yield _chunk([text_block(result.text, len(result.branches))])
        else:
            yield from self._grow(self._thinking.rest(result.thinking), self._text.rest(result.text))
        calls = [(call["name"], json.dumps(call["args"]), call["id"]) for call in tool_calls_of(result, asked)]
        calls += [(call["name"] or "", call["args"] or "", call["id"]) for call in invalid_tool_calls_of(result, asked)]
        message = AIMessageChunk(
            content="",
            tool_call_chunks=[
                tool_call_chunk(name=name, args=args, id=id_, index=index)
                for index, (name, args, id_) in enumerate(calls)
            ],
            usage_metadata=usage_of(result) if usage else None,
            response_metadata=metadata,
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=message, generation_info=generation_info(metadata))

    def _grow(self, thinking: str, text: str) -> Iterator[ChatGenerationChunk]:
        if thinking:
            yield _chunk([reasoning_block(thinking, 0)])
        if text:
            yield _chunk([text_block(text, 1)] if self._thinking.shown else text)

    def _piece(self, branch: int, kind: str, text: str) -> dict[str, Any]:
        last = self._branches.get(branch)
        self._branches[branch] = kind
        if last is None:
            return reasoning_block(text, branch) | {"extras": {"branch": branch}}
        return reasoning_block(text if last == kind else f"\n\n{text}", branch)


def _chunk(content: Content) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=content))
