"""What several test modules use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk

from rksc_agents import RKSCReasoner
from rksc_agents.testing import scripted_reasoner

SIX = "What is 6 x 7?"
HI = "Say hi."
SCRIPT = {
    SIX: {"It is 42.": 3, "It is 41.": 1},
    HI: "Hello there.",
    "Long?": "a" * 400,
    "Think.": "<think>\nHm, so.\n</think>\n\nIt is 5.",
    **{f"Question {i}?": f"Answer {i}." for i in range(40)},
}


@contextmanager
def scripted(**settings: Any) -> Iterator[RKSCReasoner]:
    """A reasoner on the script."""
    with scripted_reasoner(SCRIPT, **settings) as reasoner:
        yield reasoner


def added(chunks: Any) -> AIMessageChunk:
    """The sum of chunks."""
    total = None
    for chunk in chunks:
        total = chunk if total is None else total + chunk
    assert isinstance(total, AIMessageChunk)
    return total


def essence(message: AIMessage) -> dict[str, Any]:
    """What of a message does not depend on the clock or on what was asked before."""
    metadata = {**message.response_metadata, "rksc": dict(message.response_metadata["rksc"])}
    for name in ("timings", "tokens_reused", "kv_bytes"):
        del metadata["rksc"][name]
    usage = {**(message.usage_metadata or {})}
    usage.pop("input_token_details", None)
    return {
        "content": message.content,
        "tool_calls": message.tool_calls,
        "invalid": [{**call, "error": None} for call in message.invalid_tool_calls],
        "usage": usage,
        "metadata": metadata,
    }


class Recorder(BaseCallbackHandler):
    """Notes the runs and the custom events that it is told of."""

    def __init__(self) -> None:
        self.starts: list[UUID] = []
        self.ends: list[UUID] = []
        self.errors: list[BaseException] = []
        self.tokens: list[Any] = []
        self.custom: list[tuple[str, Any, UUID]] = []

    def on_chat_model_start(self, *_: Any, run_id: UUID, **__: Any) -> None:
        self.starts.append(run_id)

    def on_llm_end(self, *_: Any, run_id: UUID, **__: Any) -> None:
        self.ends.append(run_id)

    def on_llm_error(self, error: BaseException, **_: Any) -> None:
        self.errors.append(error)

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.tokens.append(token)

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **_: Any) -> None:
        self.custom.append((name, data, run_id))


class AsyncRecorder(AsyncCallbackHandler):
    """Notes custom events, asynchronously."""

    def __init__(self) -> None:
        self.custom: list[tuple[str, Any, UUID]] = []

    async def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **_: Any) -> None:
        self.custom.append((name, data, run_id))


class Gate:
    """Lets a strategy's extractor wait, so that a test can look at a run in its middle."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, text: str) -> str:
        self.reached.set()
        self.open.wait(20)
        return text


def until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until something is true."""
    waited = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if true():
            return True
        waited.wait(0.01)
    return False
