"""Structured output from a real model, by every way that LlamaIndex has: always a valid instance.

``RKSC_TEST_QUESTIONS`` names a longer file of questions, one JSON object with `question` per line.
"""

from __future__ import annotations

import asyncio
import json
import os
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index_support import user
from pydantic import BaseModel, Field

from llama_index.llms.rksc import RKSC
from rksc_agents import RKSCReasoner

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore:The `json` method is deprecated")]

SMALL = Path(__file__).parents[3] / "tests" / "data" / "gsm8k_small.jsonl"
TEXT = "Describe this problem.\n\n{question}"


class Unit(Enum):
    """What an amount is measured in."""

    MONEY = "money"
    TIME = "time"
    LENGTH = "length"
    COUNT = "count"


class Amount(BaseModel):
    """A number that the problem tells."""

    of: str = Field(description="what it counts", max_length=24)
    value: int = Field(ge=0, le=10_000)


class Description(BaseModel):
    """A word problem."""

    about: str = Field(description="who or what it is about", max_length=24)
    unit: Unit
    amounts: list[Amount] = Field(min_length=1, max_length=2)
    hint: str | None = Field(default=None, max_length=24)


def questions() -> list[str]:
    path = os.environ.get("RKSC_TEST_QUESTIONS")
    lines = Path(path).read_text("utf-8").splitlines() if path else SMALL.read_text("utf-8").splitlines()[:3]
    return [json.loads(line)["question"] for line in lines]


async def predicted(llm: RKSC, question: str) -> Any:
    return await llm.astructured_predict(Description, PromptTemplate(TEXT), question=question)


async def streamed(llm: RKSC, question: str) -> Any:
    parts = await llm.astream_structured_predict(Description, PromptTemplate(TEXT), question=question)
    return [part async for part in parts][-1]


async def as_structured_llm(llm: RKSC, question: str) -> Any:
    return (await llm.as_structured_llm(Description).achat(user(TEXT.format(question=question)))).raw


async def as_structured_llm_streamed(llm: RKSC, question: str) -> Any:
    parts = await llm.as_structured_llm(Description).astream_chat(user(TEXT.format(question=question)))
    return [part async for part in parts][-1].raw


async def program(llm: RKSC, question: str) -> Any:
    made: Any = FunctionCallingProgram.from_defaults(Description, TEXT, llm=llm)
    return await made.acall(question=question)


async def program_streamed(llm: RKSC, question: str) -> Any:
    made: Any = FunctionCallingProgram.from_defaults(Description, TEXT, llm=llm)
    return [part async for part in await made.astream_call(question=question)][-1]


WAYS = [predicted, streamed, as_structured_llm, as_structured_llm_streamed, program, program_streamed]


@pytest.mark.timeout(0 if "RKSC_TEST_QUESTIONS" in os.environ else 300)
@pytest.mark.parametrize("way", WAYS)
async def test_every_answer_is_a_valid_instance(real_reasoner: RKSCReasoner, way: Any) -> None:
    llm = RKSC(reasoner=real_reasoner, strategy="direct", temperature=0.7, max_tokens=120)
    found = await asyncio.gather(*(way(llm, question) for question in questions()), return_exceptions=True)
    wrong = [each for each in found if not isinstance(each, Description)]
    print(f"{way.__name__}: {len(found) - len(wrong)} of {len(found)} valid")
    assert wrong == []
    for description in found:
        assert isinstance(description, Description)
        assert Description.model_validate_json(description.model_dump_json()) == description
