"""LlamaIndex on RKSC: an LLM and a query engine that think in several branches on one KV cache."""

from __future__ import annotations

from llama_index.llms.rksc.base import RKSC
from llama_index.llms.rksc.query_engine import RKSCQueryEngine
from llama_index.llms.rksc.react import react_grammar
from llama_index.llms.rksc.synthesizer import RKSCSynthesizer

__all__ = ["RKSC", "RKSCQueryEngine", "RKSCSynthesizer", "react_grammar"]
