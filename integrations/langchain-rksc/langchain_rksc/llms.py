"""`RKSCLLM`: text in, text out, on the same engine as the chat model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage
from langchain_core.messages.ai import add_usage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, Generation, GenerationChunk, LLMResult
from pydantic import PrivateAttr

from langchain_rksc.asking import Ask
from langchain_rksc.call import Call
from langchain_rksc.fields import ModelFields
from langchain_rksc.runs import AT_ONCE
from rksc_agents.adapter.settings import described
from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from rksc_agents import RKSCReasoner

_OF_CHATS = ("tools", "tool_choice", "parallel_tool_calls", "stream_reasoning", "streaming")
"""What a text has no place for, or no part of LangChain would ask for."""


class RKSCLLM(ModelFields, BaseLLM):
    """Completes texts with several branches of reasoning on one KV cache.

    A text is one user turn where the model has a chat template, and is continued as it is where it has none. The
    prompt is never part of the answer. Takes the fields of :class:`~langchain_rksc.chat_models.ChatRKSC`, and all of
    them but `model`, `engine` and `load_kwargs` in calls as well; not `streaming` and `stream_reasoning`: a text is
    streamed by :meth:`stream` and holds the answer alone. Tools are for the chat model.

    What answered a text, such as usage, votes and finish reason, is in the ``generation_info`` of :meth:`generate`'s
    generations; the usage of all texts is in its ``llm_output``.

    ::

        from langchain_rksc import RKSCLLM

        RKSCLLM(strategy="direct", max_tokens=16).invoke("The capital of France is")
    """

    _asked: Any = PrivateAttr(default=None)

    def __init__(self, *, reasoner: RKSCReasoner | None = None, **fields: Any) -> None:
        super().__init__(reasoner=reasoner, **fields)
        _refuse({name: True for name in _OF_CHATS if getattr(self, name, False)})

    @property
    def _llm_type(self) -> str:
        return "rksc"

    def _call(self, stop: list[str] | None, given: Mapping[str, Any]) -> Call:
        _refuse(given)
        return super()._call(stop, given)

    def _ask(self, reasoner: RKSCReasoner, prompt: str, stop: list[str] | None, given: Mapping[str, Any]) -> Ask:
        return Ask(reasoner, self._call(stop, given), [{"role": "user", "content": prompt}])

    # -- answers --------------------------------------------------------------------------------

    def generate(self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        """Complete several texts, each in a run of its own, as one batch of the engine; see the base class."""
        return BaseLLM.generate(self._for_call(stop, kwargs), prompts, stop, *args, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Like :meth:`generate`, without blocking the event loop."""
        return await BaseLLM.agenerate(self._for_call(stop, kwargs), prompts, stop, *args, **kwargs)

    def _for_call(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> Self:
        """A copy that knows the call's settings: LangChain asks the object alone what identifies an answer."""
        runs = ("callbacks", "tags", "metadata", "run_name", "run_id")
        given = {name: value for name, value in kwargs.items() if name not in runs}
        model = self.model_copy()
        model._asked = described(self._call(stop, given))
        return model

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        reasoner = self._engine.get()
        asks = [self._ask(reasoner, prompt, stop, kwargs) for prompt in prompts]
        with ThreadPoolExecutor(max(1, min(len(asks), AT_ONCE))) as pool:  # asked at the same time, so one batch
            return _result(reasoner, [answer.generations for answer in pool.map(Ask.answer, asks)])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        reasoner = await self._engine.aget()
        asks = [self._ask(reasoner, prompt, stop, kwargs) for prompt in prompts]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask.aanswer()) for ask in asks]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return _result(reasoner, [task.result().generations for task in tasks])

    # -- chunks ---------------------------------------------------------------------------------

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with closing(self._ask(self._engine.get(), prompt, stop, kwargs).chunks()) as chunks:
            for piece in filter(None, map(_piece, chunks)):
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece.text, chunk=piece)
                yield piece

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        async with aclosing(self._ask(await self._engine.aget(), prompt, stop, kwargs).achunks()) as chunks:
            async for chunk in chunks:
                if (piece := _piece(chunk)) is not None:
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece

    # -- tokens, and what is written down -------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """The tokens that the model's own tokenizer makes of a text; loads the model."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.reasoner.token_ids(text)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        asked = {} if self._asked is None else {"call": self._asked}
        return {**super()._identifying_params, **asked}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._traced("llm", stop, kwargs)

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where it is found again."""
        return ["langchain_rksc", "llms"]


def _refuse(given: Mapping[str, Any]) -> None:
    if refused := [name for name in _OF_CHATS if given.get(name)]:
        raise ConfigError(f"RKSCLLM takes no {', '.join(refused)}: use stream() to stream, and ChatRKSC for the rest")


def _result(reasoner: RKSCReasoner, answers: Sequence[Sequence[Generation]]) -> LLMResult:
    usage = None
    for first, *_ in answers:  # each answer to a text tells what all of them took
        usage = add_usage(usage, _message(first).usage_metadata)
    return LLMResult(
        generations=[[_generation(_message(one)) for one in several] for several in answers],
        llm_output={"model_name": reasoner.name, "token_usage": usage},
    )


def _message(generation: Generation) -> AIMessage:
    assert isinstance(generation, ChatGeneration)
    assert isinstance(generation.message, AIMessage)
    return generation.message


def _info(message: AIMessage) -> dict[str, Any]:
    return {**message.response_metadata, "usage_metadata": message.usage_metadata}


def _generation(message: AIMessage) -> Generation:
    return Generation(text=str(message.text), generation_info=_info(message))


def _piece(chunk: ChatGenerationChunk) -> GenerationChunk | None:
    """A chunk of a message as a piece of text; None for one that brings no text, such as thinking."""
    message = _message(chunk)
    if chunk.generation_info is not None:  # the last one
        return GenerationChunk(text=str(message.text), generation_info=_info(message))
    return GenerationChunk(text=str(message.text)) if message.text else None
