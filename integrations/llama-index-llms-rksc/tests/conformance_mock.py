"""A small LLM that conforms. Broken ones derive from it, and name the tests that fail for them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    ContentBlock,
    LLMMetadata,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool

FAILING = "Fail!"


BROKEN: dict[type[Mock], set[str]] = {}
"""Mocks that do not conform, each with the tests that fail for it."""


class MockError(RuntimeError):
    """What a mock raises where it is asked to."""


class Mock(FunctionCallingLLM):
    """Tells what it was asked; calls the first tool that it is given with arguments that its schema allows."""

    api_key: str = Field(default="", exclude=True, repr=False)
    max_tokens: int = 40

    @classmethod
    def class_name(cls) -> str:
        return "Mock"

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=4096,
            num_output=self.max_tokens,
            is_chat_model=True,
            is_function_calling_model=True,
            model_name="mock",
        )

    # -- answers --------------------------------------------------------------------------------

    def read(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """What the model reads of a conversation."""
        return list(messages)

    def write(self, messages: Sequence[ChatMessage]) -> str:
        """The answer to a conversation."""
        words = sum(len((message.content or "").split()) for message in messages)
        return f'Of {words} words in {len(messages)} messages the last were "{messages[-1].content}", I think.'

    def calls(self, tools: Sequence[BaseTool], *, parallel: bool, required: bool) -> list[ToolCallBlock]:
        """The calls that the model makes."""
        return [
            ToolCallBlock(tool_call_id=f"call_{at}", tool_name=str(tool.metadata.name), tool_kwargs=_sample(tool))
            for at, tool in enumerate(tools[:1] * (2 if parallel else 1))
        ]

    def steps(self, messages: Sequence[ChatMessage], **asked: Any) -> Iterator[ChatResponse]:
        """The answer as it grows."""
        messages = self.read(messages)
        if messages[-1].content == FAILING:
            raise MockError("asked to fail")
        called: list[ToolCallBlock] = []
        pieces: list[str] = []
        if asked.get("tools") and messages[-1].role != MessageRole.TOOL:
            called = self.calls(asked["tools"], parallel=asked["parallel"], required=asked["required"])
        if not called:
            text = self.write(messages)
            for stop in asked.get("stop", ()):
                text = text.partition(stop)[0]
            pieces = re.findall(r"\S+\s*", text)[: asked.get("max_tokens", self.max_tokens)]
        for at in range(len(pieces)):
            yield _response("".join(pieces[: at + 1]), pieces[at])
        for at in range(len(called)):
            yield _response("", "", called[: at + 1])
        read = sum(len((message.content or "").split()) + 2 for message in messages)
        yield self.last(_response("".join(pieces), "", called), read, len(pieces) + len(called))

    def last(self, response: ChatResponse, read: int, written: int) -> ChatResponse:
        """The last response of a stream."""
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return response.model_copy(update={"raw": {"usage": usage}})

    def answer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        """The whole answer."""
        *_, last = self.steps(messages, **asked)
        return last.model_copy(update={"delta": None})

    async def asteps(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponseAsyncGen:
        """The answer as it grows; the event loop goes round while the conversation is read, and for each step."""
        for _ in range(4):
            await asyncio.sleep(0)
        for step in self.steps(messages, **asked):
            await asyncio.sleep(0)
            yield step

    async def aanswer(self, messages: Sequence[ChatMessage], **asked: Any) -> ChatResponse:
        """The whole answer, with turns of the event loop."""
        found = [step async for step in self.asteps(messages, **asked)]
        return found[-1].model_copy(update={"delta": None})

    # -- the interface --------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self.answer(messages, **kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self.aanswer(messages, **kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self.steps(messages, **kwargs)  # type: ignore[return-value]

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return self.asteps(messages, **kwargs)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return completion_of(self.answer([ChatMessage(prompt)], **kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return completion_of(await self.aanswer([ChatMessage(prompt)], **kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return (completion_of(step) for step in self.steps([ChatMessage(prompt)], **kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        return (completion_of(step) async for step in self.asteps([ChatMessage(prompt)], **kwargs))

    # -- tools ----------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        asked = [ChatMessage(user_msg)] if isinstance(user_msg, str) else [user_msg] if user_msg else []
        messages = [*(chat_history or []), *asked]
        return {
            "messages": messages,
            "tools": tools,
            "parallel": allow_parallel_tool_calls,
            "required": tool_required,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        found = [
            ToolSelection(tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=block.tool_kwargs)  # type: ignore[arg-type]
            for block in response.message.blocks
            if isinstance(block, ToolCallBlock)
        ]
        if not found and error_on_no_tool_call:
            raise ValueError("no tool was called")
        return found


def fails(*tests: str) -> Callable[[type[Mock]], type[Mock]]:
    """Exactly these tests fail for the mock."""

    def register(mock: type[Mock]) -> type[Mock]:
        BROKEN[mock] = {f"test_{test}" for test in tests}
        return mock

    return register


def _response(text: str, delta: str, called: Sequence[ToolCallBlock] = ()) -> ChatResponse:
    blocks: list[ContentBlock] = [*([TextBlock(text=text)] if text else []), *called]
    legacy = [{"name": block.tool_name, "arguments": json.dumps(block.tool_kwargs)} for block in called]
    message = ChatMessage(
        role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs={"tool_calls": legacy} if legacy else {}
    )
    return ChatResponse(message=message, delta=delta)


def completion_of(response: ChatResponse) -> CompletionResponse:
    return CompletionResponse(text=response.message.content or "", delta=response.delta, raw=response.raw)


def _sample(tool: BaseTool) -> dict[str, Any]:
    assert tool.metadata.fn_schema is not None
    schema = tool.metadata.fn_schema.model_json_schema()
    sample = _value(schema, schema.get("$defs", {}))
    assert isinstance(sample, dict)
    return sample


def _value(schema: Mapping[str, Any], classes: Mapping[str, Any]) -> Any:
    """Something that a JSON schema allows."""
    if "$ref" in schema:
        return _value(classes[schema["$ref"].rpartition("/")[2]], classes)
    if "anyOf" in schema:
        return _value(schema["anyOf"][0], classes)
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {name: _value(each, classes) for name, each in schema.get("properties", {}).items()}
        case "array":
            return [_value(schema["items"], classes)]
        case "integer" | "number":
            return schema.get("minimum", 0) + 1
        case "boolean":
            return True
    return "Ann"
