"""A conformance suite for LLMs of LlamaIndex.

::

    from conformance import LLMConformance

    class TestMyLLM(LLMConformance):
        function_calling = True

        def make_llm(self, **settings):
            return MyLLM(temperature=0, **settings)

Each test makes its own LLM. What an LLM does not do is told by the attributes of
:class:`conformance_base.Conformance`; tests of it are skipped as not supported. With ``pytest -v`` a table by area
follows the tests.
"""

from __future__ import annotations

import pytest

for name in ("base", "chat", "prompts", "tools", "structured", "events", "running"):
    pytest.register_assert_rewrite(f"conformance_{name}")

from conformance_base import SECRET, Conformance, needs  # noqa: E402
from conformance_chat import Answers, Interface, Streams  # noqa: E402
from conformance_events import Callbacks, Instrumentation, Tokens  # noqa: E402
from conformance_prompts import Conversations, Prompts  # noqa: E402
from conformance_running import Concurrency, Copies, EventLoop  # noqa: E402
from conformance_structured import StructuredOutput  # noqa: E402
from conformance_tools import Tools  # noqa: E402

__all__ = ["SECRET", "Conformance", "LLMConformance", "needs"]


class LLMConformance(
    Interface,
    Answers,
    Streams,
    Conversations,
    Prompts,
    Tools,
    StructuredOutput,
    Instrumentation,
    Callbacks,
    Tokens,
    Copies,
    Concurrency,
    EventLoop,
):
    """All areas."""
