"""Qwen3-Coder's way: tags for the function and each parameter between ``<tool_call>`` markers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rksc_agents.errors import ConfigError
from rksc_agents.model.canonical import kind_of, kinds
from rksc_agents.model.json_schema import embedded
from rksc_agents.model.tools.formats import Parsed, call_of, checked, literal, read_json, sorted_out, whole_json
from rksc_agents.model.tools.hermes import CLOSE, OPEN, Hermes
from rksc_agents.model.tools.spec import Tool
from rksc_agents.types import InvalidToolCall, ToolCall

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
# A value may hold closing tags. The one that the grammar writes has its own line, and the next tag follows on another;
# in text that no grammar led there may be none such, and the first closing tag with another tag behind it is taken.
_LINES = re.compile(r"\s*<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n(?=<parameter=|</function>)", re.DOTALL)
_LOOSE = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)
_END = re.compile(rf"\s*</function>(?:\s*{CLOSE})?")
_DEFINITIONS = ("$defs", "definitions")
_TEXT = "string"


class QwenXML(Hermes):
    """``<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>``.

    A value is text as it is where the schema allows text, else JSON. So the value "5" of a parameter that may be text
    or a number is a number when it is read.
    """

    name: ClassVar[str] = "qwen-xml"
    opens_with: ClassVar[tuple[str, ...]] = ()

    def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        outside: list[str] = []
        found: list[ToolCall | InvalidToolCall] = []
        at = 0
        while (start := text.find(OPEN, at)) >= 0:
            outside.append(text[at:start])
            at = _read(text, start + len(OPEN), tools, found)
        return sorted_out("".join([*outside, text[at:]]), found)

    def spell(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPEN}\n{_function(call)}\n{CLOSE}" for call in calls)

    def call(self, tool: Tool, arguments: str, tokens: Mapping[str, int]) -> str:
        opening, closing = f"\n<function={tool.name}>\n", "</function>\n"
        return f"{literal(opening)} {arguments} {literal(closing)}"

    def arguments(self, tool: Tool, rule: str) -> list[str]:
        parts, rules = [], []
        for at, (name, schema) in enumerate(tool.parameters.get("properties", {}).items()):
            if not re.fullmatch(r"[^>\n]+", name):
                raise ConfigError(
                    f"the tool {tool.name!r} has a parameter {name!r}, which this model's way of calling cannot "
                    "write: give it a name without '>' and line ends"
                )
            value = f"{rule}_{at}"
            part = f"({literal(f'<parameter={name}>' + chr(10))} {value})"
            parts.append(part if name in tool.required else f"{part}?")
            rules.append(_value_rule(value, schema, tool.parameters))
        return [f"{rule}: {' '.join(parts) or literal('')}", *rules]


def _read(text: str, at: int, tools: Sequence[Tool], found: list[ToolCall | InvalidToolCall]) -> int:
    """Add the call behind a marker to `found`; return where it ends."""
    function = _FUNCTION.match(text, at)
    if function is None:
        read = read_json(text, at)
        if read is not None:  # what other models of the family write
            found += checked(read[0], text[at : read[1]].strip(), tools)
            return _after(text, read[1])
        end = _next(text, at)
        found.append(InvalidToolCall(text=text[at:end].strip(), error="there is no <function=name> in it"))
        return _after(text, end)
    name = function[1].strip()
    schema = next((tool.parameters for tool in tools if tool.name == name), {})
    given: dict[str, Any] = {}
    place = function.end()
    while parameter := _LINES.match(text, place) or _LOOSE.match(text, place):
        given[parameter[1].strip()] = _value(parameter[2], parameter[1].strip(), schema)
        place = parameter.end()
    closing = _END.match(text, place)
    if closing is None:
        end = _next(text, place)
        found.append(InvalidToolCall(text=text[at:end].strip(), name=name, error="it is malformed or cut short"))
        return _after(text, end)
    found.append(call_of(name, given, text[at : closing.end()].removesuffix(CLOSE).strip(), tools))
    return closing.end()


def _next(text: str, at: int) -> int:
    """Where a call that cannot be read ends: at its closing marker, the next call or the end."""
    return min((place for place in (text.find(CLOSE, at), text.find(OPEN, at)) if place >= 0), default=len(text))


def _after(text: str, at: int) -> int:
    """The place behind a closing marker, where one follows."""
    rest = text[at:].lstrip()
    return len(text) - len(rest) + len(CLOSE) if rest.startswith(CLOSE) else at


def _function(call: ToolCall) -> str:
    values = {name: _written(value) for name, value in call.arguments.items()}
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<function={call.name}>\n{parameters}</function>"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _value_rule(rule: str, schema: Any, root: Mapping[str, Any]) -> str:
    """A parameter's value and what closes it, in a grammar."""
    closing = "\n</parameter>\n"
    options = schema.get("enum", [schema["const"]] if "const" in schema else None) if _is_schema(schema) else None
    if options:
        return f"{rule}: ({' | '.join(literal(_written(option)) for option in options)}) {literal(closing)}"
    allowed = kinds(schema, root) if _is_schema(schema) else set()
    if not allowed or _TEXT in allowed:
        return f"{rule}[lazy]: /(?s:.*)\\n<\\/parameter>\\n/"
    shared = {name: root[name] for name in _DEFINITIONS if name in root}
    return f"{rule}: {embedded({**shared, **schema})} {literal(closing)}"


def _value(text: str, name: str, root: Mapping[str, Any]) -> Any:
    """A parameter's value: the JSON that it spells where the schema allows its type, else text."""
    schema = root.get("properties", {}).get(name)
    allowed = kinds(schema, root) if _is_schema(schema) else set()
    if allowed == {_TEXT}:
        return text
    read = whole_json(text)
    if read is None or isinstance(read[0], str):
        return text
    kind = kind_of(read[0])
    fits = not allowed or kind in allowed or (kind == "integer" and "number" in allowed)
    return read[0] if fits or _TEXT not in allowed else text


def _is_schema(schema: Any) -> bool:
    return isinstance(schema, Mapping)
