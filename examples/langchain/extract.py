"""Objects out of text: the answer always fits the schema, and branches vote on its values.

    python examples/langchain/extract.py

Look at the type of what comes out: a validated instance, from a model of 135 million parameters. Whether its values
are right is another matter; the agreement of the branches gives a hint.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from typing import Any, cast

from pydantic import BaseModel, Field

from langchain_rksc import ChatRKSC

TEXT = "Last Tuesday Maria Lopez, who is 34, ordered two blue chairs."


class Order(BaseModel):
    """An order that somebody made."""

    customer: str = Field(description="Name of who ordered")
    age: int = Field(description="Age of who ordered", ge=0, le=120)
    item: str = Field(description="What was ordered")
    count: int = Field(description="How many of it", ge=1, le=100)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Structured extraction.")
    parser.add_argument("text", nargs="?", default=TEXT)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--branches", type=int, default=3)
    options = parser.parse_args(argv)
    strategy = {"name": "self-consistency", "branches": options.branches}
    with closing(ChatRKSC(model=options.model, strategy=strategy, temperature=0.3, max_tokens=80)) as chat:
        reader = chat.with_structured_output(Order, include_raw=True)
        found = cast("dict[str, Any]", reader.invoke(f"Extract the order.\n\n{options.text}"))
    print(repr(found["parsed"]))
    print("agreement of the branches:", found["raw"].response_metadata["rksc"]["agreement"])


if __name__ == "__main__":
    main()
