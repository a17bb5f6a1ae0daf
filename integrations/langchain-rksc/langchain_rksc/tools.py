"""Tools and answer formats as LangChain gives them, in the core's terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool

from rksc_agents.errors import ConfigError

ToolLike = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
"""What LangChain takes for a tool."""


def openai_tools(tools: Sequence[ToolLike], strict: bool | None = None) -> list[dict[str, Any]]:
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
        try:
            converted.append(convert_to_openai_tool(tool, strict=strict))
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"{tool!r} is no tool: {error}") from error
    return converted


def schema_of(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """Return a schema as JSON schema.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if isinstance(schema, Mapping) and not ({"title", "name", "function", "toolSpec"} & schema.keys()):
        schema = {**schema, "title": "answer"} if schema else schema
    try:
        return convert_to_json_schema(schema, strict=strict)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{schema!r} is no schema: give a pydantic class, a TypedDict, a JSON schema, a function in OpenAI's form, "
            f"or a response_format ({error})"
        ) from error
