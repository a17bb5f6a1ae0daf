"""LangChain's standard unit tests."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from langchain_core.load import load
from langchain_tests.unit_tests import ChatModelUnitTests, chat_models

from langchain_rksc import ChatRKSC

LOCAL = ("timeout", "max_retries", "api_key")
"""Standard parameters of services: a local model has no such thing, and ChatRKSC refuses what it cannot honour."""


@pytest.mark.filterwarnings(
    "ignore:The method `BaseChatModel.dict` was deprecated", "ignore:The function `load` is in beta"
)
class TestChatRKSC(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatRKSC]:
        return ChatRKSC

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"strategy": "self-consistency", "seed": 3, "top_p": 0.9}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {name: value for name, value in super().standard_chat_model_params.items() if name not in LOCAL}

    @pytest.fixture(autouse=True)
    def _listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """LangChain loads classes of packages on its own list alone; whoever loads others names them."""
        path = tuple(ChatRKSC.lc_id())
        monkeypatch.setattr(chat_models, "load", partial(load, additional_import_mappings={path: path}))
