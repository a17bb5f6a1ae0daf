"""Conformance of an LLM that answers with instances of pydantic classes."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import pytest
from conformance_base import ANN, Conformance, drained, named, needs, user
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.program.utils import get_program_for_llm
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index_support import listening
from pydantic import BaseModel, Field

# StructuredLLM itself uses a method of pydantic that is deprecated
DEPRECATED = pytest.mark.filterwarnings("ignore:The `json` method is deprecated")


class Person(BaseModel):
    """A person."""

    name: str = Field(description="the name", max_length=12)
    age: int = Field(ge=0, le=150)


class Colour(StrEnum):
    """A colour."""

    RED = "red"
    BLUE = "blue"


class Pet(BaseModel):
    """A pet: all kinds of fields."""

    owner: Person
    colour: Colour
    nick: str | None = Field(default=None, max_length=12)
    toys: list[Colour] = Field(max_length=2)
    tame: bool


def about() -> PromptTemplate:
    """A new prompt, since programs leave their parsers in those that they are given."""
    return PromptTemplate("{who} is 33 years old. Who is {who}?")


class StructuredOutput(Conformance):
    """Objects in place of texts."""

    area = "structured"

    @needs("structured")
    def test_structured_predict(self) -> None:
        person = self.make_llm().structured_predict(Person, about(), llm_kwargs={**self.room}, who="Ann")
        assert type(person) is Person

    @needs("structured")
    async def test_astructured_predict(self) -> None:
        llm = self.make_llm()
        person = await llm.astructured_predict(Person, about(), llm_kwargs={**self.room}, who="Ann")
        assert type(person) is Person
        if self.deterministic:
            assert person == llm.structured_predict(Person, about(), llm_kwargs={**self.room}, who="Ann")

    @needs("structured")
    def test_stream_structured_predict(self) -> None:
        llm = self.make_llm()
        parts = list(llm.stream_structured_predict(Person, about(), llm_kwargs={**self.room}, who="Ann"))
        self.check_parts(llm, parts)

    @needs("structured")
    async def test_astream_structured_predict(self) -> None:
        llm = self.make_llm()
        stream = llm.astream_structured_predict(Person, about(), llm_kwargs={**self.room}, who="Ann")
        self.check_parts(llm, await drained(stream))

    def check_parts(self, llm: Any, parts: list[Any]) -> None:
        """Check that parts have the fields, and that the last one is the whole instance."""
        assert len(parts) > 0
        assert all(isinstance(part, BaseModel) and hasattr(part, "name") for part in parts)
        assert type(parts[-1]) is Person
        if self.deterministic:
            assert parts[-1] == llm.structured_predict(Person, about(), llm_kwargs={**self.room}, who="Ann")

    @needs("structured")
    def test_a_conversation_as_a_template_of_objects(self) -> None:
        template = ChatPromptTemplate(message_templates=[ChatMessage(content="{who} is 33 years old. Who is {who}?")])
        person = self.make_llm().structured_predict(Person, template, llm_kwargs={**self.room}, who="Ann")
        assert type(person) is Person

    @needs("structured")
    def test_all_kinds_of_fields(self) -> None:
        llm = self.make_llm()
        pet = llm.structured_predict(Pet, about(), llm_kwargs={**self.room}, who="Ann")
        assert type(pet) is Pet
        assert type(pet.owner) is Person
        assert all(isinstance(toy, Colour) for toy in (pet.colour, *pet.toys))

    @needs("structured")
    def test_all_kinds_of_fields_streamed(self) -> None:
        parts = list(self.make_llm().stream_structured_predict(Pet, about(), llm_kwargs={**self.room}, who="Ann"))
        assert type(parts[-1]) is Pet

    @needs("structured")
    def test_a_structured_llm_chats(self) -> None:
        response = self.make_llm().as_structured_llm(Person).chat(user(ANN), **self.room)
        self.check_response(response.raw, response.message.content)

    @needs("structured")
    async def test_a_structured_llm_achats(self) -> None:
        response = await self.make_llm().as_structured_llm(Person).achat(user(ANN), **self.room)
        self.check_response(response.raw, response.message.content)

    @needs("structured")
    def test_a_structured_llm_completes(self) -> None:
        response = self.make_llm().as_structured_llm(Person).complete(ANN, **self.room)
        self.check_response(response.raw, response.text)

    @needs("structured")
    async def test_a_structured_llm_acompletes(self) -> None:
        response = await self.make_llm().as_structured_llm(Person).acomplete(ANN, **self.room)
        self.check_response(response.raw, response.text)

    @DEPRECATED
    @needs("structured")
    def test_a_structured_llm_streams(self) -> None:
        response = list(self.make_llm().as_structured_llm(Person).stream_chat(user(ANN), **self.room))[-1]
        self.check_response(response.raw, response.message.content)

    @DEPRECATED
    @needs("structured")
    async def test_a_structured_llm_astreams(self) -> None:
        response = (await drained(self.make_llm().as_structured_llm(Person).astream_chat(user(ANN), **self.room)))[-1]
        self.check_response(response.raw, response.message.content)

    def check_response(self, raw: Any, text: str | None) -> None:
        """Check that a response holds an instance and spells it."""
        assert type(raw) is Person
        assert json.loads(text or "") == raw.model_dump()

    @needs("structured")
    async def test_the_program_for_the_llm(self) -> None:
        program: Any = get_program_for_llm(Person, about(), self.make_llm())
        assert type(program(who="Ann", llm_kwargs={**self.room})) is Person
        assert type(await program.acall(who="Ann", llm_kwargs={**self.room})) is Person

    @needs("structured", "function_calling")
    async def test_a_function_calling_program(self) -> None:
        program: Any = FunctionCallingProgram.from_defaults(Person, prompt=about(), llm=self.make_llm())
        found = [
            program(who="Ann", llm_kwargs={**self.room}),
            await program.acall(who="Ann", llm_kwargs={**self.room}),
            list(program.stream_call(who="Ann", llm_kwargs={**self.room}))[-1],
            (await drained(program.astream_call(who="Ann", llm_kwargs={**self.room})))[-1],
        ]
        assert [type(person) for person in found] == [Person] * 4
        if self.deterministic:
            assert found[0] == found[1]

    @needs("structured", "function_calling")
    def test_a_function_calling_program_with_all_kinds_of_fields(self) -> None:
        program: Any = FunctionCallingProgram.from_defaults(Pet, prompt=about(), llm=self.make_llm())
        assert type(program(who="Ann", llm_kwargs={**self.room})) is Pet

    # -- events ---------------------------------------------------------------------------------

    @needs("structured")
    async def test_structured_prediction_is_told(self) -> None:
        llm = self.make_llm()
        with listening() as listener:
            person = llm.structured_predict(Person, about(), llm_kwargs={**self.room}, who="Ann")
        self.check_prediction_told(listener, person)
        with listening() as listener:
            person = await llm.astructured_predict(Person, about(), llm_kwargs={**self.room}, who="Ann")
        self.check_prediction_told(listener, person)

    def check_prediction_told(self, listener: Any, person: Person) -> None:
        """Check that start and end were told."""
        names = named(listener.names(), "LLMStructuredPredict")
        assert names == ["LLMStructuredPredictStartEvent", "LLMStructuredPredictEndEvent"]
        start, end = (listener.of(name)[0] for name in names)
        assert start.output_cls is Person
        assert start.template_args == {"who": "Ann"}
        assert end.output == person

    @needs("structured")
    async def test_streamed_structured_prediction_is_told(self) -> None:
        llm = self.make_llm()
        with listening() as listener:
            parts = list(llm.stream_structured_predict(Person, about(), llm_kwargs={**self.room}, who="Ann"))
        self.check_predictions_told(listener, parts)
        stream = llm.astream_structured_predict(Person, about(), llm_kwargs={**self.room}, who="Ann")
        with listening() as listener:
            parts = await drained(stream)
        self.check_predictions_told(listener, parts)

    def check_predictions_told(self, listener: Any, parts: list[Any]) -> None:
        """Check that start, progress and end were told."""
        first, *between, last = named(listener.names(), "LLMStructuredPredict")
        assert first == "LLMStructuredPredictStartEvent"
        assert last == "LLMStructuredPredictEndEvent"
        assert between
        assert set(between) == {"LLMStructuredPredictInProgressEvent"}
        assert listener.of(last)[0].output == parts[-1]
