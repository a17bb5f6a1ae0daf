"""Answers from documents, with a retriever that needs no embedding model.

    python examples/langchain/rag.py

The retriever counts the words that a document shares with the question, rare words more: for some thousand short notes
that is often enough, and there is nothing to download. Ask twice about one document: the KV of what the two prompts
begin with is used again ("reused" below).
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough

from langchain_rksc import ChatRKSC

NOTES = (
    "The office in Lisbon opens at 8:30 and closes at 17:00.",
    "Expenses are paid back within 10 days if the receipt is attached.",
    "The coffee machine on the second floor is cleaned every Friday.",
    "New laptops are ordered from the IT desk; the wait is 3 weeks.",
)
PROMPT = ChatPromptTemplate.from_template("Notes:\n{notes}\n\nAnswer from the notes in one sentence: {question}")


class KeywordRetriever(BaseRetriever):
    """Finds the documents that share most with a question, each shared word counted by how rare it is."""

    documents: list[Document]
    k: int = 1

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        words = [set(re.findall(r"\w+", document.page_content.lower())) for document in self.documents]
        seen = Counter(word for each in words for word in each)
        asked = set(re.findall(r"\w+", query.lower()))
        score = [sum(math.log(1 + len(words) / seen[word]) for word in asked & each) for each in words]
        best = sorted(range(len(words)), key=lambda index: (-score[index], index))
        return [self.documents[index] for index in best[: self.k]]


def joined(documents: list[Document]) -> str:
    """The texts of documents, one per line."""
    return "\n".join(document.page_content for document in documents)


def chain_on(chat: ChatRKSC, notes: Sequence[str]) -> Any:
    """From a question to the model's message."""
    retriever = KeywordRetriever(documents=[Document(note) for note in notes])
    return {"notes": retriever | joined, "question": RunnablePassthrough()} | PROMPT | chat


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Retrieval without embeddings.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=40)
    options = parser.parse_args(argv)
    settings = {"strategy": "direct", "temperature": 0, "max_tokens": options.max_tokens}
    with closing(ChatRKSC(model=options.model, **settings)) as chat:
        chain = chain_on(chat, NOTES)
        for question in ("When does the office in Lisbon open?", "When does the office in Lisbon close?"):
            message = chain.invoke(question)
            usage = message.usage_metadata
            print(f"{question}\n  {message.text.strip()}")
            print(f"  prompt {usage['input_tokens']} tokens, {usage['input_token_details']['cache_read']} reused")


if __name__ == "__main__":
    main()
