"""A Workflow that thinks harder where its branches disagree.

    python examples/llama_index/workflow.py

Three branches answer first. Where fewer than two thirds of them agree, nine are asked; the KV of the question is there
already. So easy questions stay cheap, and hard ones get more.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from llama_index.core.llms import ChatMessage, ChatResponse
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step

from llama_index.llms.rksc import RKSC

QUESTIONS = ("Tom has 3 apples and buys 4 more. How many apples has he?", "How many minutes are in 3 hours and a half?")


class Doubt(Event):
    """A question whose branches disagree."""

    question: str


class ThinkHarder(Workflow):
    """Asks few branches, and many where the few disagree."""

    def __init__(self, llm: RKSC, few: int = 3, many: int = 9, agreed: float = 2 / 3, **settings: Any) -> None:
        super().__init__(**settings)
        self.llm = llm
        self.few = few
        self.many = many
        self.agreed = agreed

    async def ask(self, question: str, branches: int) -> ChatResponse:
        """The answer of so many branches."""
        strategy = {"name": "self-consistency", "branches": branches, "extract": "last-number", "stop": None}
        return await self.llm.achat([ChatMessage(content=question)], strategy=strategy)

    @step
    async def first(self, start: StartEvent) -> Doubt | StopEvent:
        """Ask few."""
        found = await self.ask(start.question, self.few)
        agreement = found.raw["rksc"]["agreement"]
        settled = agreement is not None and agreement >= self.agreed
        return StopEvent(result=found) if settled else Doubt(question=start.question)

    @step
    async def again(self, doubt: Doubt) -> StopEvent:
        """Ask many."""
        return StopEvent(result=await self.ask(doubt.question, self.many))


async def answers(llm: RKSC, questions: Sequence[str], **settings: Any) -> list[ChatResponse]:
    """One workflow for each question, all at once."""
    thinking = ThinkHarder(llm, **settings)
    return list(await asyncio.gather(*(thinking.run(question=question) for question in questions)))


def main(argv: Sequence[str] | None = None) -> list[ChatResponse]:
    """Ask the questions and show each answer."""
    parser = argparse.ArgumentParser(description="More branches where few disagree.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args(argv)
    with closing(RKSC(model=options.model, max_tokens=64)) as llm:
        found = asyncio.run(answers(llm, options.questions, timeout=None))
    for question, response in zip(options.questions, found, strict=True):
        record = response.raw["rksc"]
        print(f"{question}\n  {response.message.content}\n  {record['branches']} branches:", end=" ")
        print(", ".join(f"{vote['answer']} by {len(vote['branches'])}" for vote in record["votes"]) or "no number")
    return found


if __name__ == "__main__":
    main()
