"""What a way of writing tool calls is, and what all of them share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rksc_agents.model.json_schema import embedded
from rksc_agents.model.tools.spec import AUTO, NONE, Tool
from rksc_agents.types import InvalidToolCall, ToolCall

_ARGUMENTS = ("arguments", "parameters", "args")
_AROUND = frozenset({"name", "id", "type", *_ARGUMENTS})


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_json)  # models write line ends inside texts


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer taken apart: what is said beside the calls, the calls, and what looks like one and is none."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidToolCall, ...] = ()


class ToolFormat(ABC):
    """How a family of models writes tool calls.

    Attributes
    ----------
    name : str
        The family.
    native : bool
        Whether the chat template offers tools in this way, so that nothing else has to.
    markers : tuple of str
        Texts that begin calls.
    opens_with : tuple of str
        What an answer that is a call without a marker begins with.
    opening : str
        What stands between the marker and the first call, in a grammar.
    tokens : tuple of str
        Texts that the parser needs, also where they are special tokens of the vocabulary.
    """

    name: ClassVar[str]
    native: ClassVar[bool] = True
    markers: ClassVar[tuple[str, ...]]
    opens_with: ClassVar[tuple[str, ...]] = ()
    opening: ClassVar[str] = ""
    tokens: ClassVar[tuple[str, ...]]

    @abstractmethod
    def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        """Read an answer; `text` holds the markers, also those that are special tokens."""

    @abstractmethod
    def spell(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the family's models write them."""

    @abstractmethod
    def begin(self, tokens: Mapping[str, int]) -> str:
        """What stands before the first call, in a grammar: its marker."""

    @abstractmethod
    def call(self, tool: Tool, arguments: str, tokens: Mapping[str, int]) -> str:
        """One call in a grammar, without the marker; `arguments` is the name of the rule for its arguments."""

    @abstractmethod
    def between(self, tokens: Mapping[str, int]) -> str:
        """What stands between two calls, in a grammar."""

    @abstractmethod
    def end(self, tokens: Mapping[str, int]) -> str:
        """What stands behind the last call, in a grammar; may be empty."""

    def arguments(self, tool: Tool, rule: str) -> list[str]:
        """The rules for the arguments of a tool in a grammar; the first has the name `rule`."""
        return [f"{rule}: {embedded(tool.parameters)}"]

    def free(self, tokens: Mapping[str, int]) -> list[str]:
        """The rules of free text, ``start`` among them, which may go over into ``calls``."""
        marker = self.markers[0]
        rule = f"marker: <[{tokens[marker]}]>" if marker in tokens else f"marker[lazy]: /(?s:.*){_pattern(marker)}/"
        return ["start: said* | said* marker calls", *said(self.tokens, tokens), rule]

    def lark(
        self,
        tools: Sequence[Tool],
        choice: str,
        parallel: bool,
        tokens: Mapping[str, int],
        ends: Collection[int] = (),
    ) -> str:
        """A grammar of answers.

        Parameters
        ----------
        tools : sequence of Tool
            What may be called.
        choice : str
            "auto" for free text, calls, or text and then calls; "any" for calls at once; a tool's name for one call
            of it; "none" for text without the markers of calls.
        parallel : bool
            Whether there may be several calls.
        tokens : mapping of str to int
            The added tokens of the vocabulary by their text.
        ends : collection of int, default ()
            Those of them that end a text, and so are no part of it.

        Raises
        ------
        ConfigError
            If a tool's schema cannot be written in a grammar.
        """
        tokens = {text: number for text, number in tokens.items() if number not in ends}
        if choice == NONE:
            return "\n".join(silent(self.tokens, self.markers, tokens))
        named = [tool for tool in tools if tool.name == choice]
        offered = named or tools
        more = f" ({self.between(tokens)} call)*" if parallel and not named else ""
        lines = [f"calls: {self.opening} call{more} {self.end(tokens)}"]
        lines.append(f"call: {' | '.join(f'call_{at}' for at in range(len(offered)))}")
        for at, tool in enumerate(offered):
            rule = f"arguments_{at}"
            lines += [f"call_{at}: {self.call(tool, rule, tokens)}", *self.arguments(tool, rule)]
        start = self.free(tokens) if choice == AUTO else [f"start: {self.begin(tokens)} calls"]
        return "\n".join([*start, *lines])


def said(own: Sequence[str], tokens: Mapping[str, int]) -> list[str]:
    """The rules of a piece of free text, and of the special tokens that may stand in it: all but the format's own."""
    others = sorted(number for text, number in tokens.items() if text not in own)
    special = f" | <[{','.join(map(str, others))}]>" if others else ""
    return [f"said: TEXT{special}", "TEXT: /(?s:.+)/"]


def silent(own: Sequence[str], markers: Sequence[str], tokens: Mapping[str, int]) -> list[str]:
    """The rules of free text in which no marker stands, ``start`` among them."""
    # Markers that are tokens, too: one that is not special is text like any other to a grammar.
    text = "/(?s:.+)/" + "".join(f" & ~/(?s:.*){_pattern(marker)}(?s:.*)/" for marker in markers)
    others = sorted(number for text, number in tokens.items() if text not in own)
    more = f" (<[{','.join(map(str, others))}]> TEXT?)*" if others else ""
    return [f"start: TEXT?{more}", f"TEXT: {text}"]


def literal(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def marked(text: str, tokens: Mapping[str, int]) -> str:
    """A marker in a grammar: a token where the vocabulary has it, else its text."""
    return f"<[{tokens[text]}]>" if text in tokens else literal(text)


def _pattern(text: str) -> str:
    return "".join(f"\\{c}" if c in r"\.^$|?*+()[]{}/-" else c for c in text)


def json_call(tool: Tool, key: str, arguments: str) -> str:
    """JSON of one call in a grammar, its arguments under `key`."""
    opening = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
    return f"{literal(opening)} {arguments} {literal('}')}"


def spelled(call: ToolCall, key: str) -> str:
    """JSON of one call."""
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def read_json(text: str, at: int = 0) -> tuple[Any, int] | None:
    """The JSON value that begins at `at` after white space, and where it ends; None where there is none."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def whole_json(text: str) -> tuple[Any] | None:
    """The JSON value that a text is from its beginning to its end; None where it is none."""
    read = read_json(text)
    return None if read is None or text[read[1] :].strip() else (read[0],)


def looks_like_call(value: Any, tools: Sequence[Tool]) -> bool:
    """Whether a JSON value that no marker announces is a call: it names a tool and holds nothing but its arguments."""
    if not isinstance(value, Mapping) or not value.keys() <= _AROUND:
        return False
    return any(value.get("name") == tool.name for tool in tools)


def checked(value: Any, text: str, tools: Sequence[Tool]) -> list[ToolCall | InvalidToolCall]:
    """The calls that a JSON value spells: one, or those of a list."""
    if isinstance(value, list):
        return [each for item in value for each in checked(item, text, tools)]
    if isinstance(value, Mapping) and isinstance(inner := value.get("function"), Mapping):
        value = inner
    if not isinstance(value, Mapping) or not isinstance(name := value.get("name"), str):
        return [InvalidToolCall(text=text, error="it names no tool: it has to be an object with a name and arguments")]
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    return [call_of(name, arguments, text, tools)]


def call_of(name: str, arguments: Any, text: str, tools: Sequence[Tool]) -> ToolCall | InvalidToolCall:
    """A call of a tool by its name, if there is that tool and what it needs is given."""
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        known = ", ".join(tool.name for tool in tools)
        return InvalidToolCall(text=text, name=name, error=f"there is no tool {name!r}, only {known}")
    if isinstance(arguments, str):
        read = whole_json(arguments)
        arguments = read[0] if read is not None else arguments.strip() or None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return InvalidToolCall(text=text, name=name, error="the arguments are no JSON object")
    if missing := [needed for needed in tool.required if needed not in arguments]:
        return InvalidToolCall(text=text, name=name, error=f"the arguments lack {', '.join(missing)}")
    return ToolCall(name=name, arguments=dict(arguments))


def sorted_out(content: str, found: Sequence[ToolCall | InvalidToolCall]) -> Parsed:
    """An answer from its content and what was found in it."""
    calls = tuple(each for each in found if isinstance(each, ToolCall))
    invalid = tuple(each for each in found if isinstance(each, InvalidToolCall))
    return Parsed(content.strip() if found else content, calls, invalid)
