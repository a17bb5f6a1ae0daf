"""Mistral's way: a list of calls behind ``[TOOL_CALLS]``, or, in newer templates, name and arguments of each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rksc_agents.model.tools.formats import (
    Parsed,
    ToolFormat,
    call_of,
    checked,
    json_call,
    literal,
    marked,
    read_json,
    sorted_out,
    spelled,
)
from rksc_agents.model.tools.spec import Tool
from rksc_agents.types import InvalidToolCall, ToolCall

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]|(?=\{)|\Z)")
_LIST = re.compile(r"\s*\[")
_EMPTY = re.compile(r"\s*\[\s*\]")
_AFTER = re.compile(r"\s*([,\]])")


class Mistral(ToolFormat):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``."""

    name: ClassVar[str] = "mistral"
    markers: ClassVar[tuple[str, ...]] = (MARKER,)
    tokens: ClassVar[tuple[str, ...]] = (MARKER, ARGS, CALL_ID)
    opening: ClassVar[str] = f"{literal(' ')}? {literal('[')}"  # a space of a SentencePiece vocabulary

    def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        outside: list[str] = []
        found: list[ToolCall | InvalidToolCall] = []
        at = 0
        while (start := text.find(MARKER, at)) >= 0:
            outside.append(text[at:start])
            at = _read(text, start + len(MARKER), tools, found)
        return sorted_out("".join([*outside, text[at:]]), found)

    def spell(self, calls: Sequence[ToolCall]) -> str:
        return f"{MARKER}[{', '.join(spelled(call, 'arguments') for call in calls)}]"

    def begin(self, tokens: Mapping[str, int]) -> str:
        return marked(MARKER, tokens)

    def call(self, tool: Tool, arguments: str, tokens: Mapping[str, int]) -> str:
        return json_call(tool, "arguments", arguments)

    def between(self, tokens: Mapping[str, int]) -> str:
        return literal(", ")

    def end(self, tokens: Mapping[str, int]) -> str:
        return literal("]")


class MistralArgs(Mistral):
    """``[TOOL_CALLS]name[ARGS]{...}``, any number of times."""

    name: ClassVar[str] = "mistral-args"
    opening: ClassVar[str] = ""

    def spell(self, calls: Sequence[ToolCall]) -> str:
        return "".join(f"{MARKER}{call.name}{ARGS}{json.dumps(call.arguments, ensure_ascii=False)}" for call in calls)

    def call(self, tool: Tool, arguments: str, tokens: Mapping[str, int]) -> str:
        return f"{literal(tool.name)} {marked(ARGS, tokens)} {arguments}"

    def between(self, tokens: Mapping[str, int]) -> str:
        return marked(MARKER, tokens)

    def end(self, tokens: Mapping[str, int]) -> str:
        return ""


def _read(text: str, at: int, tools: Sequence[Tool], found: list[ToolCall | InvalidToolCall]) -> int:
    """Add the calls behind one marker to `found`; return where they end."""
    named = _NAMED.match(text, at)
    if named is not None:
        read = read_json(text, named.end())
        if read is not None:
            found.append(call_of(named[1], read[0], text[at : read[1]].strip(), tools))
            return read[1]
    else:
        listed = _LIST.match(text, at)
        read = read_json(text, listed.end() if listed is not None else at)
        while read is not None:
            value, end = read
            found += checked(value, text[at:end].strip(" ,\n["), tools)
            after = _AFTER.match(text, end) if listed is not None else None
            if after is None:
                return end
            if after[1] == "]":
                return after.end()
            at = after.end()
            read = read_json(text, at)
        if listed is not None and _EMPTY.match(text, at):
            return text.index("]", at) + 1
    again = text.find(MARKER, at)
    end = again if again >= 0 else len(text)
    name = named[1] if named is not None else None
    found.append(InvalidToolCall(text=text[at:end].strip(), name=name, error="it is no JSON, or cut short"))
    return end
