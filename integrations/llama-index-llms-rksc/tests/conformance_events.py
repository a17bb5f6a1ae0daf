"""Conformance of an LLM: what it tells handlers of events, spans and callbacks, and what tokens it counts."""

from __future__ import annotations

from typing import Any

import pytest
from conformance_base import (
    HI,
    QUESTIONS,
    SIX,
    Conformance,
    Response,
    drained,
    named,
    needs,
    spans,
    started,
    text_of,
    usage_of,
    user,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.callbacks.schema import EventPayload
from llama_index.core.prompts import PromptTemplate
from llama_index_support import listening

CHAT = ["LLMChatStartEvent", "LLMChatEndEvent"]
COMPLETION = ["LLMCompletionStartEvent", "LLMCompletionEndEvent"]


class Instrumentation(Conformance):
    """Events and spans reach handlers at the dispatchers' root."""

    area = "events"

    def check_told(self, llm: Any, listener: Any, expected: list[str], last: Response) -> None:
        """Check that a call was told once: its start, its progress, its end with the response."""
        kind = expected[0].removesuffix("StartEvent")
        assert named(listener.names(), kind) == expected
        start, end = listener.of(expected[0])[0], listener.of(expected[-1])[0]
        assert text_of(end.response) == text_of(last)
        assert start.span_id == end.span_id
        assert start.span_id
        assert start.model_dict["class_name"] == llm.class_name()

    def test_chat_is_told(self) -> None:
        llm = self.make_llm()
        with listening() as listener:
            response = llm.chat(user(SIX))
        self.check_told(llm, listener, CHAT, response)
        assert listener.of(CHAT[0])[0].messages == listener.of(CHAT[1])[0].messages == user(SIX)

    async def test_achat_is_told(self) -> None:
        llm = self.make_llm()
        with listening() as listener:
            response = await llm.achat(user(SIX))
        self.check_told(llm, listener, CHAT, response)

    def test_complete_is_told(self) -> None:
        llm = self.make_llm()
        with listening() as listener:
            response = llm.complete(SIX)
        self.check_told(llm, listener, COMPLETION, response)
        assert listener.of(COMPLETION[0])[0].prompt == listener.of(COMPLETION[1])[0].prompt == SIX

    async def test_acomplete_is_told(self) -> None:
        llm = self.make_llm()
        with listening() as listener:
            response = await llm.acomplete(SIX)
        self.check_told(llm, listener, COMPLETION, response)

    def test_stream_chat_is_told(self) -> None:
        llm = self.make_llm()
        with listening() as listener:
            chunks = list(llm.stream_chat(user(SIX)))
        progress = ["LLMChatInProgressEvent"] * len(chunks)
        self.check_told(llm, listener, [CHAT[0], *progress, CHAT[1]], chunks[-1])
        assert [event.response for event in listener.of(progress[0])] == chunks

    async def test_astream_chat_is_told(self) -> None:
        llm = self.make_llm()
        with listening() as listener:
            chunks = await drained(llm.astream_chat(user(SIX)))
        progress = ["LLMChatInProgressEvent"] * len(chunks)
        self.check_told(llm, listener, [CHAT[0], *progress, CHAT[1]], chunks[-1])

    def test_stream_complete_is_told(self) -> None:
        llm = self.make_llm()
        with listening() as listener:
            chunks = list(llm.stream_complete(SIX))
        progress = ["LLMCompletionInProgressEvent"] * len(chunks)
        self.check_told(llm, listener, [COMPLETION[0], *progress, COMPLETION[1]], chunks[-1])

    async def test_astream_complete_is_told(self) -> None:
        llm = self.make_llm()
        with listening() as listener:
            chunks = await drained(llm.astream_complete(SIX))
        progress = ["LLMCompletionInProgressEvent"] * len(chunks)
        self.check_told(llm, listener, [COMPLETION[0], *progress, COMPLETION[1]], chunks[-1])

    async def test_prediction_is_told(self) -> None:
        llm, prompt = self.make_llm(), PromptTemplate("Which number comes after {number}?")
        with listening() as listener:
            predicted = llm.predict(prompt, number=1)
        with listening() as awaited:
            apredicted = await llm.apredict(prompt, number=1)
        for heard, answer in ((listener, predicted), (awaited, apredicted)):
            names = heard.names()
            inner = CHAT if self.chat_model else COMPLETION
            assert names[0] == "LLMPredictStartEvent"
            assert names[-1] == "LLMPredictEndEvent"
            assert 0 < names.index(inner[0]) < names.index(inner[1]) < len(names) - 1
            assert heard.of("LLMPredictEndEvent")[0].output == answer

    async def test_spans_are_closed(self) -> None:
        llm = self.make_llm()
        with spans() as handler:
            llm.chat(user(HI))
            llm.complete(HI)
            list(llm.stream_chat(user(HI)))
            list(llm.stream_complete(HI))
            await llm.achat(user(HI))
            await llm.acomplete(HI)
            await drained(llm.astream_chat(user(HI)))
            await drained(llm.astream_complete(HI))
        ended = [span.id_.partition("-")[0].rpartition(".")[2] for span in handler.completed_spans]
        assert {"chat", "complete", "stream_chat", "stream_complete"} <= set(ended)
        assert {"achat", "acomplete", "astream_chat", "astream_complete"} <= set(ended)
        assert not handler.open_spans
        assert not handler.dropped_spans

    async def test_a_failure_is_told(self) -> None:
        llm, question, kind = self.make_failing()
        with listening() as listener, spans() as handler:
            with pytest.raises(kind):
                llm.chat(user(question))
            with pytest.raises(kind):
                await llm.achat(user(question))
        assert listener.names().count(CHAT[0]) == 2
        assert CHAT[1] not in listener.names()
        assert len(listener.of("SpanDropEvent")) >= 2
        assert not handler.open_spans
        assert len(handler.dropped_spans) >= 2

    async def test_a_failure_of_a_stream_is_told(self) -> None:
        llm, question, kind = self.make_failing()
        with listening() as listener, spans() as handler:
            with pytest.raises(kind):
                list(llm.stream_chat(user(question)))
            with pytest.raises(kind):
                await drained(llm.astream_chat(user(question)))
        assert listener.names().count(CHAT[0]) == 2
        assert CHAT[1] not in listener.names()
        assert len(listener.of("ExceptionEvent") + listener.of("SpanDropEvent")) >= 2
        assert not handler.open_spans

    async def test_after_a_failure_the_llm_answers(self) -> None:
        llm, question, kind = self.make_failing()
        with pytest.raises(kind):
            await started(llm.achat(user(question)))
        with pytest.raises(kind):
            llm.complete(question)
        with pytest.raises(kind):
            list(llm.stream_complete(question))
        assert self.ask(llm, HI).strip()


class Callbacks(Conformance):
    """Handlers of a callback manager hear each call once."""

    area = "callbacks"

    async def test_callbacks_hear_start_and_end(self) -> None:
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm = self.make_llm(callback_manager=CallbackManager([debug]))
        llm.chat(user(HI))
        await llm.achat(user(HI))
        list(llm.stream_chat(user(HI)))
        await drained(llm.astream_chat(user(HI)))
        pairs = debug.get_event_pairs(CBEventType.LLM)
        assert [len(pair) for pair in pairs] == [2] * 4
        for start, end in pairs:
            assert start.payload is not None
            assert end.payload is not None
            assert start.payload[EventPayload.MESSAGES] == user(HI)
            assert text_of(end.payload[EventPayload.RESPONSE]).strip()

    async def test_callbacks_hear_completions(self) -> None:
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm = self.make_llm(callback_manager=CallbackManager([debug]))
        llm.complete(HI)
        await llm.acomplete(HI)
        list(llm.stream_complete(HI))
        await drained(llm.astream_complete(HI))
        pairs = debug.get_event_pairs(CBEventType.LLM)
        assert [len(pair) for pair in pairs] == [2] * 4
        assert all(start.payload[EventPayload.PROMPT] == HI for start, _ in pairs)  # type: ignore[index]

    def test_callbacks_hear_of_failures(self) -> None:
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm, question, kind = self.make_failing(callback_manager=CallbackManager([debug]))
        with pytest.raises(kind):
            llm.chat(user(question))
        with pytest.raises(kind):
            list(llm.stream_chat(user(question)))
        pairs = debug.get_event_pairs(CBEventType.LLM)
        assert [len(pair) for pair in pairs] == [2, 2]
        assert all(isinstance(end.payload[EventPayload.EXCEPTION], kind) for _, end in pairs)  # type: ignore[index]

    async def test_the_token_counter_counts_each_call_once(self) -> None:
        counter = TokenCountingHandler(tokenizer=str.split)
        llm = self.make_llm(callback_manager=CallbackManager([counter]))
        responses = [
            llm.chat(user(SIX)),
            await llm.achat(user(SIX)),
            list(llm.stream_chat(user(SIX)))[-1],
            (await drained(llm.astream_chat(user(SIX))))[-1],
            llm.complete(SIX),
            list(llm.stream_complete(SIX))[-1],
        ]
        counts = counter.llm_token_counts
        assert len(counts) == len(responses)
        assert all(count.prompt_token_count > 0 and count.completion_token_count > 0 for count in counts)
        if self.counts_tokens:
            assert counter.total_llm_token_count == sum(usage_of(response)["total_tokens"] for response in responses)


class Tokens(Conformance):
    """Responses tell how many tokens were read and written."""

    area = "tokens"

    def check_usage(self, response: Response) -> dict[str, int]:
        """Check that a response counts its tokens."""
        usage = usage_of(response)
        assert usage["prompt_tokens"] > 0
        assert usage["completion_tokens"] > 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}

    @needs("counts_tokens")
    async def test_answers_count_tokens(self) -> None:
        llm = self.make_llm()
        counted = [self.check_usage(response) for response in (llm.chat(user(SIX)), await llm.achat(user(SIX)))]
        completed = [self.check_usage(response) for response in (llm.complete(SIX), await llm.acomplete(SIX))]
        if self.deterministic:
            assert counted[0] == counted[1]
            assert completed[0] == completed[1]

    @needs("counts_tokens")
    async def test_streams_count_tokens(self) -> None:
        llm = self.make_llm()
        chat = self.check_usage(list(llm.stream_chat(user(SIX)))[-1])
        achat = self.check_usage((await drained(llm.astream_chat(user(SIX))))[-1])
        complete = self.check_usage(list(llm.stream_complete(SIX))[-1])
        if self.deterministic:
            assert chat == achat == self.check_usage(llm.chat(user(SIX)))
            assert complete == self.check_usage(llm.complete(SIX))

    @needs("counts_tokens")
    def test_longer_questions_have_more_tokens(self) -> None:
        llm = self.make_llm()
        long = "\n".join([*QUESTIONS, SIX])
        self.check_more_was_read(llm.chat(user(long)), llm.chat(user(SIX)))
        self.check_more_was_read(llm.complete(long), llm.complete(SIX))
