"""Conformance of an LLM: conversations that it reads, and prompts from templates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from conformance_base import (
    GREETING,
    HI,
    QUESTIONS,
    SIX,
    Conformance,
    drained,
    named,
    needs,
    text_of,
    user,
)
from conformance_chat import PIRATE, check_growth
from llama_index.core.base.llms.types import ChatResponse, TextBlock
from llama_index.core.llms import LLM, ChatMessage, MessageRole
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.types import BaseOutputParser
from llama_index_support import listening


class Conversations(Conformance):
    """What messages may be, and that the model reads all of them."""

    area = "conversations"

    def test_a_system_message_is_read(self) -> None:
        llm = self.make_llm()
        system = ChatMessage(role=MessageRole.SYSTEM, content=PIRATE)
        self.check_more_was_read(llm.chat([system, *user(SIX)]), llm.chat(user(SIX)))

    def test_earlier_turns_are_read(self) -> None:
        llm = self.make_llm()
        earlier = [*user(HI), ChatMessage(role=MessageRole.ASSISTANT, content="I do not want to talk about that.")]
        self.check_more_was_read(llm.chat([*earlier, *user(SIX)]), llm.chat(user(SIX)))

    def test_the_last_turn_may_be_the_assistants(self) -> None:
        messages = [*user(HI), ChatMessage(role=MessageRole.ASSISTANT, content="Hello there.")]
        response = self.make_llm().chat(messages)
        assert response.message.role == MessageRole.ASSISTANT
        assert isinstance(text_of(response), str)

    def test_all_blocks_of_text_are_read(self) -> None:
        llm = self.make_llm()
        system = ChatMessage(
            role=MessageRole.SYSTEM, blocks=[TextBlock(text="Answer in one sentence."), TextBlock(text=PIRATE)]
        )
        shorter = ChatMessage(role=MessageRole.SYSTEM, blocks=system.blocks[:1])
        self.check_more_was_read(llm.chat([system, *user(SIX)]), llm.chat([shorter, *user(SIX)]))

    def test_messages_may_be_empty(self) -> None:
        llm = self.make_llm()
        for empty in (ChatMessage(role=MessageRole.ASSISTANT, content=""), ChatMessage(role=MessageRole.ASSISTANT)):
            response = llm.chat([*user(HI), empty, *user(SIX)])
            assert response.message.role == MessageRole.ASSISTANT
            assert text_of(response).strip()

    async def test_any_text_can_be_asked(self) -> None:
        llm = self.make_llm()
        whole = text_of(llm.chat(user(GREETING)))
        chunks = list(llm.stream_chat(user(GREETING)))
        check_growth(chunks, ChatResponse)
        if self.deterministic:
            assert text_of(chunks[-1]) == whole == text_of(await llm.achat(user(GREETING)))
            assert text_of((await drained(llm.astream_chat(user(GREETING))))[-1]) == whole

    async def test_messages_stay_as_they_are(self) -> None:
        llm = self.make_llm(system_prompt=PIRATE)
        messages = [*user(HI), ChatMessage(role=MessageRole.ASSISTANT, content="Hello there."), *user(SIX)]
        before = copy.deepcopy(messages)
        llm.chat(messages)
        list(llm.stream_chat(messages))
        await llm.achat(messages)
        await drained(llm.astream_chat(messages))
        assert messages == before


class Upper(BaseOutputParser):
    """Asks for brevity, and reads answers in capitals."""

    def parse(self, output: str) -> str:
        return output.upper()

    def format(self, query: str) -> str:
        return f"{query}\nBe brief."


def after() -> PromptTemplate:
    """A prompt with a place to fill."""
    return PromptTemplate("Which number comes after {number}?")


class Prompts(Conformance):
    """Prompt templates, and what the LLM's settings do with them."""

    area = "prompts"

    def plain_answer(self, llm: LLM) -> str:
        """The answer to the prompt filled with 1, asked plainly."""
        if self.chat_model:
            return self.ask(llm, QUESTIONS[1])
        return llm.complete(QUESTIONS[1], formatted=True).text

    def test_predict(self) -> None:
        llm = self.make_llm()
        predicted = llm.predict(after(), number=1)
        assert isinstance(predicted, str)
        assert predicted == self.plain_answer(llm) or not self.deterministic

    async def test_apredict(self) -> None:
        llm = self.make_llm()
        predicted = await llm.apredict(after(), number=1)
        assert isinstance(predicted, str)
        assert predicted == self.plain_answer(llm) or not self.deterministic

    def test_stream(self) -> None:
        llm = self.make_llm()
        pieces = list(llm.stream(after(), number=1))
        assert all(isinstance(piece, str) for piece in pieces)
        assert "".join(pieces).strip()
        assert "".join(pieces) == self.plain_answer(llm) or not self.deterministic

    async def test_astream(self) -> None:
        llm = self.make_llm()
        pieces = await drained(llm.astream(after(), number=1))
        assert all(isinstance(piece, str) for piece in pieces)
        assert "".join(pieces).strip()
        assert "".join(pieces) == self.plain_answer(llm) or not self.deterministic

    @needs("deterministic", "chat_model")
    def test_a_conversation_as_a_template(self) -> None:
        llm = self.make_llm()
        system, question = ChatMessage(role=MessageRole.SYSTEM, content=PIRATE), user(QUESTIONS[1])
        template = ChatPromptTemplate(message_templates=[system, *user("Which number comes after {number}?")])
        assert llm.predict(template, number=1) == text_of(llm.chat([system, *question]))

    async def test_an_output_parser_reads_answers(self) -> None:
        llm = self.make_llm(output_parser=Upper())
        for answer in (llm.predict(after(), number=1), await llm.apredict(after(), number=1)):
            assert answer.strip()
            assert answer == answer.upper()
            if self.deterministic and self.chat_model:
                assert answer == self.ask(self.make_llm(), f"{QUESTIONS[1]}\nBe brief.").upper()

    async def test_an_output_parser_writes_prompts(self) -> None:
        plain, parsing = self.make_llm(), self.make_llm(output_parser=Upper())
        self.check_more_was_read(self.predicted(parsing), self.predicted(plain))
        self.check_more_was_read(await self.apredicted(parsing), await self.apredicted(plain))

    async def test_the_system_prompt_is_read(self) -> None:
        plain, told = self.make_llm(), self.make_llm(system_prompt=PIRATE)
        self.check_more_was_read(self.predicted(told), self.predicted(plain))
        self.check_more_was_read(await self.apredicted(told), await self.apredicted(plain))

    @needs("deterministic")
    async def test_the_system_prompt_is_read_in_streams_too(self) -> None:
        llm = self.make_llm(system_prompt=PIRATE)
        whole = llm.predict(after(), number=1)
        assert "".join(llm.stream(after(), number=1)) == whole
        assert "".join(await drained(llm.astream(after(), number=1))) == whole

    def predicted(self, llm: LLM) -> Any:
        """The response of `predict`."""
        with listening() as listener:
            llm.predict(after(), number=1)
        return last_told(listener, chat=self.chat_model)

    async def apredicted(self, llm: LLM) -> Any:
        """The response of `apredict`."""
        with listening() as listener:
            await llm.apredict(after(), number=1)
        return last_told(listener, chat=self.chat_model)


def last_told(listener: Any, *, chat: bool) -> Any:
    """The response that was told last."""
    ends = named(listener.names(), "LLMChatEnd" if chat else "LLMCompletionEnd")
    if not ends:
        pytest.fail("no response was told")
    return listener.of(ends[-1])[-1].response
