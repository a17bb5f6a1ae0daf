"""HuggingFaceLLM in the conformance suite, for comparison: run with ``-v`` for the table.

Set RKSC_TEST_HF_MODEL to a folder with a safetensors model, and install llama-index-llms-huggingface.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from conformance import SECRET, LLMConformance
from conformance_base import Response, text_of
from conformance_report import area_of
from llama_index.core.llms import LLM

MODEL = os.environ.get("RKSC_TEST_HF_MODEL", "")

pytestmark = [
    pytest.mark.skipif(not os.path.isdir(MODEL), reason="RKSC_TEST_HF_MODEL names no folder"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("default"),
]

_REASONS = {
    "complete() leaves the chat template out, and the model writes nothing": (
        "complete",
        "acomplete",
        "a_chat_model_is_asked_in_one_user_message",
        "stream_complete_grows",
        "astream_complete_grows",
    ),
    "content that is None is no text for the chat template": ("messages_may_be_empty",),
    "nothing makes a small model write JSON of the schema": (
        "structured_predict",
        "astructured_predict",
        "stream_structured_predict",
        "astream_structured_predict",
        "a_conversation_as_a_template_of_objects",
        "all_kinds_of_fields",
        "all_kinds_of_fields_streamed",
        "a_structured_llm_chats",
        "a_structured_llm_achats",
        "a_structured_llm_completes",
        "a_structured_llm_acompletes",
        "a_structured_llm_streams",
        "a_structured_llm_astreams",
        "the_program_for_the_llm",
        "structured_prediction_is_told",
        "the_loop_goes_on_during_structured_prediction",
    ),
    "chat() calls complete(), and asynchronous methods the others: one call is told twice and more": (
        "achat_is_told",
        "acomplete_is_told",
        "astream_chat_is_told",
        "astream_complete_is_told",
        "callbacks_hear_start_and_end",
        "callbacks_hear_completions",
        "the_token_counter_counts_each_call_once",
    ),
    "messages_to_prompt is a method of the LLM itself, which pickle and repr() follow in circles": (
        "pickling",
        "no_secret_is_told",
    ),
    "query_wrapper_prompt is written down in a form that cannot be read": ("settings_survive_a_round_trip",),
    "model_kwargs are written down with the token in them": ("no_secret_is_written_down",),
    "asynchronous methods call the others, and the event loop stands still": (
        "the_loop_goes_on_during_achat",
        "the_loop_goes_on_during_acomplete",
        "the_loop_goes_on_during_astream_chat",
        "the_loop_goes_on_during_astream_complete",
        "the_loop_goes_on_during_prediction",
        "achat_can_be_cancelled",
        "acomplete_can_be_cancelled",
        "astream_chat_can_be_cancelled",
        "a_timeout_ends_achat",
        "a_timeout_ends_astream_chat",
    ),
}
KNOWN = {f"test_{test}": reason for reason, tests in _REASONS.items() for test in tests}
"""The tests that fail for llama-index-llms-huggingface 0.8.0 with SmolLM2-135M-Instruct, and why."""


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The model and its tokenizer, loaded once."""
    pytest.importorskip("llama_index.llms.huggingface")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)


class TestHuggingFaceLLM(LLMConformance):
    secret: ClassVar = {"model_kwargs": {"token": SECRET}}

    @pytest.fixture(autouse=True)
    def _loaded(self, loaded: tuple[Any, Any], request: pytest.FixtureRequest) -> None:
        self.model, self.tokenizer = loaded
        test = request.function.__name__
        self.tokens = 96 if area_of(type(self), test) == "structured" else 8  # calls cannot ask for more
        if test in KNOWN:
            request.applymarker(pytest.mark.xfail(reason=KNOWN[test]))

    def make_llm(self, **settings: Any) -> LLM:
        return self.make(model=self.model, tokenizer=self.tokenizer, **settings)

    def make_lone_llm(self, **settings: Any) -> LLM:
        return self.make(tokenizer_name=MODEL, device_map="cpu", **settings)

    def make(self, **settings: Any) -> LLM:
        """An LLM that answers with its likeliest tokens."""
        from llama_index.llms.huggingface import HuggingFaceLLM

        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return HuggingFaceLLM(
            model_name=MODEL, max_new_tokens=self.tokens, is_chat_model=True, generate_kwargs=greedy, **settings
        )

    def check_more_was_read(self, more: Response, less: Response) -> None:
        """It counts no tokens, but tells prompt and answer as one."""
        assert self.read(more) > self.read(less)

    def read(self, response: Response) -> int:
        """How many characters the model read."""
        assert isinstance(response.raw, dict)
        return len(self.tokenizer.decode(response.raw["model_output"][0])) - len(text_of(response))
