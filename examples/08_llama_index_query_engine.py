"""A LlamaIndex query engine over a folder: each branch is held against the passages that it was given.

python examples/08_llama_index_query_engine.py
"""

from contextlib import closing
from pathlib import Path

from llama_index.core import SimpleDirectoryReader
from llama_index.core.node_parser import SentenceSplitter
from llama_index.retrievers.bm25 import BM25Retriever

from llama_index.llms.rksc import RKSC, RKSCQueryEngine

FOLDER = Path(__file__).parent / "llama_index" / "documents"

with closing(RKSC(model="smollm2-135m-instruct", max_tokens=32, temperature=0.5)) as llm:
    passages = SentenceSplitter(chunk_size=160, chunk_overlap=0, tokenizer=llm.tokenizer)(
        SimpleDirectoryReader(FOLDER).load_data()
    )
    retriever = BM25Retriever.from_defaults(nodes=passages, similarity_top_k=2)
    engine = RKSCQueryEngine(retriever, llm=llm, branches=4, cite="required")
    response = engine.query("Who built the mill?")
print(response)
for number in response.metadata["rksc"]["cites"]:
    print(f"  [{number}] {response.source_nodes[number - 1].node.metadata['file_name']}")
