"""LangChain's standard integration tests, on the default model, with one branch and with three that vote."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from test_standard_unit import LOCAL

from langchain_rksc import ChatRKSC
from rksc_agents import RKSCReasoner

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning"),
]


class Standard(ChatModelIntegrationTests):
    """What both have in common."""

    settings: ClassVar[dict[str, Any]]

    @pytest.fixture(autouse=True)
    def _injected(self, real_reasoner: RKSCReasoner) -> None:
        self.reasoner = real_reasoner

    @property
    def chat_model_class(self) -> type[ChatRKSC]:
        return ChatRKSC

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"reasoner": self.reasoner, "max_tokens": 48, **self.settings}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {name: value for name, value in super().standard_chat_model_params.items() if name not in LOCAL}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        """Another model is another ChatRKSC: one call cannot load it."""
        return False

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        chat = ChatRKSC(**self.chat_model_params)
        chat.invoke("What is 6 x 7?", max_tokens=4)
        if not stream:
            return chat.invoke("What is 6 x 7?", max_tokens=4)
        first, *rest = chat.stream("What is 6 x 7?", max_tokens=4)
        return first + rest if rest else first

    @pytest.mark.xfail(reason="a model of 135M parameters does not name the keys of a JSON object as it is asked to")
    def test_json_mode(self, model: Any) -> None:
        super().test_json_mode(model)

    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    @pytest.mark.xfail(reason="a model of 135M parameters makes no call of a tool where that is its choice")
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="a model of 135M parameters does not copy Japanese names into arguments")
    def test_unicode_tool_call_integration(self, model: Any, **kwargs: Any) -> None:
        super().test_unicode_tool_call_integration(model, **kwargs)


class TestDirect(Standard):
    settings: ClassVar = {"strategy": "direct"}


class TestSelfConsistency(Standard):
    settings: ClassVar = {"strategy": {"name": "self-consistency", "branches": 3}, "temperature": 0.5}
