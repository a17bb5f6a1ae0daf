"""Structured output: a model and a parser that give validated objects."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, get_args

from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_rksc.tools import openai_tools, schema_of
from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from langchain_rksc.chat_models import ChatRKSC

Method = Literal["json_schema", "function_calling", "json_mode"]
"""How structured output is made."""

Structured = dict[str, Any] | Any
"""An instance of a pydantic class, or a mapping."""


def structured_output(
    model: ChatRKSC,
    schema: Mapping[str, Any] | type | None,
    *,
    method: Method,
    include_raw: bool,
    strict: bool | None,
    kwargs: dict[str, Any],
) -> Runnable[Any, Structured]:
    """See :meth:`langchain_rksc.chat_models.ChatRKSC.with_structured_output`."""
    if method not in get_args(Method):
        raise ConfigError(f"method = {method!r}: give one of {', '.join(get_args(Method))}")
    if schema is None and method != "json_mode":
        raise ConfigError(f"with_structured_output needs a schema for method = {method!r}; 'json_mode' needs none")
    bound: Runnable[Any, Any]
    parser: Runnable[Any, Any]
    told = {"kwargs": {"method": method, **({} if strict is None else {"strict": strict})}, "schema": schema}
    if method == "function_calling":
        tool = openai_tools([schema], strict)[0]  # type: ignore[list-item]
        name = tool["function"]["name"]
        bound = model.bind_tools(
            [tool], tool_choice=name, parallel_tool_calls=False, ls_structured_output_format=told, **kwargs
        )
        if is_pydantic(schema):
            parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
        else:
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    else:
        format_: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            wanted = schema_of(schema, strict)
            format_ = {"type": "json_schema", "json_schema": {"name": wanted.get("title", "answer"), "schema": wanted}}
        if schema is not None:
            kwargs = {"ls_structured_output_format": told, **kwargs}
        bound = model.bind(response_format=format_, **kwargs)
        parser = _json_parser(schema)
    return _with_raw(bound, parser) if include_raw else bound | parser


def is_pydantic(schema: object) -> bool:
    """Whether a schema is a pydantic class, of version 1 or 2."""
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _json_parser(schema: Any) -> BaseOutputParser[Any]:
    return PydanticOutputParser(pydantic_object=schema) if is_pydantic(schema) else JsonOutputParser()


def _with_raw(bound: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, dict[str, Any]]:
    """The message, what was parsed from it, and the error where that failed."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")
