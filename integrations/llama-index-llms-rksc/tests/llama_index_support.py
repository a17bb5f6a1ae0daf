"""What several test modules use: tools, a schema, a script, listeners."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler
from pydantic import BaseModel, Field

from rksc_agents import RKSCReasoner, SelfConsistency
from rksc_agents.testing import scripted_reasoner

FIVE = SelfConsistency(branches=5, stop=None)
SIX = "What is 6 x 7?"
HI = "Say hi."


class Person(BaseModel):
    """A person."""

    name: str = Field(description="the name")
    age: int


def add(a: int, b: int = 3) -> int:
    """Add two numbers."""
    return a + b


def weather(city: str) -> str:
    """Tell the weather."""
    return f"sunny in {city}"


ADD, WEATHER = (FunctionTool.from_defaults(fn=function) for function in (add, weather))


def called(name: str, /, **arguments: Any) -> str:
    """A call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SCRIPT: dict[str, Any] = {
    SIX: {"It is 42.": 3, "It is 41.": 1},
    HI: "Hello there.",
    "Long?": "a" * 400,
    "Think.": "<think>\nHm, so.\n</think>\n\nIt is 5.",
    "Add.": called("add", a=2, b=3),
    "Add twice.": called("add", a=1, b=1) + "\n" + called("add", a=2, b=2),
    "Say and add.": "I add.\n" + called("add", a=2, b=3),
    "Just talk.": "Fine.",
    "Vote.": {called("add", a=2): 2, called("add", a=2, b=3): 2, called("add", a=5, b=5): 1},
    "Person?": called("Person", name="Ann", age=33),
    "Ann is 33.": '{"name": "Ann", "age": 33}',
    "<tool_response>": "It is 5.",
    **{f"Question {i}?": f"Answer {i}." for i in range(40)},
}


@contextmanager
def scripted(**settings: Any) -> Iterator[RKSCReasoner]:
    """A reasoner on the script."""
    with scripted_reasoner(SCRIPT, **settings) as reasoner:
        yield reasoner


def user(text: str) -> list[ChatMessage]:
    """A conversation of one question."""
    return [ChatMessage(content=text)]


def essence(response: ChatResponse | CompletionResponse) -> dict[str, Any]:
    """What of a response does not depend on the clock, on what was asked before, or on whether it was streamed."""
    raw = {**response.raw} if isinstance(response.raw, dict) else {}
    record = {**raw.pop("rksc", {})}
    for name in ("timings", "tokens_reused", "kv_bytes"):
        record.pop(name, None)
    usage = {**raw.pop("usage", {})}
    usage.pop("prompt_tokens_details", None)
    said = response.message.model_dump() if isinstance(response, ChatResponse) else response.text
    return {"said": said, "raw": raw, "usage": usage, "rksc": record, "logprobs": response.logprobs}


class Listener(BaseEventHandler):
    """Notes what it hears."""

    heard: list[BaseEvent] = []  # noqa: RUF012  (pydantic copies it)

    @classmethod
    def class_name(cls) -> str:
        return "Listener"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        self.heard.append(event)

    def names(self) -> list[str]:
        """The names of what was heard, in order."""
        return [event.class_name() for event in self.heard]

    def of(self, name: str) -> list[Any]:
        """What was heard by a name."""
        return [event for event in self.heard if event.class_name() == name]


@contextmanager
def listening() -> Iterator[Listener]:
    """A listener at the root of all dispatchers."""
    root = get_dispatcher()
    listener = Listener()
    before = root.event_handlers
    root.event_handlers = [*before, listener]
    try:
        yield listener
    finally:
        root.event_handlers = before


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


class Ticks:
    """Counts how often the event loop goes round while something is awaited."""

    def __init__(self) -> None:
        self.count = 0

    async def _tick(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0.001)

    async def __aenter__(self) -> Ticks:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
