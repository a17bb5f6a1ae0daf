"""Structured output on a scripted model that writes what a test wants, within what the grammar allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import PydanticOutputParser
from tool_support import ANN, FIVE, SCRIPT, Person, PersonDict, scripted

from langchain_rksc import ChatRKSC
from langchain_rksc.tools import openai_tools
from rksc_agents import ConfigError
from rksc_agents.model.grammar import Choice

JSON_SCRIPT = {**SCRIPT, "Person": ANN}


def structured(script: Mapping[str, Any], schema: Any, **given: Any) -> Any:
    with scripted(script) as reasoner:
        chat = ChatRKSC(reasoner=reasoner, max_tokens=120, strategy="direct")
        return chat.with_structured_output(schema, **given).invoke("Person")


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("strict", [None, True, False])
def test_structured_output(method: Any, strict: bool | None) -> None:
    """Case 3."""
    script = SCRIPT if method == "function_calling" else JSON_SCRIPT
    assert structured(script, Person, method=method, strict=strict) == Person(name="Ann", age=33)
    for schema in (Person.model_json_schema(), openai_tools([Person])[0]["function"]):
        assert structured(script, schema, method=method, strict=strict) == {"name": "Ann", "age": 33}
    script = {**script, "Person": str(script["Person"]).replace('"Person"', '"PersonDict"')}
    assert structured(script, PersonDict, method=method, strict=strict) == {"name": "Ann", "age": 33}


def test_structured_output_of_pydantic_version_1() -> None:
    from pydantic.v1 import BaseModel as BaseModelV1

    class Pet(BaseModelV1):
        name: str
        age: int

    assert structured(JSON_SCRIPT, Pet) == Pet(name="Ann", age=33)


def test_json_mode_needs_no_schema() -> None:
    assert structured(JSON_SCRIPT, None, method="json_mode") == {"name": "Ann", "age": 33}
    with pytest.raises(ConfigError, match="needs a schema"):
        ChatRKSC().with_structured_output()
    with pytest.raises(ConfigError, match="method = 'magic'"):
        ChatRKSC().with_structured_output(Person, method="magic")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_the_raw_message(method: Any) -> None:
    script = SCRIPT if method == "function_calling" else JSON_SCRIPT
    found = structured(script, Person, method=method, include_raw=True)
    assert found["parsed"] == Person(name="Ann", age=33)
    assert found["parsing_error"] is None
    assert isinstance(found["raw"], AIMessage)


def test_a_parsing_error() -> None:
    script = {"Person": '{"name": "Ann"}'}
    found = structured(script, Person, method="json_mode", include_raw=True)
    assert found["parsed"] is None
    assert isinstance(found["parsing_error"], OutputParserException)
    with pytest.raises(OutputParserException):
        structured(script, Person, method="json_mode")


def test_branches_vote_on_objects() -> None:
    """Branches that write one object in two ways agree."""
    people = {'{"name": "Ann", "age": 33}': 1, '{"name": "Ann", "age": 33.0}': 1}
    schema = {
        "title": "P",
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "number"}},
        "required": ["name", "age"],
    }
    with scripted({"Person": people}) as reasoner:
        chat = ChatRKSC(reasoner=reasoner, max_tokens=120, strategy=FIVE)
        found: Any = chat.with_structured_output(schema, include_raw=True).invoke("Person")
    assert found["parsed"] == {"name": "Ann", "age": 33}
    assert found["raw"].response_metadata["rksc"]["agreement"] == 1.0


def test_a_parser_of_langchain_follows_a_bound_format() -> None:
    with scripted(JSON_SCRIPT) as reasoner:
        chat = ChatRKSC(reasoner=reasoner, max_tokens=120, strategy="direct")
        chain = chat.bind(response_format=Person) | PydanticOutputParser(pydantic_object=Person)
        assert chain.invoke("Person") == Person(name="Ann", age=33)


def test_settings_go_with_structured_output_and_traces_are_told() -> None:
    bound: Any = ChatRKSC().with_structured_output(Person, temperature=0.0)
    kwargs = bound.first.kwargs
    assert kwargs["temperature"] == 0.0
    assert kwargs["ls_structured_output_format"]["schema"] is Person
    assert kwargs["ls_structured_output_format"]["kwargs"] == {"method": "json_schema"}


def test_other_grammars() -> None:
    with scripted({"Yes or no?": {"Yes": 1, "No": 1}}) as reasoner:
        chat = ChatRKSC(reasoner=reasoner, max_tokens=20, strategy="direct")
        assert chat.invoke("Yes or no?", grammar=Choice("No", "Maybe")).content == "No"
