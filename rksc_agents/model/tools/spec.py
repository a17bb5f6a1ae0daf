"""Tools that a model may call, and the calls that it makes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rksc_agents.errors import ConfigError
from rksc_agents.model.canonical import canonical
from rksc_agents.types import ToolCall

AUTO, ANY, NONE = "auto", "any", "none"
"""Whether to call is the model's choice, a must, or out of the question; else a tool's name says which one to call."""

_NAME = re.compile(r"[\w.:/-]{1,128}")
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes
    ----------
    name : str
        Letters, digits and ``_ . : / -``, at most 128.
    description : str
        What it does, for the model.
    parameters : mapping
        JSON schema of its arguments, an object.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    def function(self) -> dict[str, Any]:
        """The tool in OpenAI's form, as chat templates take it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the arguments that must be given."""
        return tuple(self.parameters.get("required") or ())


def tools_of(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Check tools.

    Parameters
    ----------
    tools : sequence of mapping
        Each in OpenAI's form, ``{"type": "function", "function": {...}}``, or its inner part alone: "name",
        "description", "parameters".

    Raises
    ------
    ConfigError
        If one is malformed, or a name occurs twice.
    """
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools = {tools!r}: give a list of tools, each a mapping with a name")
    found = tuple(map(_tool, tools))
    names = [tool.name for tool in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two tools are called {twice!r}: a call could mean either, so rename one")
    return found


def _tool(given: Any) -> Tool:
    if isinstance(given, Tool):
        return given
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(inner, Mapping):
        raise ConfigError(f"a tool is {given!r}: write it as {{'name': ..., 'description': ..., 'parameters': schema}}")
    name = inner.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"a tool has the name {name!r}: give letters, digits and _ . : / -, at most 128 of them")
    if name in (AUTO, ANY, NONE):
        raise ConfigError(f"a tool has the name {name!r}, which as tool_choice means something else: rename it")
    parameters = _NOTHING if inner.get("parameters") is None else inner["parameters"]
    if not _describes_object(parameters):
        raise ConfigError(
            f"the tool {name!r} has the parameters {parameters!r}: give a JSON schema of the type 'object', whose "
            "properties are the arguments"
        )
    try:
        copied = json.loads(json.dumps(parameters, allow_nan=False))  # so that nobody changes it later
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the parameters of the tool {name!r} are no JSON ({error}): use texts, numbers, lists and dicts"
        ) from None
    return Tool(name, str(inner.get("description") or ""), {"type": "object", **copied})


def _describes_object(schema: Any) -> bool:
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        return False
    required = schema.get("required") or ()
    listed = isinstance(required, (list, tuple)) and all(isinstance(name, str) for name in required)
    return listed and isinstance(schema.get("properties", {}), Mapping)


def choice_of(choice: str, tools: Sequence[Tool]) -> str:
    """Check what a call says about calling: "auto", "any", "none" or a tool's name.

    Raises
    ------
    ConfigError
        If it is none of them, or demands a call where there is no tool.
    """
    names = [tool.name for tool in tools]
    if choice in (AUTO, NONE) or (choice == ANY and names) or choice in names:
        return choice
    known = f"'auto', 'any', 'none', or a tool's name: {', '.join(names)}" if names else "tools to choose from"
    raise ConfigError(f"tool_choice = {choice!r}: give {known}")


def canonical_calls(calls: Sequence[ToolCall], tools: Sequence[Tool]) -> str:
    """JSON text that calls share exactly where they call the same; the order of several calls does not matter."""
    schemas = {tool.name: tool.parameters for tool in tools}
    spelled = [
        f'{{"arguments": {canonical(call.arguments, schemas.get(call.name))}, "name": {canonical(call.name)}}}'
        for call in calls
    ]
    return f"[{', '.join(sorted(spelled))}]"
