"""Reasoning chains: a chat model with a strategy, between a prompt template and an output parser."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable
from langchain_core.utils.pydantic import TypeBaseModel
from pydantic import ConfigDict, Field, ValidationError

from langchain_rksc.chat_models import ChatRKSC
from langchain_rksc.runs import at_once
from rksc_agents.adapter.settings import plain, strategy_of
from rksc_agents.errors import ConfigError


class ReasoningChain(RunnableSerializable[Any, Any]):
    """What the chains have in common; use one of them.

    Equivalent to ``prompt | ChatRKSC(strategy=...) | output_parser``, as one run. It keeps nothing between calls.
    What a call says beside the config, such as `temperature`, goes to the model and holds for that call.

    Parameters
    ----------
    llm : ChatRKSC or mapping, default ``ChatRKSC()``
        Who answers, or its fields; its own strategy is not used.
    prompt : prompt template, or another Runnable, or None
        Takes the chain's input; without it the input is a text, a prompt value or messages.
    output_parser : output parser, or another Runnable, or None
        Takes the message; without it the message is the output.
    **settings
        Fields of the strategy.

    Raises
    ------
    ConfigError
        If a setting is unknown or outside its range.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    fixed: ClassVar[dict[str, Any]]
    """The strategy's name, and the settings that make it what it is."""

    llm: ChatRKSC = Field(default_factory=ChatRKSC)
    prompt: Runnable[Any, Any] | None = None
    output_parser: Runnable[Any, Any] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)

    def __init__(self, **fields: Any) -> None:
        own = {name: fields.pop(name) for name in list(fields) if name in {*type(self).model_fields, "name"}}
        own["settings"] = {**own.get("settings", {}), **fields}
        if twice := sorted(own["settings"].keys() & self.fixed.keys() - {"name"}):
            raise ConfigError(
                f"{type(self).__name__} sets {', '.join(twice)} itself: leave it out, or use ChatRKSC(strategy=...)"
            )
        strategy_of({**self.fixed, **own["settings"]})
        try:
            super().__init__(**own)
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {error}") from None

    @property
    def strategy(self) -> dict[str, Any]:
        """The strategy's settings."""
        return {**self.fixed, **self.settings}

    def steps(self, **given: Any) -> list[Runnable[Any, Any]]:
        """Prompt, model and parser, as far as there are such, for a call with these arguments."""
        if "strategy" in given:
            raise ConfigError(f"{type(self).__name__} is a strategy: call the model itself to use another one")
        steps = [self.prompt, self.llm.bind(strategy=self.strategy, **given), self.output_parser]
        return [step for step in steps if step is not None]

    def get_input_schema(self, config: RunnableConfig | None = None) -> TypeBaseModel:
        """What the first step takes."""
        return self.steps()[0].get_input_schema(config)

    def get_output_schema(self, config: RunnableConfig | None = None) -> TypeBaseModel:
        """What the last step gives."""
        return self.steps()[-1].get_output_schema(config)

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """The strategy's settings as plain ones."""
        return {"settings": plain(self.settings)}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Settings are serialized."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where it is found again."""
        return ["langchain_rksc", "chains"]

    # -- running --------------------------------------------------------------------------------

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Answer one input."""
        return self._call_with_config(self._one, input, config, run_type="chain", **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Answer one input without blocking the event loop."""
        return await self._acall_with_config(self._aone, input, config, run_type="chain", **kwargs)

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Answer several inputs as one batch of the engine, unless ``max_concurrency`` says otherwise."""
        configs = at_once(config, len(inputs))
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Answer one input, piece by piece."""
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        """Like :meth:`stream`, without blocking the event loop."""

        async def inputs() -> AsyncIterator[Any]:
            yield input

        async for piece in self.atransform(inputs(), config, **kwargs):
            yield piece

    def transform(self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Answer an input that comes in pieces."""
        yield from self._transform_stream_with_config(input, self._pieces, config, run_type="chain", **kwargs)

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Like :meth:`transform`, without blocking the event loop."""
        pieces = self._atransform_stream_with_config(input, self._apieces, config, run_type="chain", **kwargs)
        async for piece in pieces:
            yield piece

    # -- inside the run, whose children the config belongs to -----------------------------------

    def _one(self, input: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any) -> Any:
        for step in self.steps(**kwargs):
            input = step.invoke(input, config)
        return input

    async def _aone(
        self, input: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Any:
        for step in self.steps(**kwargs):
            input = await step.ainvoke(input, config)
        return input

    def _pieces(
        self, input: Iterator[Any], run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Iterator[Any]:
        for step in self.steps(**kwargs):
            input = step.transform(input, config)
        yield from input

    async def _apieces(
        self,
        input: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        for step in self.steps(**kwargs):
            input = step.atransform(input, config)
        async for piece in input:
            yield piece


class SelfConsistencyChain(ReasoningChain):
    """Sample branches from one prefix and answer with the vote's winner.

    Takes the fields of :class:`~rksc_agents.reasoning.SelfConsistency`, such as `branches` and `vote`, beside those of
    :class:`ReasoningChain`.
    """

    fixed: ClassVar[dict[str, Any]] = {"name": "self-consistency"}


class TreeOfThoughtChain(ReasoningChain):
    """Grow lines of thought step by step and keep the best.

    Takes the fields of :class:`~rksc_agents.reasoning.TreeOfThought`, such as `proposals`, `breadth`, `depth` and
    `search`, beside those of :class:`ReasoningChain`.
    """

    fixed: ClassVar[dict[str, Any]] = {"name": "tree-of-thought"}


class VerifiedAnswerChain(ReasoningChain):
    """Draw branches, have each verified, and answer with the one that is most likely right.

    Takes the fields of :class:`~rksc_agents.reasoning.BestOfN`, such as `branches` and `verifier`, beside those of
    :class:`ReasoningChain`.
    """

    fixed: ClassVar[dict[str, Any]] = {"name": "best-of-n", "score": "verifier"}
