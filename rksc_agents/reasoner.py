"""`RKSCReasoner`, the front door: a model, a strategy, and ways to ask."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rksc_agents.cache.budget import Budget
from rksc_agents.config import EngineConfig, Sampling
from rksc_agents.engine.engine import Engine
from rksc_agents.engine.session import Session
from rksc_agents.errors import ConfigError, PromptTooLongError
from rksc_agents.model.device import kv_limit
from rksc_agents.model.loader import load_model
from rksc_agents.model.protocol import Runner, context_length
from rksc_agents.model.runners import make_runner
from rksc_agents.model.sampling import recommended_sampling
from rksc_agents.model.source import DEFAULT_MODEL
from rksc_agents.model.text import TextCodec
from rksc_agents.reasoning import STRATEGIES, SelfConsistency, Strategy
from rksc_agents.reasoning.result import result_of
from rksc_agents.reasoning.strategy import Problem
from rksc_agents.types import Answer, Event, Prompt, ReasoningResult

Emit = Callable[[Event], None]
Run = Callable[[Session, Emit | None], Coroutine[Any, Any, ReasoningResult]]


class RKSCReasoner:
    """Answers questions with several branches of reasoning on one KV cache.

    Make one with :meth:`from_pretrained` or :meth:`from_model`. It may be called from any thread and any
    event loop at once; what is asked at the same time runs as one batch. Use it as a context manager, or call
    :meth:`close`, to free the KV cache and leave the model as it was.
    """

    def __init__(
        self,
        make_runner: Callable[[Budget], Runner],
        codec: TextCodec,
        *,
        name: str,
        context: int,
        kv_limit: int,
        strategy: Strategy | str | None,
        sampling: Sampling | None,
        engine: EngineConfig,
    ) -> None:
        self.name = name
        self.strategy = _strategy(strategy) if strategy is not None else SelfConsistency()
        self.sampling = sampling if sampling is not None else Sampling()
        self._codec = codec
        self._engine = Engine(make_runner, codec, context=context, kv_limit=kv_limit, config=engine)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = DEFAULT_MODEL,
        *,
        gguf_file: str | None = None,
        strategy: Strategy | str | None = None,
        sampling: Sampling | None = None,
        engine: EngineConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        progress: Callable[[str], None] | None = None,
        **hf_kwargs: Any,
    ) -> Self:
        """Load a model and make a reasoner of it.

        Parameters
        ----------
        model : str or Path, default "smollm2-135m-instruct"
            A hub id, a local folder, a GGUF file, or the default model's alias.
        gguf_file : str or None
            The GGUF file inside the folder or repository `model`.
        strategy : Strategy, str or None
            What :meth:`reason` does unless told otherwise; None is ``SelfConsistency(branches=8)``.
        sampling : Sampling or None
            How tokens are drawn unless told otherwise; None is what the model's generation config recommends for
            sampling, where it does, and the defaults of :class:`~rksc_agents.config.Sampling` elsewhere.
        engine : EngineConfig or None
            KV budget and sizes of a step.
        dtype, device, progress, **hf_kwargs
            See :func:`rksc_agents.model.loader.load_model`.

        Raises
        ------
        ConfigError, ModelLoadError, ConversionError, UnsupportedModelError
            See :func:`rksc_agents.model.loader.load_model`.
        """
        loaded = load_model(model, gguf_file=gguf_file, dtype=dtype, device=device, progress=progress, **hf_kwargs)
        return cls.from_model(
            loaded.model, loaded.tokenizer, name=loaded.name, strategy=strategy, sampling=sampling, engine=engine
        )

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        strategy: Strategy | str | None = None,
        sampling: Sampling | None = None,
        engine: EngineConfig | None = None,
    ) -> Self:
        """Make a reasoner of loaded objects.

        The model is not moved, and is as it was after :meth:`close`. Until then it belongs to the reasoner: call it
        and save it afterwards. Packed layers have no plain weights meanwhile (see
        :class:`~rksc_agents.config.EngineConfig`).

        Raises
        ------
        UnsupportedModelError
            If `model` is not a causal language model.
        ConfigError
            If `model` is in training mode or serves another reasoner.
        """
        settings = engine if engine is not None else EngineConfig()
        ends = model.generation_config.eos_token_id if model.generation_config is not None else None
        codec = TextCodec(tokenizer, eos_token_ids=[ends] if isinstance(ends, int) else ends or [])
        return cls(
            lambda budget: make_runner(model, budget, settings),
            codec,
            name=name if name is not None else str(model.config._name_or_path or type(model).__name__),
            context=context_length(model),
            kv_limit=kv_limit(settings.kv_budget, model.device),
            strategy=strategy,
            sampling=sampling if sampling is not None else recommended_sampling(model),
            engine=settings,
        )

    # -- asking ---------------------------------------------------------------------------------

    def reason(self, question: Prompt, *, strategy: Strategy | str | None = None, **sampling: Any) -> ReasoningResult:
        """Answer a question.

        Parameters
        ----------
        question : str or sequence of messages
            A user's question, or a conversation as mappings with "role" and "content".
        strategy : Strategy, str or None
            Instead of the reasoner's own.
        **sampling
            Fields of :class:`~rksc_agents.config.Sampling` that differ from the reasoner's own, such as
            `temperature`, `max_tokens`, `seed`.

        Raises
        ------
        ConfigError
            If an argument is unknown or outside its range.
        PromptTooLongError
            If the prompt does not fit the model's context.
        KVBudgetError
            If the request can never fit the KV budget.
        EngineClosedError
            After :meth:`close`.
        """
        future = self._submit(question, strategy, sampling)
        try:
            return future.result()
        finally:  # an interrupt leaves nothing running
            future.cancel()

    async def areason(
        self, question: Prompt, *, strategy: Strategy | str | None = None, **sampling: Any
    ) -> ReasoningResult:
        """Like :meth:`reason`, without blocking the event loop. Cancelling it frees its rows and KV."""
        return await asyncio.wrap_future(self._submit(question, strategy, sampling))

    def batch(
        self, questions: Sequence[Prompt], *, strategy: Strategy | str | None = None, **sampling: Any
    ) -> list[ReasoningResult]:
        """Answer several questions as one batch; the results come in the questions' order.

        If one fails, the others are cancelled and its error is raised.
        """
        futures: list[Future[ReasoningResult]] = []
        try:
            futures.extend(self._submit(question, strategy, sampling) for question in questions)
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def abatch(
        self, questions: Sequence[Prompt], *, strategy: Strategy | str | None = None, **sampling: Any
    ) -> list[ReasoningResult]:
        """Like :meth:`batch`, without blocking the event loop."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.areason(q, strategy=strategy, **sampling)) for q in questions]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def stream(self, question: Prompt, *, strategy: Strategy | str | None = None, **sampling: Any) -> Iterator[Event]:
        """Answer a question and yield what happens; the last event is an :class:`~rksc_agents.types.Answer`.

        The run starts with the first event asked for. Closing the iterator cancels it and frees its rows and KV.
        """
        return self._stream(self._prepared(question, strategy, sampling))

    def _stream(self, run: Run) -> Iterator[Event]:
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        future = self._engine.submit(lambda session: run(session, events.put))
        future.add_done_callback(lambda _: events.put(None))
        try:
            while (event := events.get()) is not None:
                yield event
            yield Answer(future.result())
        finally:
            future.cancel()

    async def astream(
        self, question: Prompt, *, strategy: Strategy | str | None = None, **sampling: Any
    ) -> AsyncIterator[Event]:
        """Like :meth:`stream`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        def put(event: Event | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        run = self._prepared(question, strategy, sampling)
        future = self._engine.submit(lambda session: run(session, put))
        future.add_done_callback(lambda _: put(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield Answer(future.result())
        finally:
            future.cancel()

    # -- one request ----------------------------------------------------------------------------

    def _submit(
        self, question: Prompt, strategy: Strategy | str | None, changes: dict[str, Any]
    ) -> Future[ReasoningResult]:
        run = self._prepared(question, strategy, changes)
        return self._engine.submit(lambda session: run(session, None))

    def _prepared(self, question: Prompt, strategy: Strategy | str | None, changes: dict[str, Any]) -> Run:
        """Check everything and render the prompt; what is left is to run."""
        chosen = self.strategy if strategy is None else _strategy(strategy)
        sampling = self.sampling.replace(**changes) if changes else self.sampling
        tokens = self._codec.encode(question)
        if len(tokens) >= self._engine.context:
            raise PromptTooLongError(len(tokens), self._engine.context)
        opened = self._codec.opens_thinking(tokens)

        def run(session: Session, emit: Emit | None) -> Coroutine[Any, Any, ReasoningResult]:
            problem = Problem(session, tokens, sampling, chosen.measure, chosen.extractor, opened, emit)
            return self._solve(chosen, problem)

        return run

    async def _solve(self, strategy: Strategy, problem: Problem) -> ReasoningResult:
        outcome = await strategy.solve(problem)
        if outcome.winner in problem.cursors:  # the next turn of a conversation goes on from the winner
            problem.session.keep(problem.cursors[outcome.winner])
        return result_of(strategy, problem, outcome)

    def count_tokens(self, text: str) -> int:
        """How many tokens the model's own tokenizer makes of `text`."""
        return len(self._codec.encode_text(text))

    # -- the end --------------------------------------------------------------------------------

    def clear_cache(self) -> None:
        """Forget all cached prefixes and free their KV."""
        self._engine.inspect(lambda scheduler: scheduler.tree.clear())

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV held now."""
        return self._engine.budget.held

    def close(self) -> None:
        """Cancel what runs, free the KV cache and leave the model as it was. Closing twice does nothing."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _strategy(strategy: Strategy | str) -> Strategy:
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy = {strategy!r}: give one of {', '.join(sorted(STRATEGIES))}, or a Strategy")
    return STRATEGIES[strategy]()
