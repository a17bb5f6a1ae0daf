"""How calls of a chat model run: several at once as one batch of the engine, their progress under their own runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self, cast
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    CallbackManager,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatResult, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor, ensure_config
from langchain_core.utils.uuid import uuid7
from pydantic import PrivateAttr

from langchain_rksc.events import Progress
from rksc_agents.config import EngineConfig

AT_ONCE: int = EngineConfig.model_fields["max_rows"].default
"""Requests at once where nothing else is said: each has a branch at least, so more would wait for a row."""


class Runs(BaseChatModel):
    """A chat model whose engine batches what is asked at the same time, and tells what branches do."""

    n: int = 1
    _progress: Progress | None = PrivateAttr(default=None)

    # -- progress under the model's run ---------------------------------------------------------

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Stream the answer; see the class."""
        model, config = self._told_by(CallbackManager, ensure_config(config))
        yield from BaseChatModel.stream(model, input, config, stop=stop, **kwargs)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Stream the answer without blocking the event loop. Closing the iterator frees its rows and KV."""
        model, config = self._told_by(AsyncCallbackManager, ensure_config(config))
        chunks = BaseChatModel.astream(model, input, config, stop=stop, **kwargs)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk]", chunks)) as closable:
            async for chunk in closable:
                yield chunk

    def _told_by(
        self, managers: type[CallbackManager | AsyncCallbackManager], config: RunnableConfig
    ) -> tuple[Self, RunnableConfig]:
        """A copy that sends progress to the handlers of the run that is about to begin, and that run's config.

        LangChain does not tell :meth:`_stream` which run it is in, so the run's id and handlers are settled here.
        """
        manager = managers.configure(
            config.get("callbacks"),
            self.callbacks,
            self.verbose,
            config.get("tags"),
            self.tags,
            config.get("metadata"),
            self.metadata,
        )
        run_id = config.get("run_id") or uuid7()
        progress = Progress(run_id, manager.handlers, manager.tags, manager.metadata)
        if not progress.listeners:
            return self, config
        return self._under(progress), {**config, "callbacks": manager, "run_id": run_id}

    def _under(self, progress: Progress | None) -> Self:
        if progress is None or not progress.listeners:
            return self
        model = self.model_copy()
        model._progress = progress
        return model

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        model = self._under(Progress.of(run_manager) if run_manager is not None else None)
        return BaseChatModel._generate_with_cache(model, messages, stop, run_manager, **kwargs)

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        model = self._under(Progress.of(run_manager) if run_manager is not None else None)
        return await BaseChatModel._agenerate_with_cache(model, messages, stop, run_manager, **kwargs)

    def _should_stream(self, **kwargs: Any) -> bool:
        return not self._several(kwargs) and super()._should_stream(**kwargs)

    def _should_use_protocol_streaming(self, **kwargs: Any) -> bool:
        return not self._several(kwargs) and super()._should_use_protocol_streaming(**kwargs)

    def _several(self, given: Mapping[str, Any]) -> bool:
        """Whether several answers are asked for, which are not streamed."""
        return (given.get("n") or self.n) > 1

    # -- many questions -------------------------------------------------------------------------

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Ask several questions as one batch of the engine, unless ``max_concurrency`` says otherwise."""
        configs = at_once(config, len(inputs))
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Like :meth:`batch`; yields each answer with its question's index as it comes."""
        configs = at_once(config, len(inputs))
        yield from super().batch_as_completed(inputs, configs, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload]

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        *,
        run_id: UUID | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer several conversations as one batch of the engine, each in a run of its own."""
        if len(messages) < 2:
            return super().generate(messages, stop, callbacks, run_id=run_id, **kwargs)

        def one(index: int) -> LLMResult:
            own = run_id if index == 0 else None
            return BaseChatModel.generate(self, [messages[index]], stop, callbacks, run_id=own, **kwargs)

        with ContextThreadPoolExecutor(min(len(messages), AT_ONCE)) as pool:
            results = list(pool.map(one, range(len(messages))))
        return LLMResult(
            generations=[generations for result in results for generations in result.generations],
            llm_output=self._combine_llm_outputs([result.llm_output for result in results]),
            run=[run for result in results for run in result.run or []] or None,
        )


def at_once(config: RunnableConfig | Sequence[RunnableConfig] | None, count: int) -> Any:
    """The config with as many requests at once as the engine takes, where it does not say how many."""
    if isinstance(config, Sequence):
        return [at_once(one, count) for one in config]
    if config is not None and config.get("max_concurrency") is not None:
        return config
    return {**(config or {}), "max_concurrency": max(1, min(count, AT_ONCE))}
