"""One call's settings in the terms that OpenAI's API made common, as options of the reasoner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rksc_agents.adapter.settings import exit_of, sharing_of, strategy_of
from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from rksc_agents import Options
    from rksc_agents.model.grammar import Grammar

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "stop", "seed")
"""The fields of :class:`~rksc_agents.config.Sampling` that a model object and a call may set."""

SETTINGS = (*SAMPLING, "strategy", "sharing", "exit")
"""What a model object and a call may set."""

FORM = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "grammar")
"""What a call alone may set: what the answer is to look like."""

MADE: Mapping[str, Callable[[object], Any]] = {"strategy": strategy_of, "sharing": sharing_of, "exit": exit_of}
"""What makes objects of the core of settings."""

ToolChoice = str | bool | Mapping[str, Any] | None
"""What frameworks take for a choice among tools."""

SchemaOf = Callable[[Any], dict[str, Any]]
"""Makes a JSON schema of what a framework takes for one; raises ConfigError for all else."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of any JSON object."""

_FORCED = ("any", "required")
_CHOICES = "None, 'auto', 'any', 'required', 'none', a tool's name, True, False, or a mapping that names a tool"


def options_of(settings: Mapping[str, Any], schema_of: SchemaOf | None = None) -> Options:
    """Return the reasoner's options for a call's settings.

    Parameters
    ----------
    settings : mapping
        By the names of :data:`SETTINGS` and :data:`FORM`; others are left out. `tools` are in OpenAI's form.
    schema_of : callable or None
        Makes the schema where `response_format` is a schema itself; None takes JSON schemas.

    Raises
    ------
    ConfigError
        If a setting is malformed, or two of them contradict each other.
    """
    options = {name: settings[name] for name in SAMPLING if name in settings}
    options |= {name: made(settings[name]) for name, made in MADE.items() if name in settings}
    tools = settings.get("tools") or ()
    choice = choice_of(settings.get("tool_choice"), tools)
    if choice is not None and (tools or choice in _FORCED):
        options["tool_choice"] = choice
    if tools:
        options["tools"] = tools
        if "parallel_tool_calls" in settings:
            options["parallel_tool_calls"] = settings["parallel_tool_calls"]
    grammar, format_ = settings.get("grammar"), settings.get("response_format")
    if grammar is not None and format_ is not None:
        raise ConfigError("grammar and response_format both say what the answer looks like: give one of the two")
    if format_ is not None:
        grammar = grammar_of(format_, schema_of)
    if grammar is not None:
        options["grammar"] = grammar
    return cast("Options", options)


def choice_of(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the core's `tool_choice` for a framework's; None where there is nothing to choose.

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
    if choice in ("auto", "none") or choice in names:
        return str(choice)
    raise ConfigError(f"tool_choice = {choice!r}: give {_CHOICES}; the tools are {', '.join(names) or 'none'}")


def grammar_of(response_format: object, schema_of: SchemaOf | None = None) -> Grammar | None:
    """Return what an answer follows for a `response_format`; None for free text.

    Parameters
    ----------
    response_format : mapping, class or None
        ``{"type": "json_schema", "json_schema": {"schema": ...}}``, ``{"type": "json_object"}``,
        ``{"type": "text"}``, or a schema itself.
    schema_of : callable or None
        Makes the schema in the last case; None takes JSON schemas.

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
    if schema_of is not None:
        return JSONSchema(schema_of(response_format))
    if isinstance(response_format, Mapping):
        return JSONSchema(dict(response_format))
    raise ConfigError(f"response_format = {response_format!r}: give a mapping in OpenAI's form, or a JSON schema")
