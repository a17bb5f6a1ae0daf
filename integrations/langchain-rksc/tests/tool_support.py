"""What tests of tools and of structured output use: tools, a schema, and a scripted model that writes calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict

from langchain_core.tools import tool
from pydantic import BaseModel, Field

from rksc_agents import RKSCReasoner, SelfConsistency
from rksc_agents.testing import scripted_reasoner

FIVE = SelfConsistency(branches=5, stop=None)


@tool
def add(a: int, b: int = 3) -> int:
    """Add two numbers."""
    return a + b


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"sunny in {city}"


class Person(BaseModel):
    """A person."""

    name: str = Field(description="the name")
    age: int


class PersonDict(TypedDict):
    """A person."""

    name: str
    age: int


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANN = '{"name": "Ann", "age": 33}'
SCRIPT: dict[str, Any] = {
    "Add.": call("add", a=2, b=3),
    "Add twice.": call("add", a=1, b=1) + "\n" + call("add", a=2, b=2),
    "Say and add.": "I add.\n" + call("add", a=2, b=3),
    "Just talk.": "Fine.",
    "Vote.": {call("add", a=2): 2, call("add", a=2, b=3): 2, call("add", a=5, b=5): 1},
    "Person": call("Person", name="Ann", age=33),
    "<tool_response>": "It is 5.",
    "Think and add.": "<think>\nHm.\n</think>\n" + call("add", a=2, b=3),
}


class Anything(Mapping[str, Any]):
    """The script, whatever stands around a question: the one that comes last in a turn counts."""

    def __init__(self, script: Mapping[str, Any]) -> None:
        self._script = script

    def __getitem__(self, question: str) -> Any:
        asked = max(self._script, key=lambda known: (question.rfind(known), len(known)))
        if asked not in question:
            raise KeyError(question)
        return self._script[asked]

    def __contains__(self, question: object) -> bool:
        return any(asked in str(question) for asked in self._script)

    def __iter__(self) -> Iterator[str]:
        return iter(self._script)

    def __len__(self) -> int:
        return len(self._script)


@contextmanager
def scripted(script: Mapping[str, Any] = SCRIPT) -> Iterator[RKSCReasoner]:
    with scripted_reasoner(script) as reasoner:
        answers = reasoner._engine.runner.next_logits._answers
        reasoner._engine.runner.next_logits._answers = Anything(answers)
        yield reasoner
