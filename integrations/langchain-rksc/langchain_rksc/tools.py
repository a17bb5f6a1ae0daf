"""Tools and answer formats as LangChain gives them, in the core's terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool

from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from rksc_agents.model.grammar import Grammar

ToolLike = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
"""What LangChain takes for a tool."""

ToolChoice = str | bool | Mapping[str, Any] | None
"""What LangChain takes for a choice among tools."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of any JSON object."""

FREE = ("auto", "none")
"""Choices that demand no call."""

_FORCED = ("any", "required")
_CHOICES = "None, 'auto', 'any', 'required', 'none', a tool's name, True, False, or a mapping that names a tool"


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


def choice_of(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the core's `tool_choice` for LangChain's; None where there is nothing to choose.

    True and "required" are "any"; False is None, the model's own choice.

    Raises
    ------
    ConfigError
        If it names no tool of `tools`.
    """
    names = [tool["function"]["name"] for tool in tools if "function" in tool]
    if isinstance(choice, Mapping):
        inner = choice.get("function")
        named = inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
        choice = named if named is not None else choice.get("type")
    if choice is None or choice is False:
        return None
    if choice is True or choice in _FORCED:
        return "any"
    if choice in FREE or choice in names:
        return str(choice)
    raise ConfigError(f"tool_choice = {choice!r}: give {_CHOICES}; the tools are {', '.join(names) or 'none'}")


def grammar_of(response_format: object, strict: bool | None = None) -> Grammar | None:
    """Return what an answer follows for a `response_format`; None for free text.

    Parameters
    ----------
    response_format : mapping, class or None
        ``{"type": "json_schema", "json_schema": {"schema": ...}}``, ``{"type": "json_object"}``,
        ``{"type": "text"}``, or a schema itself: a pydantic class, a TypedDict, a JSON schema with a title, or a
        function in OpenAI's form.
    strict : bool or None
        Of :func:`~langchain_core.utils.function_calling.convert_to_json_schema`.

    Raises
    ------
    ConfigError
        If it is none of these.
    """
    from rksc_agents.model.grammar import JSONSchema

    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JSONSchema(ANY_OBJECT)
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return JSONSchema(dict(schema))
        case {"type": "json_schema", "schema": Mapping() as schema}:
            return JSONSchema(dict(schema))
    return JSONSchema(schema_of(response_format, strict))


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
