"""LangChain on RKSC: chat models and chains that think in several branches on one KV cache."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_rksc.chains import SelfConsistencyChain, TreeOfThoughtChain, VerifiedAnswerChain
    from langchain_rksc.chat_models import ChatRKSC
    from langchain_rksc.llms import RKSCLLM

_HOMES = {
    "ChatRKSC": "langchain_rksc.chat_models",
    "RKSCLLM": "langchain_rksc.llms",
    "SelfConsistencyChain": "langchain_rksc.chains",
    "TreeOfThoughtChain": "langchain_rksc.chains",
    "VerifiedAnswerChain": "langchain_rksc.chains",
}

__all__ = ["RKSCLLM", "ChatRKSC", "SelfConsistencyChain", "TreeOfThoughtChain", "VerifiedAnswerChain"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
