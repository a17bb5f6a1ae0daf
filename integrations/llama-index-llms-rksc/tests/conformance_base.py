"""What all areas of the conformance suite have in common: the LLM under test, what it can, questions, listeners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import pytest
from conformance_report import missing, tabulate
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.llms import LLM, ChatMessage, MessageRole
from llama_index.core.llms.llm import ToolSelection
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.span_handlers import SimpleSpanHandler

Test = TypeVar("Test", bound=Callable[..., Any])
Response = ChatResponse | CompletionResponse

SIX = "What is 6 x 7?"
HI = "Say hi."
GREETING = "Grüße aus 東京 🙂"
ADD = "What is 2 plus 3?"
ANN = "Ann is 33 years old. Who is Ann?"
QUESTIONS = [f"Which number comes after {number}?" for number in range(4)]
SECRET = "s3cret-and-not-to-be-told"


def needs(*flags: str) -> Callable[[Test], Test]:
    """The test is about something that not all LLMs can: it is skipped where one of these attributes is not set."""

    def mark(test: Test) -> Test:
        test.needs = flags  # type: ignore[attr-defined]
        return test

    return mark


class Conformance:
    """The LLM under test. Each subclass in this suite is one area; :class:`conformance.LLMConformance` has all.

    Attributes
    ----------
    chat_model, function_calling : bool
        As the LLM's metadata has them.
    structured : bool
        It answers with instances of pydantic classes.
    counts_tokens : bool
        ``raw["usage"]`` of its responses counts tokens as OpenAI's API does.
    deterministic : bool
        Equal calls give equal answers.
    bounds, stops : str or None
        The arguments of a call that bound its answer, by tokens and by texts.
    room : mapping
        Arguments of calls whose answers are longer than a sentence: tool calls, objects.
    secret : mapping
        Settings that hold :data:`SECRET`, which must be told nowhere.
    """

    area: ClassVar[str]

    chat_model: ClassVar[bool] = True
    function_calling: ClassVar[bool] = False
    structured: ClassVar[bool] = True
    counts_tokens: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True
    bounds: ClassVar[str | None] = None
    stops: ClassVar[str | None] = None
    room: ClassVar[dict[str, Any]] = {}
    secret: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _conforming(self, request: pytest.FixtureRequest) -> None:
        tabulate(request)
        if flags := missing(type(self), request.function):
            pytest.skip(f"not supported: {', '.join(flags)}")

    # -- what a subclass gives ------------------------------------------------------------------

    def make_llm(self, **settings: Any) -> LLM:
        """A new LLM; the settings are fields that all LLMs have, such as `system_prompt` and `callback_manager`."""
        raise NotImplementedError

    def make_lone_llm(self, **settings: Any) -> LLM:
        """A new LLM that can be pickled and made anew from its settings."""
        return self.make_llm(**settings)

    def make_failing(self, **settings: Any) -> tuple[LLM, str, type[Exception]]:
        """An LLM, a question at which each of its calls raises, and what it raises."""
        pytest.skip("not supported: no call is known to fail")

    def release(self, llm: LLM) -> None:
        """Free what an LLM of :meth:`make_lone_llm`, or a copy of it, holds."""

    # -- what tests use -------------------------------------------------------------------------

    def ask(self, llm: LLM, question: str) -> str:
        """The answer to a question."""
        return text_of(llm.chat(user(question)))

    def check_more_was_read(self, more: Response, less: Response) -> None:
        """Check that the model read more for one response than for another."""
        if self.counts_tokens:
            assert usage_of(more)["prompt_tokens"] > usage_of(less)["prompt_tokens"]
        elif self.deterministic:
            assert text_of(more) != text_of(less)
        else:
            pytest.skip("not supported: nothing tells what the model read")

    def calls_of(self, llm: Any, response: ChatResponse) -> list[tuple[str, dict[str, Any]]]:
        """Name and arguments of the calls in a response."""
        found: list[ToolSelection] = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        return [(call.tool_name, call.tool_kwargs) for call in found]


def user(text: str) -> list[ChatMessage]:
    """A conversation of one question."""
    return [ChatMessage(role=MessageRole.USER, content=text)]


def text_of(response: Response) -> str:
    """The text of a response."""
    return response.text if isinstance(response, CompletionResponse) else response.message.content or ""


def usage_of(response: Response) -> dict[str, int]:
    """The tokens that a response tells."""
    assert isinstance(response.raw, dict)
    usage: dict[str, int] = response.raw["usage"]
    return usage


async def drained(stream: Awaitable[AsyncIterator[Any]]) -> list[Any]:
    """All that an asynchronous stream brings."""
    return [chunk async for chunk in await stream]


async def started(awaited: Awaitable[Any]) -> Any:
    """What a call gives; all chunks if that is a stream."""
    found = await awaited
    return [chunk async for chunk in found] if isinstance(found, AsyncIterator) else found


class Rounds:
    """Counts how often the event loop goes round while something is awaited, up to `enough`."""

    enough = 4

    def __init__(self) -> None:
        self.count = 0

    async def _go(self) -> None:
        while self.count < self.enough:
            self.count += 1
            await asyncio.sleep(0)

    async def __aenter__(self) -> Rounds:
        self._task = asyncio.create_task(self._go())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.counted = self.count
        await self._task


@contextmanager
def spans() -> Iterator[SimpleSpanHandler]:
    """A handler of spans at the root of all dispatchers."""
    root = get_dispatcher()
    handler = SimpleSpanHandler()
    before = root.span_handlers
    root.span_handlers = [*before, handler]
    try:
        yield handler
    finally:
        root.span_handlers = before


def named(names: Sequence[str], start: str) -> list[str]:
    """Those names that start so."""
    return [name for name in names if name.startswith(start)]
