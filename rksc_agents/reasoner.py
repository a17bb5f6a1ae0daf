"""`RKSCReasoner`, the front door: a model, a strategy, and ways to ask."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rksc_agents.cache.budget import Budget
from rksc_agents.config import DEFAULT_MODEL, EngineConfig, Sampling, Sharing
from rksc_agents.engine.engine import Engine
from rksc_agents.engine.session import Session
from rksc_agents.errors import ConfigError
from rksc_agents.events import Answer, Event
from rksc_agents.listeners import Listener, Listeners
from rksc_agents.model.device import kv_limit
from rksc_agents.model.fingerprint import model_hash
from rksc_agents.model.int8 import PASSAGE
from rksc_agents.model.loader import load_model
from rksc_agents.model.protocol import Runner, context_length
from rksc_agents.model.runners import make_runner
from rksc_agents.model.sampling import recommended_sampling
from rksc_agents.model.text import TextCodec
from rksc_agents.model.tools import tools_of
from rksc_agents.reasoning import SelfConsistency, Strategy
from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.result import result_of
from rksc_agents.request import Desk, Exit, Options, sharing_of, strategy_of
from rksc_agents.result import ReasoningResult
from rksc_agents.types import Prompt, Quantization, SharingMode

if TYPE_CHECKING:
    from langchain_rksc import ChatRKSC
    from llama_index.llms.rksc import RKSC

Emit = Callable[[Event], None]
Run = Callable[[Session, Emit | None], Coroutine[Any, Any, ReasoningResult]]


class RKSCReasoner:
    """Answers questions with several branches of reasoning on one KV cache.

    Make one with :meth:`from_pretrained` or :meth:`from_model`. It may be called from any thread and any
    event loop at once; what is asked at the same time runs as one batch. Use it as a context manager, or call
    :meth:`close`, to free the KV cache and leave the model as it was.

    Examples
    --------
    >>> with RKSCReasoner.from_pretrained() as reasoner:  # doctest: +SKIP
    ...     print(reasoner.reason("What is 17 + 25?").answer)
    """

    def __init__(
        self,
        make_runner: Callable[[Budget], Runner],
        codec: TextCodec,
        *,
        name: str,
        context: int,
        kv_limit: int,
        strategy: Strategy | str | None = None,
        sampling: Sampling | None = None,
        sharing: Sharing | SharingMode = "exact",
        exit: Exit = "auto",
        engine: EngineConfig,
        model_hash: str = "unknown",
    ) -> None:
        self.name = name
        self._desk = Desk(
            codec=codec,
            context=context,
            model_hash=model_hash,
            strategy=strategy_of(strategy) if strategy is not None else SelfConsistency(),
            sampling=sampling if sampling is not None else Sampling(),
            sharing=sharing_of(sharing),
            exit=exit,
        )
        self._listeners = Listeners()
        self._engine = Engine(make_runner, codec, context=context, kv_limit=kv_limit, config=engine)

    @property
    def strategy(self) -> Strategy:
        """What is done unless a call says otherwise."""
        return self._desk.strategy

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn unless a call says otherwise."""
        return self._desk.sampling

    @property
    def sharing(self) -> Sharing:
        """What branches with other prompts take from the first one's KV unless a call says otherwise."""
        return self._desk.sharing

    @property
    def exit(self) -> Exit:
        """When verification is skipped or stops early unless a call says otherwise."""
        return self._desk.exit

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = DEFAULT_MODEL,
        *,
        gguf_file: str | None = None,
        strategy: Strategy | str | None = None,
        sampling: Sampling | None = None,
        sharing: Sharing | SharingMode = "exact",
        exit: Exit = "auto",
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
        sharing : Sharing or str, default "exact"
            What branches with other prompts take from the first one's KV, or its mode.
        exit : str, Path, Certificate or ExitConfig, default "auto"
            When verification is skipped or stops early: "off", "strict", "paper", a certificate or its path, or your
            own thresholds. "auto" is the certificate for this model and prompt in the user's cache folder, where
            there is one, else "strict".
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
            loaded.model,
            loaded.tokenizer,
            name=loaded.name,
            strategy=strategy,
            sampling=sampling,
            sharing=sharing,
            exit=exit,
            engine=engine,
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
        sharing: Sharing | SharingMode = "exact",
        exit: Exit = "auto",
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
            lambda budget: make_runner(model, budget, settings, codec.encode_text(PASSAGE)),
            codec,
            name=name if name is not None else str(model.config._name_or_path or type(model).__name__),
            context=context_length(model),
            kv_limit=kv_limit(settings.kv_budget, model.device),
            strategy=strategy,
            sampling=sampling if sampling is not None else recommended_sampling(model),
            sharing=sharing,
            exit=exit,
            engine=settings,
            model_hash=model_hash(model) + ("-int8" if settings.int8 else ""),
        )

    # -- asking ---------------------------------------------------------------------------------

    def reason(self, question: Prompt, **options: Unpack[Options]) -> ReasoningResult:
        """Answer a question.

        Parameters
        ----------
        question : str or sequence of messages
            A user's question, or a conversation as mappings with "role" and "content"; a text that is rendered for the
            model already as :class:`~rksc_agents.types.Rendered`.
        **options
            What differs from the reasoner's own for this call: `strategy`; `phrasings`, other ways to put the
            question, which branches take in turn; `sharing`; `like`, earlier prompts whose cached KV the question's
            prompt may take with sharing "aligned"; `exit`; the fields of
            :class:`~rksc_agents.config.Sampling`, such as `temperature`, `max_tokens`, `seed`; and what the answer is
            to look like:

            - `grammar`: a :class:`~rksc_agents.model.grammar.JSONSchema`, ``Regex``, ``Choice`` or ``Lark`` that it
              follows; JSON is voted on by value.
            - `tools`: what the model may call, as mappings in OpenAI's form or with "name", "description" and
              "parameters". Calls are always valid, and are voted on in their canonical form.
            - `tool_choice`: "auto", "any" for at least one call, "none", or the name of the tool to call.
            - `parallel_tool_calls`: False for one call at most; by default True where the model chooses, and False
              where a call is demanded, as small models would repeat it.

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
        future = self._submit(question, options)
        try:
            return future.result()
        finally:  # an interrupt leaves nothing running
            future.cancel()

    async def areason(self, question: Prompt, **options: Unpack[Options]) -> ReasoningResult:
        """Like :meth:`reason`, without blocking the event loop. Cancelling it frees its rows and KV."""
        run = await asyncio.to_thread(self._prepared, question, options)  # a long prompt and a grammar take a while
        return await asyncio.wrap_future(self._engine.submit(lambda session: run(session, None)))

    def batch(self, questions: Sequence[Prompt], **options: Unpack[Options]) -> list[ReasoningResult]:
        """Answer several questions as one batch; the results come in the questions' order.

        If one fails, the others are cancelled and its error is raised.
        """
        futures: list[Future[ReasoningResult]] = []
        try:
            futures.extend(self._submit(question, options) for question in questions)
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def abatch(self, questions: Sequence[Prompt], **options: Unpack[Options]) -> list[ReasoningResult]:
        """Like :meth:`batch`, without blocking the event loop."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.areason(q, **options)) for q in questions]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def stream(self, question: Prompt, **options: Unpack[Options]) -> Iterator[Event]:
        """Answer a question and yield what happens; the last event is an :class:`~rksc_agents.events.Answer`.

        The run starts with the first event asked for. Closing the iterator cancels it and frees its rows and KV.
        """
        return self._stream(self._prepared(question, options))

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

    async def astream(self, question: Prompt, **options: Unpack[Options]) -> AsyncIterator[Event]:
        """Like :meth:`stream`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        def put(event: Event | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        run = await asyncio.to_thread(self._prepared, question, options)
        future = self._engine.submit(lambda session: run(session, put))
        future.add_done_callback(lambda _: put(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield Answer(future.result())
        finally:
            future.cancel()

    # -- one request ----------------------------------------------------------------------------

    def _submit(self, question: Prompt, options: Options) -> Future[ReasoningResult]:
        run = self._prepared(question, options)
        return self._engine.submit(lambda session: run(session, None))

    def _prepared(self, question: Prompt, options: Options) -> Run:
        request = self._desk.request(question, options)

        def run(session: Session, emit: Emit | None) -> Coroutine[Any, Any, ReasoningResult]:
            problem = Problem(
                session, request.question, request.prompts, request.settings, request.thinking_opened, emit
            )
            return self._told(request.strategy, problem)

        return run

    async def _told(self, strategy: Strategy, problem: Problem) -> ReasoningResult:
        """Solve a problem, and tell whoever listens how that ended."""
        try:
            result = await self._solve(strategy, problem)
        except BaseException as error:
            self._listeners.tell(error, problem.session.ledger.now)
            raise
        self._listeners.tell(result, problem.session.ledger.now)
        return result

    async def _solve(self, strategy: Strategy, problem: Problem) -> ReasoningResult:
        outcome = await strategy.solve(problem)
        if outcome.winner in problem.cursors:  # the next turn of a conversation goes on from the winner
            problem.session.keep(problem.cursors[outcome.winner])
        return result_of(strategy, problem, outcome, self.name)

    def listening(self, listener: Listener) -> AbstractContextManager[None]:
        """Have `listener` hear how each request ends, for the length of a ``with`` block.

        Parameters
        ----------
        listener : callable
            See :data:`rksc_agents.listeners.Listener`.
        """
        return self._listeners.listening(listener)

    @contextmanager
    def watching_steps(self, watch: Callable[[float], None]) -> Iterator[None]:
        """Have `watch` called in the engine's thread after each step with its seconds, for the length of the block."""
        self._engine.inspect(lambda scheduler: scheduler.on_step.append(watch))
        try:
            yield
        finally:
            if not self._engine.closed:
                self._engine.inspect(lambda scheduler: scheduler.on_step.remove(watch))

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return self._engine.runner.depth

    @property
    def quantization(self) -> Quantization | None:
        """What 8-bit weights changed, where there are any."""
        return self._engine.runner.quantization

    @property
    def model_hash(self) -> str:
        """What identifies the model in certificates."""
        return self._desk.model_hash

    def prompt_hash(self, strategy: Strategy) -> str:
        """What identifies the prompts of a strategy's verifier in certificates."""
        return self._desk.prompt_hash(strategy.checker)

    def token_ids(self, text: str) -> list[int]:
        """The tokens that the model's own tokenizer makes of `text`, without special ones."""
        return list(self._desk.codec.encode_text(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._desk.codec.decode(tokens, skip_special_tokens=False)

    def count_tokens(self, text: str) -> int:
        """How many tokens the model's own tokenizer makes of `text`."""
        return len(self.token_ids(text))

    def count_prompt_tokens(self, question: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """How many tokens a question or conversation has as the model reads it."""
        return len(self._desk.codec.encode(question, tools_of(tools)))

    @property
    def is_chat_model(self) -> bool:
        """Whether the model's tokenizer has a chat template."""
        return self._desk.codec.is_chat

    @property
    def context(self) -> int:
        """The model's context in tokens."""
        return self._desk.context

    def as_langchain(self, **settings: Any) -> ChatRKSC:
        """A LangChain chat model on this reasoner, which stays yours to close.

        Parameters
        ----------
        **settings
            Fields of ``langchain_rksc.ChatRKSC``, such as `strategy` and `temperature`.

        Raises
        ------
        ConfigError
            If the package langchain-rksc is not installed, or a setting is unknown.
        """
        try:
            from langchain_rksc import ChatRKSC
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"as_langchain() needs the package langchain-rksc ({error}): pip install langchain-rksc"
            ) from error
        return ChatRKSC(reasoner=self, **settings)

    def as_llama_index(self, **settings: Any) -> RKSC:
        """A LlamaIndex LLM on this reasoner, which stays yours to close.

        Parameters
        ----------
        **settings
            Fields of ``llama_index.llms.rksc.RKSC``, such as `strategy` and `temperature`.

        Raises
        ------
        ConfigError
            If the package llama-index-llms-rksc is not installed, or a setting is unknown.
        """
        try:
            from llama_index.llms.rksc import RKSC
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"as_llama_index() needs the package llama-index-llms-rksc ({error}): pip install llama-index-llms-rksc"
            ) from error
        return RKSC(reasoner=self, **settings)

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
