"""Mocks that do not conform in their calls of tools and their objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance_mock import Mock, fails
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program.utils import create_flexible_model, get_program_for_llm
from llama_index.core.tools.types import BaseTool

# -- tools ---------------------------------------------------------------------------------------


class Adding(Mock):
    """Does something else where it is to call `add`."""

    def calls(self, tools: Sequence[BaseTool], *, parallel: bool, required: bool) -> list[ToolCallBlock]:
        made = super().calls(tools, parallel=parallel, required=required)
        return self.wrong(made) if tools[0].metadata.name == "add" else made

    def wrong(self, made: list[ToolCallBlock]) -> list[ToolCallBlock]:
        """The calls that are made in place of the right ones."""
        raise NotImplementedError


@fails(
    "a_call_is_the_models_choice",
    "achat_with_tools",
    "apredict_and_call",
    "astream_chat_with_tools",
    "chat_with_tools",
    "each_tool_can_be_called",
    "predict_and_call",
    "stream_chat_with_tools",
)
class WrongArguments(Adding):
    """Calls tools with arguments that they do not take."""

    def wrong(self, made: list[ToolCallBlock]) -> list[ToolCallBlock]:
        return [block.model_copy(update={"tool_kwargs": {"a": "two", "b": 3}}) for block in made]


@fails(
    "a_call_is_the_models_choice",
    "achat_with_tools",
    "apredict_and_call",
    "astream_chat_with_tools",
    "chat_with_tools",
    "each_tool_can_be_called",
    "predict_and_call",
    "stream_chat_with_tools",
)
class MoreArguments(Adding):
    """Calls tools with more arguments than they take."""

    def wrong(self, made: list[ToolCallBlock]) -> list[ToolCallBlock]:
        return [block.model_copy(update={"tool_kwargs": {"a": 2, "b": 3, "c": 4}}) for block in made]


@fails(
    "a_call_is_the_models_choice",
    "achat_with_tools",
    "apredict_and_call",
    "astream_chat_with_tools",
    "chat_with_tools",
    "each_tool_can_be_called",
    "predict_and_call",
    "stream_chat_with_tools",
)
class UnknownTool(Adding):
    """Calls tools that do not exist."""

    def wrong(self, made: list[ToolCallBlock]) -> list[ToolCallBlock]:
        return [block.model_copy(update={"tool_name": "subtract"}) for block in made]


@fails(
    "achat_with_tools",
    "apredict_and_call",
    "astream_chat_with_tools",
    "calls_have_ids_of_their_own",
    "chat_with_tools",
    "each_tool_can_be_called",
    "one_call_where_parallel_calls_are_not_allowed",
    "predict_and_call",
    "results_are_read",
    "stream_chat_with_tools",
)
class Unwilling(Adding):
    """Calls no tool even where it must."""

    def wrong(self, made: list[ToolCallBlock]) -> list[ToolCallBlock]:
        return []


@fails(
    "apredict_and_call",
    "one_call_where_parallel_calls_are_not_allowed",
    "predict_and_call",
    "results_are_read",
)
class AlwaysParallel(Adding):
    """Makes two calls where one is allowed."""

    def wrong(self, made: list[ToolCallBlock]) -> list[ToolCallBlock]:
        return [block.model_copy(update={"tool_call_id": f"call_{at}"}) for at, block in enumerate(made[:1] * 2)]


@fails("each_tool_can_be_called")
class Selective(Mock):
    """Calls one of the tools without the arguments that it needs."""

    def calls(self, tools: Sequence[BaseTool], *, parallel: bool, required: bool) -> list[ToolCallBlock]:
        made = super().calls(tools, parallel=parallel, required=required)
        if tools[0].metadata.name != "weather":
            return made
        return [block.model_copy(update={"tool_kwargs": {}}) for block in made]


@fails("calls_have_ids_of_their_own")
class SameIds(Mock):
    """Gives all calls one id."""

    def calls(self, tools: Sequence[BaseTool], *, parallel: bool, required: bool) -> list[ToolCallBlock]:
        made = super().calls(tools, parallel=parallel, required=required)
        return [block.model_copy(update={"tool_call_id": "call"}) for block in made]


@fails("no_call_is_an_error_unless_it_is_not")
class SilentWithoutCall(Mock):
    """Finds it no error that no tool was called."""

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        return super().get_tool_calls_from_response(response, error_on_no_tool_call=False)


@fails("a_question_may_be_a_message_or_history")
class DeafToHistory(Mock):
    """Calls no tool where the question is not given apart from the history."""

    def _prepare_chat_with_tools(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> dict[str, Any]:
        prepared = super()._prepare_chat_with_tools(tools, *args, **kwargs)
        program = tools[0].metadata.name not in ("add", "weather", "now")
        return prepared if kwargs.get("user_msg") or program else {**prepared, "tools": []}


@fails("calls_of_others_can_be_history")
class OwnHistory(Mock):
    """Reads calls of its own alone."""

    def read(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        for message in messages:
            if any(isinstance(block, ToolCallBlock) for block in message.blocks):
                assert message.additional_kwargs["tool_calls"]
        return list(messages)


@fails("results_are_read")
class DeafToResults(Mock):
    """Does not read what tools gave."""

    def read(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        return [
            message.model_copy(update={"blocks": [TextBlock(text="ok")]})
            if message.role == MessageRole.TOOL
            else message
            for message in messages
        ]


# -- objects -------------------------------------------------------------------------------------


@fails(
    "a_conversation_as_a_template_of_objects",
    "a_structured_llm_chats",
    "a_structured_llm_completes",
    "all_kinds_of_fields",
    "astream_structured_predict",
    "astructured_predict",
    "stream_structured_predict",
    "structured_predict",
    "structured_prediction_is_told",
)
class Unstructured(Mock):
    """Predicts mappings in place of instances."""

    def structured_predict(self, *args: Any, **kwargs: Any) -> Any:
        return super().structured_predict(*args, **kwargs).model_dump()


@fails(
    "a_structured_llm_achats",
    "a_structured_llm_acompletes",
    "astructured_predict",
    "structured_prediction_is_told",
)
class UnstructuredLater(Mock):
    """Predicts mappings in place of instances, asynchronously."""

    async def astructured_predict(self, *args: Any, **kwargs: Any) -> Any:
        return (await super().astructured_predict(*args, **kwargs)).model_dump()


def _part(whole: Any) -> Any:
    part: Any = create_flexible_model(type(whole))
    return part(**whole.model_dump())


@fails(
    "a_structured_llm_streams",
    "all_kinds_of_fields_streamed",
    "stream_structured_predict",
    "streamed_structured_prediction_is_told",
)
class PartsOfAnObject(Mock):
    """Its streams of objects end with a part."""

    def stream_structured_predict(self, *args: Any, **kwargs: Any) -> Any:
        return (_part(part) for part in super().stream_structured_predict(*args, **kwargs))


@fails(
    "a_structured_llm_astreams",
    "astream_structured_predict",
    "streamed_structured_prediction_is_told",
)
class PartsOfAnObjectLater(Mock):
    """Its asynchronous streams of objects end with a part."""

    async def astream_structured_predict(self, *args: Any, **kwargs: Any) -> Any:
        stream = await super().astream_structured_predict(*args, **kwargs)
        return (_part(part) async for part in stream)


@fails(
    "a_function_calling_program_with_all_kinds_of_fields",
    "all_kinds_of_fields",
    "all_kinds_of_fields_streamed",
)
class FlatObjects(Mock):
    """Writes text where there is to be a choice."""

    def calls(self, tools: Sequence[BaseTool], *, parallel: bool, required: bool) -> list[ToolCallBlock]:
        made = super().calls(tools, parallel=parallel, required=required)
        return [
            block.model_copy(update={"tool_kwargs": {**block.tool_kwargs, "colour": "grey"}})  # type: ignore[dict-item]
            if "colour" in block.tool_kwargs
            else block
            for block in made
        ]


@fails(
    "a_conversation_as_a_template_of_objects",
    "a_function_calling_program",
    "a_function_calling_program_with_all_kinds_of_fields",
    "a_structured_llm_chats",
    "a_structured_llm_completes",
    "all_kinds_of_fields",
    "astream_structured_predict",
    "astructured_predict",
    "predict_and_call",
    "stream_structured_predict",
    "structured_predict",
    "structured_prediction_is_told",
    "the_program_for_the_llm",
)
class Unpredicted(Mock):
    """Writes no objects for programs."""

    def predict_and_call(self, *args: Any, **kwargs: Any) -> Any:
        response = super().predict_and_call(*args, **kwargs)
        response.sources.clear()
        return response


@fails(
    "streamed_structured_prediction_is_told",
    "structured_prediction_is_told",
)
class UntoldObjects(Mock):
    """Tells nothing of the objects that it predicts."""

    async def astructured_predict(self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **args: Any) -> Any:
        return await get_program_for_llm(output_cls, prompt, self).acall(llm_kwargs=llm_kwargs, **args)

    def stream_structured_predict(self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **args: Any) -> Any:
        return get_program_for_llm(output_cls, prompt, self).stream_call(llm_kwargs=llm_kwargs, **args)
