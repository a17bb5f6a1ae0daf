"""What a branch said: its text, its answer as it is voted on, and the tools that it called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rksc_agents.model.canonical import canonical
from rksc_agents.model.live import LiveText
from rksc_agents.model.tools import Tool, ToolFormat, canonical_calls
from rksc_agents.reasoning.answers import AnswerExtractor
from rksc_agents.reasoning.equivalence import equivalent
from rksc_agents.types import InvalidToolCall, ToolCall


@dataclass(frozen=True, slots=True)
class Said:
    """What a branch said outside its thinking.

    Attributes
    ----------
    text : str
        What it wrote, without tool calls.
    answer : str or None
        The answer, as branches vote on it.
    calls, invalid : tuple
        Tool calls, and what looks like one and is none.
    """

    text: str
    answer: str | None = None
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidToolCall, ...] = ()


class Reader(Protocol):
    """Reads what branches wrote.

    Attributes
    ----------
    shown : frozenset of int
        Special tokens whose text it needs.
    """

    @property
    def shown(self) -> frozenset[int]: ...

    def read(self, text: str) -> Said:
        """What a text without thinking says; runs outside the engine's thread."""
        ...

    def same(self, a: str, b: str) -> bool:
        """Whether two answers say the same."""
        ...

    def live(self, opened: bool) -> LiveText:
        """What a reader may see of a text while it grows."""
        ...


@dataclass(frozen=True, slots=True)
class TextReader:
    """Answers in free text, found by an extractor and compared by what they mean."""

    extractor: AnswerExtractor
    shown: frozenset[int] = frozenset()

    def read(self, text: str) -> Said:
        return Said(text, self.extractor(text))

    def same(self, a: str, b: str) -> bool:
        return equivalent(a, b)

    def live(self, opened: bool) -> LiveText:
        return LiveText(opened=opened)


@dataclass(frozen=True, slots=True)
class JSONReader:
    """Answers that are JSON of a schema; each has one canonical form, so branches vote on the value, not the text."""

    schema: Mapping[str, Any]
    shown: frozenset[int] = frozenset()

    def read(self, text: str) -> Said:
        try:
            value = json.loads(text)
        except ValueError:  # cut short, or a model that does not keep to it
            return Said(text)
        return Said(text, canonical(value, self.schema))

    def same(self, a: str, b: str) -> bool:
        return a == b

    def live(self, opened: bool) -> LiveText:
        return LiveText(opened=opened)


@dataclass(frozen=True, slots=True)
class ToolReader:
    """Tool calls, which are voted on in their canonical form; what calls nothing is read by another reader."""

    format: ToolFormat
    tools: tuple[Tool, ...]
    otherwise: Reader
    shown: frozenset[int] = field(default=frozenset())

    def read(self, text: str) -> Said:
        parsed = self.format.parse(text, self.tools)
        if not parsed.calls:
            said = self.otherwise.read(parsed.content)
            return Said(said.text, said.answer, (), parsed.invalid)
        return Said(parsed.content, canonical_calls(parsed.calls, self.tools), parsed.calls, parsed.invalid)

    def same(self, a: str, b: str) -> bool:
        # Two lists of calls are the same only if they are equal, which has been tried; a list equals no other text.
        return not a.startswith(_CALLS) and not b.startswith(_CALLS) and self.otherwise.same(a, b)

    def live(self, opened: bool) -> LiveText:
        return LiveText(opened=opened, markers=self.format.markers, opens_with=self.format.opens_with)


_CALLS = '[{"arguments":'
