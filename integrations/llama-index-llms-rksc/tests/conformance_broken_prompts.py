"""Mocks that do not conform in what they read of conversations and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from conformance_mock import Mock, fails
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    MessageRole,
)
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate

# -- conversations -------------------------------------------------------------------------------


@fails(
    "a_call_is_the_models_choice",
    "achat",
    "achat_with_tools",
    "any_text_can_be_asked",
    "astream_chat_grows",
    "astream_chat_with_tools",
    "calls_of_others_can_be_history",
    "chat",
    "chat_with_tools",
    "each_tool_can_be_called",
    "messages_may_be_empty",
    "results_are_read",
    "stream_chat_grows",
    "stream_chat_with_tools",
    "the_last_turn_may_be_the_assistants",
)
class NoRole(Mock):
    """Answers in the user's name."""

    def steps(self, messages: Sequence[ChatMessage], **asked: Any) -> Iterator[ChatResponse]:
        for step in super().steps(messages, **asked):
            yield step.model_copy(update={"message": step.message.model_copy(update={"role": MessageRole.USER})})


@fails(
    "a_system_message_is_read",
    "all_blocks_of_text_are_read",
    "the_system_prompt_is_read",
)
class DeafToSystem(Mock):
    """Does not read system messages."""

    def read(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        return [message for message in messages if message.role != MessageRole.SYSTEM]


@fails("earlier_turns_are_read")
class Forgetful(Mock):
    """Reads the last turn alone, beside system messages."""

    def read(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        return [*(message for message in messages[:-1] if message.role == MessageRole.SYSTEM), messages[-1]]


@fails("all_blocks_of_text_are_read")
class OneBlock(Mock):
    """Reads one block of each message."""

    def read(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        return [message.model_copy(update={"blocks": message.blocks[:1]}) for message in messages]


@fails(
    "calls_of_others_can_be_history",
    "messages_may_be_empty",
    "results_are_read",
)
class NeedsContent(Mock):
    """Takes it that all messages have a text."""

    def read(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        assert all(isinstance(message.content, str) for message in messages)
        return list(messages)


@fails("any_text_can_be_asked")
class Ascii(Mock):
    """Reads ASCII alone."""

    def read(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        for message in messages:
            (message.content or "").encode("ascii")
        return list(messages)


@fails("messages_stay_as_they_are")
class Writing(Mock):
    """Writes into the messages that it is given."""

    def read(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        if len(messages) > 1 and isinstance(messages, list) and messages[-1].content != "Go on.":
            messages.append(ChatMessage("Go on."))
        return list(messages)


# -- prompts -------------------------------------------------------------------------------------


@fails("an_output_parser_reads_answers")
class Unparsed(Mock):
    """Does not have its answers parsed."""

    def _parse_output(self, output: str) -> str:
        return output


@fails(
    "an_output_parser_reads_answers",
    "an_output_parser_writes_prompts",
)
class WithoutParserInPrompts(Mock):
    """Leaves prompts as they are."""

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        return self._extend_messages(prompt.format_messages(llm=self, **prompt_args))


@fails("a_conversation_as_a_template")
class BadTemplates(Mock):
    """Reads the last message of a template alone."""

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        prompt = prompt.partial_format()
        if isinstance(prompt, ChatPromptTemplate):
            prompt.message_templates = prompt.message_templates[-1:]
        return super().predict(prompt, **prompt_args)


@fails(
    "a_conversation_as_a_template",
    "an_output_parser_reads_answers",
    "predict",
    "prediction_is_told",
    "the_system_prompt_is_read_in_streams_too",
)
class AnotherPrediction(Mock):
    """What it predicts is not what it answers."""

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        return f"{super().predict(prompt, **prompt_args)}?"
