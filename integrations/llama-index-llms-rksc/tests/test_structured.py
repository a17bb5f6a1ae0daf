"""Structured prediction: always an instance, whatever the model would rather write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.types import PydanticProgramMode
from llama_index_support import FIVE, Person, listening, scripted, user
from pydantic import BaseModel, ValidationError, field_validator

from llama_index.llms.rksc import RKSC
from rksc_agents import ConfigError, RKSCReasoner
from rksc_agents.model.grammar import Choice, JSONSchema

# StructuredLLM itself uses a method of pydantic that is deprecated
pytestmark = pytest.mark.filterwarnings("ignore:The `json` method is deprecated")

ANN = Person(name="Ann", age=33)
PROMPT = PromptTemplate("{what}")


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted() as made:
        yield made


@pytest.fixture
def llm(reasoner: RKSCReasoner) -> RKSC:
    return RKSC(reasoner=reasoner, strategy="direct", max_tokens=200)


async def every_way(llm: RKSC, what: str, **settings: Any) -> list[Any]:
    """What all ways of asking for a person give."""
    chat = ChatPromptTemplate(message_templates=[ChatMessage(content="{what}")])
    structured = llm.as_structured_llm(Person)
    astream = await llm.astream_structured_predict(Person, PROMPT, llm_kwargs=settings, what=what)
    schat = await structured.astream_chat(user(what), **settings)
    return [
        llm.structured_predict(Person, PROMPT, llm_kwargs=settings, what=what),
        llm.structured_predict(Person, chat, llm_kwargs=settings, what=what),
        await llm.astructured_predict(Person, PROMPT, llm_kwargs=settings, what=what),
        list(llm.stream_structured_predict(Person, PROMPT, llm_kwargs=settings, what=what))[-1],
        [part async for part in astream][-1],
        structured.chat(user(what), **settings).raw,
        (await structured.achat(user(what), **settings)).raw,
        list(structured.stream_chat(user(what), **settings))[-1].raw,
        [part async for part in schat][-1].raw,
        structured.complete(what, **settings).raw,
    ]


@pytest.mark.parametrize("settings", [{}, {"strategy": FIVE}])
async def test_every_way_gives_the_same_instance(llm: RKSC, settings: Any) -> None:
    assert await every_way(llm, "Ann is 33.", **settings) == [ANN] * 10


async def test_an_instance_also_where_the_model_would_talk(llm: RKSC) -> None:
    found = await every_way(llm, "Just talk.")
    assert all(isinstance(person, Person) for person in found)


def test_a_stream_shows_what_is_there(llm: RKSC) -> None:
    parts: list[Any] = list(llm.stream_structured_predict(Person, PROMPT, what="Ann is 33."))
    names = [part.name for part in parts]
    assert names[0] is None
    assert "An" in names
    assert names == sorted(names, key=lambda name: len(name or ""))
    assert parts[-1] == ANN


def test_the_system_prompt_and_the_calls_settings_hold(reasoner: RKSCReasoner) -> None:
    llm = RKSC(reasoner=reasoner, strategy="direct", max_tokens=200, system_prompt="Be kind.")
    with listening() as listener:
        assert llm.structured_predict(Person, PROMPT, what="Ann is 33.", llm_kwargs={"max_tokens": 40}) == ANN
    asked = listener.of("LLMChatStartEvent")[0]
    assert [message.role.value for message in asked.messages] == ["system", "user"]
    assert asked.additional_kwargs["max_tokens"] == 40
    with pytest.raises(ConfigError, match="max_tokens = 5 leaves no room"):
        llm.structured_predict(Person, PROMPT, what="Ann is 33.", llm_kwargs={"max_tokens": 5})


async def test_events(llm: RKSC) -> None:
    with listening() as listener:
        llm.structured_predict(Person, PROMPT, what="Ann is 33.")
    names = listener.names()
    assert names[0] == "LLMStructuredPredictStartEvent"
    assert names[-1] == "LLMStructuredPredictEndEvent"
    assert listener.of("LLMStructuredPredictEndEvent")[0].output == ANN
    with listening() as streamed:
        list(llm.stream_structured_predict(Person, PROMPT, what="Ann is 33."))
    assert "LLMStructuredPredictInProgressEvent" in streamed.names()
    assert streamed.names()[-1] == "LLMStructuredPredictEndEvent"


def test_what_a_schema_cannot_tell_is_refused_by_the_class(llm: RKSC) -> None:
    class Young(Person):
        @field_validator("age")
        @classmethod
        def check(cls, age: int) -> int:
            if age > 3:
                raise ValueError("too old")
            return age

    with pytest.raises(ValidationError, match="too old"):
        llm.structured_predict(Young, PROMPT, what="Ann is 33.")


async def test_other_program_modes_are_llama_indexs(reasoner: RKSCReasoner) -> None:
    text = RKSC(
        reasoner=reasoner, strategy="direct", max_tokens=200, pydantic_program_mode=PydanticProgramMode.FUNCTION
    )
    assert text.structured_predict(Person, PROMPT, what="Person?") == ANN
    assert await text.astructured_predict(Person, PROMPT, what="Person?") == ANN
    assert list(text.stream_structured_predict(Person, PROMPT, what="Person?"))[-1] == ANN
    stream = await text.astream_structured_predict(Person, PROMPT, what="Person?")
    assert [part async for part in stream][-1] == ANN


def test_formats_of_a_call(llm: RKSC) -> None:
    assert Person.model_validate_json(llm.complete("Ann is 33.", response_format=Person).text) == ANN
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
    assert Person.model_validate_json(llm.complete("Ann is 33.", response_format=schema).text) == ANN
    bare = llm.complete("Ann is 33.", response_format=Person.model_json_schema())
    assert Person.model_validate_json(bare.text) == ANN
    assert Person.model_validate_json(llm.complete("Ann is 33.", grammar=JSONSchema(Person.model_json_schema())).text)
    assert llm.complete("Just talk.", grammar=Choice("yes", "no")).text in ("yes", "no")
    with pytest.raises(ConfigError, match="give one of the two"):
        llm.complete("Just talk.", grammar=Choice("yes"), response_format=Person)
    with pytest.raises(ConfigError, match="is no schema"):
        llm.complete("Just talk.", response_format="json")


def test_nested_classes(llm: RKSC) -> None:
    class Team(BaseModel):
        kind: Literal["red", "blue"]
        people: list[Person]

    found = llm.structured_predict(Team, PROMPT, what="Just talk.", llm_kwargs={"max_tokens": 300})
    assert isinstance(found, Team)
    assert found.kind in ("red", "blue")
