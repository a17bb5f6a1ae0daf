"""Hermes' way, which Qwen2.5, Qwen3, SmolLM3 and many others took over: JSON between ``<tool_call>`` markers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rksc_agents.model.tools.formats import (
    Parsed,
    ToolFormat,
    checked,
    json_call,
    literal,
    looks_like_call,
    marked,
    read_json,
    sorted_out,
    spelled,
    whole_json,
)
from rksc_agents.model.tools.spec import Tool
from rksc_agents.types import InvalidToolCall, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FENCE = re.compile(r"\s*(?:```(?:json)?\s*)?")
_FENCED = re.compile(r"\s*```(?:json)?\s*(\{.*\})\s*```\s*", re.DOTALL)
_AFTER = re.compile(rf"[\s}}]*(?:```)?\s*{CLOSE}|\s*(?:```)?")  # small models write a brace too many


class Hermes(ToolFormat):
    """``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``, any number of times."""

    name: ClassVar[str] = "hermes"
    markers: ClassVar[tuple[str, ...]] = (OPEN,)
    opens_with: ClassVar[tuple[str, ...]] = ("{", "```")
    tokens: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        outside: list[str] = []
        found: list[ToolCall | InvalidToolCall] = []
        at = 0
        while (start := text.find(OPEN, at)) >= 0:
            outside.append(text[at:start])
            at = start + len(OPEN)
            fence = _FENCE.match(text, at)
            body = fence.end() if fence is not None else at
            if read := read_json(text, body):
                while read:  # several between one pair of markers, too
                    value, at = read
                    found += checked(value, text[body:at], tools)
                    body, read = at, read_json(text, at) if text[at:].lstrip().startswith("{") else None
                after = _AFTER.match(text, at)
                at = after.end() if after is not None else at
            else:
                at, invalid = _broken(text, body)
                found.append(invalid)
        return sorted_out("".join([*outside, text[at:]]), found) if found else _bare(text, tools)

    def spell(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPEN}\n{spelled(call, 'arguments')}\n{CLOSE}" for call in calls)

    def begin(self, tokens: Mapping[str, int]) -> str:
        return marked(OPEN, tokens)

    def call(self, tool: Tool, arguments: str, tokens: Mapping[str, int]) -> str:
        return f"{literal(chr(10))} {json_call(tool, 'arguments', arguments)} {literal(chr(10))}"

    def between(self, tokens: Mapping[str, int]) -> str:
        return f"{marked(CLOSE, tokens)} {literal(chr(10))} {marked(OPEN, tokens)}"

    def end(self, tokens: Mapping[str, int]) -> str:
        return marked(CLOSE, tokens)


def _bare(text: str, tools: Sequence[Tool]) -> Parsed:
    """An answer without a marker: a call if it is nothing but JSON that names a tool, as small models write it."""
    fenced = _FENCED.fullmatch(text)
    read = whole_json(fenced[1] if fenced is not None else text)
    if read is None or not looks_like_call(read[0], tools):
        return Parsed(text)
    return sorted_out("", checked(read[0], text.strip(), tools))


def _broken(text: str, body: int) -> tuple[int, InvalidToolCall]:
    """Where a call that is no JSON ends, and the call."""
    close, again = text.find(CLOSE, body), text.find(OPEN, body)
    if close >= 0 and not 0 <= again < close:
        return close + len(CLOSE), InvalidToolCall(text=text[body:close].strip(), error="it is no JSON")
    end = again if again >= 0 else len(text)
    return end, InvalidToolCall(text=text[body:end].strip(), error="it is no JSON, and cut short")


class Generic(Hermes):
    """Hermes' spelling as plain text, for models whose chat template knows no tools; they are told how to call."""

    name: ClassVar[str] = "generic"
    native: ClassVar[bool] = False


def instructions(tools: Sequence[Tool]) -> str:
    """What a model is told that has tools and no chat template for them."""
    listed = "\n".join(json.dumps(tool.function()["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call tools. Each line is one of them, with a JSON schema of its arguments:\n{listed}\n\n"
        f"To call a tool, write its name and its arguments as JSON, like this:\n"
        f'{OPEN}\n{{"name": "the tool\'s name", "arguments": {{"argument": "value"}}}}\n{CLOSE}\n'
        "The result comes back in the next message. Answer in plain text when no tool is needed."
    )


def responded(text: str) -> str:
    """A tool's result, as it is shown to a model whose chat template knows no tools."""
    return f"<tool_response>\n{text}\n</tool_response>"
