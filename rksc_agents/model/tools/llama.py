"""Llama 3's way: the answer is JSON with "name" and "parameters", maybe behind ``<|python_tag|>``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rksc_agents.model.tools.formats import (
    Parsed,
    ToolFormat,
    checked,
    json_call,
    literal,
    looks_like_call,
    read_json,
    said,
    sorted_out,
    spelled,
)
from rksc_agents.model.tools.spec import Tool
from rksc_agents.types import InvalidToolCall, ToolCall

TAG = "<|python_tag|>"
_BETWEEN = "; \n\t\r"


class Llama(ToolFormat):
    """``{"name": ..., "parameters": {...}}``, several separated by ``; ``."""

    name: ClassVar[str] = "llama3"
    markers: ClassVar[tuple[str, ...]] = (TAG,)
    opens_with: ClassVar[tuple[str, ...]] = ("{",)
    tokens: ClassVar[tuple[str, ...]] = (TAG,)

    def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        bare = _read(text, tools, bare=True) if text.lstrip().startswith("{") else []
        if bare:
            return sorted_out("", bare)
        content, tag, body = text.partition(TAG)
        if not tag:
            return Parsed(text)
        return sorted_out(content, _read(body, tools, bare=False))

    def spell(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(spelled(call, "parameters") for call in calls)

    def begin(self, tokens: Mapping[str, int]) -> str:
        return ""

    def call(self, tool: Tool, arguments: str, tokens: Mapping[str, int]) -> str:
        return json_call(tool, "parameters", arguments)

    def between(self, tokens: Mapping[str, int]) -> str:
        return literal("; ")

    def end(self, tokens: Mapping[str, int]) -> str:
        return ""

    def free(self, tokens: Mapping[str, int]) -> list[str]:
        tagged = f" | <[{tokens[TAG]}]> calls" if TAG in tokens else ""
        piece, *rules = said(self.tokens, tokens)
        _, bar, special = piece.partition(" | ")
        first = f"FIRST{bar}{special}"
        return [f"start: (({first}) said*)? | calls{tagged}", piece, *rules, r"FIRST: /[^{](?s:.*)/"]


def _read(body: str, tools: Sequence[Tool], *, bare: bool) -> list[ToolCall | InvalidToolCall]:
    """The calls of a text that is nothing else; none where it is `bare` of a marker and answers with other JSON."""
    found: list[ToolCall | InvalidToolCall] = []
    at = 0
    while rest := body[at:].strip(_BETWEEN):
        read = read_json(rest)
        if read is None:
            named = next((tool.name for tool in tools if rest.startswith(_opening(tool.name))), None)
            if bare and not found and named is None:
                return []
            found.append(InvalidToolCall(text=rest, name=named, error="it is no JSON, or cut short"))
            break
        value, end = read
        if bare and not found and not _meant(value, tools):
            return []
        found += checked(value, rest[:end], tools)
        at = body.index(rest, at) + end
    if not bare and not found:
        found.append(InvalidToolCall(text="", error=f"behind {TAG} there is no JSON"))
    return found


def _meant(value: Any, tools: Sequence[Tool]) -> bool:
    """Whether JSON is meant as a call: it names a tool, or names what is none and gives it arguments."""
    if looks_like_call(value, tools):
        return True
    return isinstance(value, Mapping) and value.keys() == {"name", "parameters"} and isinstance(value["name"], str)


def _opening(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}'
