"""Answers from a folder of documents: retrieved by words, found by several branches, each held against its sources.

    python examples/llama_index/query_engine.py
    python examples/llama_index/query_engine.py --documents my/notes "Who opened the bakery?"

All branches share the KV of the retrieved passages. Each is then asked whether the sources support its answer, and the
vote counts it by how likely that is. Questions over the same passages use their KV again (the last line).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from llama_index.core import SimpleDirectoryReader
from llama_index.core.base.response.schema import Response
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode
from llama_index.retrievers.bm25 import BM25Retriever

from llama_index.llms.rksc import RKSC, RKSCQueryEngine

DOCUMENTS = Path(__file__).parent / "documents"
QUESTIONS = ("Who built the mill?", "When was the mill built?")


def passages(folder: Path, llm: RKSC) -> list[BaseNode]:
    """The documents of a folder, cut into passages, measured with the model's own tokenizer."""
    documents = SimpleDirectoryReader(folder, filename_as_id=True, required_exts=[".md", ".txt"]).load_data()
    for document in documents:
        document.excluded_llm_metadata_keys = list(document.metadata)  # paths and dates are not for the model
    return list(SentenceSplitter(chunk_size=160, chunk_overlap=0, tokenizer=llm.tokenizer)(documents))


def show(response: Response) -> None:
    """An answer, where it comes from, and what the branches thought of it."""
    record = response.metadata["rksc"]
    print(response.response)
    for number in record["cites"]:
        source = response.source_nodes[number - 1].node
        print(f"  [{number}] {source.metadata['file_name']}: {source.get_content().strip()[:80]!r}")
    for branch in record["per_branch"]:
        mark = "*" if branch["winner"] else " "
        print(f"  {mark} {branch['supported']:.2f} {branch['states']!r}")
    print(f"  tokens of the prompt whose KV was there already: {record['tokens_reused']}")


def main(argv: Sequence[str] | None = None) -> list[Response]:
    """Ask the questions and show each answer."""
    parser = argparse.ArgumentParser(description="Answers from documents, with their sources.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--documents", type=Path, default=DOCUMENTS)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--branches", type=int, default=4)
    options = parser.parse_args(argv)
    responses: list[Response] = []
    with closing(RKSC(model=options.model, max_tokens=32, temperature=0.5)) as llm:
        retriever = BM25Retriever.from_defaults(nodes=passages(options.documents, llm), similarity_top_k=2)
        engine = RKSCQueryEngine(retriever, llm=llm, branches=options.branches, cite="required")
        for question in options.questions:
            print(f"\n{question}")
            response = engine.query(question)
            assert isinstance(response, Response)
            show(response)
            responses.append(response)
    return responses


if __name__ == "__main__":
    main()
