"""Tools and answer formats as LlamaIndex gives them, in the core's terms, and calls as it takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatResponse
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program import function_program
from llama_index.core.tools.types import BaseTool

from llama_index.llms.rksc.messages import calls_of
from rksc_agents.errors import ConfigError


def openai_tools(tools: Sequence[BaseTool | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form.

    Raises
    ------
    ConfigError
        If something among them is no tool.
    """
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools = {tools!r}: give a list of tools")
    converted = []
    for tool in tools:
        if isinstance(tool, Mapping):
            converted.append(dict(tool))
        elif isinstance(tool, BaseTool):
            converted.append(tool.metadata.to_openai_tool(skip_length_check=True))
        else:
            raise ConfigError(f"{tool!r} is no tool: wrap a function as FunctionTool.from_defaults(fn=...)")
    return converted


def spells_an_object(tools: Sequence[Any]) -> bool:
    """Whether a program offers one tool whose arguments are its output: nothing but a call makes sense then.

    Programs that stream do not say that a call is required.
    """
    return len(tools) == 1 and getattr(getattr(tools[0], "fn", None), "__module__", "") == function_program.__name__


def schema_of(schema: Any) -> dict[str, Any]:
    """Return a pydantic class or a JSON schema as JSON schema.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if isinstance(schema, type) and callable(made := getattr(schema, "model_json_schema", None)):
        return dict(made())
    if isinstance(schema, Mapping):
        return dict(schema)
    raise ConfigError(f"{schema!r} is no schema: give a pydantic class, a JSON schema, or a response_format")


def selections_of(response: ChatResponse, *, error_on_no_tool_call: bool) -> list[ToolSelection]:
    """Return the calls in a response.

    Raises
    ------
    ValueError
        If there are none, and there should be.
    """
    calls = calls_of(response.message)
    if not calls and error_on_no_tool_call:
        raise ValueError(
            f"the model called no tool and wrote {response.message.content!r}: demand a call with tool_required=True, "
            "or pass error_on_no_tool_call=False"
        )
    return [ToolSelection(tool_id=id_, tool_name=name, tool_kwargs=arguments) for id_, name, arguments in calls]
