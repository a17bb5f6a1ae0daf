"""Objects out of text: the answer always fits the class, and branches vote on its values.

    python examples/llama_index/extract.py

Look at the type of what comes out: a validated instance, from a model of 135 million parameters. Whether its values
are right is another matter; the agreement of the branches gives a hint.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, Field

from llama_index.llms.rksc import RKSC

TEXT = "Last Tuesday Maria Lopez, who is 34, ordered two blue chairs."
PROMPT = PromptTemplate("Extract the order.\n\n{text}")


class Order(BaseModel):
    """An order that somebody made."""

    customer: str = Field(description="Name of who ordered")
    age: int = Field(description="Age of who ordered", ge=0, le=120)
    item: str = Field(description="What was ordered")
    count: int = Field(description="How many of it", ge=1)


def main(argv: Sequence[str] | None = None) -> Order:
    """Extract an order twice: as an instance, and with what the branches thought of it."""
    parser = argparse.ArgumentParser(description="Structured extraction.")
    parser.add_argument("text", nargs="?", default=TEXT)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--branches", type=int, default=3)
    options = parser.parse_args(argv)
    strategy = {"name": "self-consistency", "branches": options.branches}
    with closing(RKSC(model=options.model, strategy=strategy, temperature=0.3, max_tokens=80)) as llm:
        order = llm.structured_predict(Order, PROMPT, text=options.text)
        print(repr(order))
        response = llm.chat([ChatMessage(content=PROMPT.format(text=options.text))], response_format=Order)
    print("agreement of the branches:", response.raw["rksc"]["agreement"])
    return order


if __name__ == "__main__":
    main()
