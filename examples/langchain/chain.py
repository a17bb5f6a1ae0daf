"""A chain whose model thinks in several branches: prompt | model | parser.

    python examples/langchain/chain.py

Look at the votes: the parser gets the answer that most branches gave. As one Runnable the chain is
``SelfConsistencyChain(branches=4, prompt=PROMPT, output_parser=StrOutputParser())``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing

from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from langchain_rksc import ChatRKSC

PROMPT = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("user", "{question}")])


def votes(message: AIMessage) -> None:
    """Show what the branches voted for."""
    record = message.response_metadata["rksc"]
    for vote in record["votes"]:
        print(f"{len(vote['branches'])} of {record['branches']} branches: {vote['answer']}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="A chain with a vote underneath.")
    parser.add_argument("question", nargs="?", default="Tom has 3 boxes with 4 pens each. How many pens does he have?")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--branches", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=60)
    options = parser.parse_args(argv)
    strategy = {"name": "self-consistency", "branches": options.branches}
    with closing(ChatRKSC(model=options.model, strategy=strategy, max_tokens=options.max_tokens)) as chat:
        chain = PROMPT | chat | RunnablePassthrough(votes) | StrOutputParser()
        print("answer:", chain.invoke({"question": options.question}))


if __name__ == "__main__":
    main()
