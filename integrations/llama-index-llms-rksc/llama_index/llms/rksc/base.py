"""`RKSC`: an LLM that thinks in several branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.base.llms.generic_utils import messages_to_prompt as default_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, ValidationError, field_serializer, model_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.tools.types import BaseTool

from llama_index.llms.rksc.asking import Ask
from llama_index.llms.rksc.messages import conversation
from llama_index.llms.rksc.responses import completion_of
from llama_index.llms.rksc.structured import Structured
from llama_index.llms.rksc.tools import openai_tools, schema_of, selections_of, spells_an_object
from rksc_agents.adapter.call import FORM, SAMPLING, SETTINGS, options_of
from rksc_agents.adapter.fields import check_names, check_settings, explained, injected
from rksc_agents.adapter.lazy import LazyReasoner
from rksc_agents.adapter.settings import engine_of, plain
from rksc_agents.config import DEFAULT_MODEL
from rksc_agents.errors import ConfigError
from rksc_agents.types import Prompt, Rendered

if TYPE_CHECKING:
    from rksc_agents import RKSCReasoner

_CALL = (*SETTINGS, *FORM, "logprobs", "like")
"""What a call may set."""


class RKSC(Structured, FunctionCallingLLM):
    """An LLM on a local Hugging Face model that answers with several branches of reasoning on one KV cache.

    ::

        from llama_index.llms.rksc import RKSC

        llm = RKSC(strategy="self-consistency", max_tokens=64)
        llm.complete("What is 17 + 25?")

    The constructor is instant; the first call, or the first look at :attr:`metadata`, loads the model. Every field from
    `strategy` to `grammar` can be set for one call as well, as in ``llm.chat(messages, temperature=0.2)``, and the
    call's value holds. An unknown argument raises :class:`~rksc_agents.errors.ConfigError`, here and in calls.

    Parameters
    ----------
    model : str, default "smollm2-135m-instruct"
        A hub id, a local folder or a GGUF file.
    strategy : str, Strategy or mapping or None
        A strategy's name, the strategy itself, or its settings as ``{"name": "self-consistency", "branches": 5}``.
        None is the reasoner's own: ``SelfConsistency(branches=8)`` for a model that is loaded here.
    temperature, top_k, top_p, min_p, repetition_penalty, max_tokens, stop, seed
        As in :class:`~rksc_agents.config.Sampling`. None is the reasoner's own.
    sharing, exit
        As for :meth:`~rksc_agents.reasoner.RKSCReasoner.from_pretrained`, or their settings as mappings.
    logprobs : bool, default False
        Tell the log-probabilities of the answer's tokens.
    grammar : Grammar or None
        What every answer follows, unless a call has tools or says what its answer looks like; not serialized.
    engine : EngineConfig or mapping or None
        KV budget and sizes of a step.
    load_kwargs : mapping
        Passed on to :meth:`~rksc_agents.reasoner.RKSCReasoner.from_pretrained`, untouched: `dtype`, `device`,
        `device_map`, `quantization_config`, `gguf_file`, `revision` and so on. A `token` is written down nowhere.
    reasoner : RKSCReasoner or None
        A live reasoner to use instead of loading one. It stays yours to close, and is not serialized.
    **fields
        Those of all LLMs of LlamaIndex: `system_prompt`, which is put before conversations without a system text of
        their own; `messages_to_prompt` and `completion_to_prompt`, which replace the chat template; `callback_manager`,
        `output_parser`, `pydantic_program_mode`, `rate_limiter`.

    Raises
    ------
    ConfigError
        If an argument is unknown or outside its range.

    Notes
    -----
    Calls may also set `tools`, `tool_choice`, `parallel_tool_calls`, `response_format` (a pydantic class or a JSON
    schema) and `like`, as :meth:`~rksc_agents.reasoner.RKSCReasoner.reason` takes them. A response's
    ``raw["usage"]`` counts tokens, its ``additional_kwargs["rksc"]`` holds votes, agreement and verification, and the
    `result` of a chat's response all branches. A strategy with several branches tells what they do by the
    instrumentation events of :mod:`llama_index.llms.rksc.events`; a stream of it brings the winning answer once it is
    known; "direct" streams tokens.

    Copies share the loaded model. The default of `seed` is fixed, so that equal calls give equal answers.
    """

    model: str = Field(default=DEFAULT_MODEL, description="A hub id, a local folder or a GGUF file.")
    strategy: Any = Field(default=None, description="What is done with a question; a name, settings or a Strategy.")
    temperature: float | None = Field(default=None, description="0 takes the likeliest token.")
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = Field(default=None, description="Tokens that an answer may have.")
    stop: list[str] | None = Field(default=None, description="Texts that end an answer and are no part of it.")
    seed: int | None = None
    sharing: Any = None
    exit: Any = None
    logprobs: bool = False
    grammar: Any = Field(default=None, exclude=True, description="What every answer follows.")
    engine: Any = None
    load_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)

    _lazy: LazyReasoner | None = PrivateAttr(default=None)

    def __init__(self, *, reasoner: RKSCReasoner | None = None, **fields: Any) -> None:
        check_names(type(self).__name__, fields, [*type(self).model_fields, "reasoner"])
        lazy = None
        if reasoner is not None:
            fields, lazy = injected(reasoner, fields)
        if isinstance(fields.get("stop"), str):  # a bare text would be taken apart into letters
            fields["stop"] = [fields["stop"]]
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(explained(type(self).__name__, error)) from None
        self._lazy = lazy if lazy is not None else LazyReasoner(self.model, self.load_kwargs, engine_of(self.engine))

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        """What can be checked without loading anything is checked now."""
        check_settings({name: getattr(self, name) for name in (*SAMPLING, "sharing", "engine")})
        return self

    @classmethod
    def class_name(cls) -> str:
        """The name by which it is serialized."""
        return "RKSC"

    # -- the reasoner ---------------------------------------------------------------------------

    @property
    def reasoner(self) -> RKSCReasoner:
        """The live reasoner; the first use loads the model."""
        return self._engine.get()

    def close(self) -> None:
        """Free the model and its KV cache if it was loaded here; an injected reasoner is its owner's to close."""
        self._engine.close()

    @property
    def _engine(self) -> LazyReasoner:
        engine = engine_of(self.engine)
        if self._lazy is None or not self._lazy.serves(self.model, self.load_kwargs, engine):
            self._lazy = LazyReasoner(self.model, self.load_kwargs, engine)
        return self._lazy

    @property
    def metadata(self) -> LLMMetadata:
        """What the model can; loads it."""
        reasoner = self.reasoner
        return LLMMetadata(
            context_window=reasoner.context,
            num_output=self.max_tokens if self.max_tokens is not None else reasoner.sampling.max_tokens,
            is_chat_model=reasoner.is_chat_model,
            is_function_calling_model=True,
            model_name=self.model,
        )

    def to_payload(self) -> dict[str, Any]:
        """What events tell of the model, without loading it."""
        own = {name: plain(getattr(self, name)) for name in SETTINGS if getattr(self, name) is not None}
        return {"class_name": self.class_name(), "model_name": self.model, **own}

    @property
    def tokenizer(self) -> Callable[[str], list[int]]:
        """The model's own tokenizer, for ``Settings.tokenizer``; loads the model."""
        return self.reasoner.token_ids

    # -- conversations --------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return self._ask(self._engine.get(), self._conversed(messages), kwargs).answer()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Like :meth:`chat`, without blocking the event loop; cancelling it frees its rows and KV."""
        return await self._ask(await self._engine.aget(), self._conversed(messages), kwargs).aanswer()

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation as the answer grows: each response has the text so far and, as `delta`, what is new."""
        return self._ask(self._engine.get(), self._conversed(messages), kwargs).stream()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Like :meth:`stream_chat`, without blocking the event loop; await it for the generator."""
        return self._ask(await self._engine.aget(), self._conversed(messages), kwargs).astream()

    # -- texts ----------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text: one user turn of a chat model, which other models continue.

        Parameters
        ----------
        prompt : str
        formatted : bool, default False
            The text is rendered for the model already, with its control tokens. Do not say so of texts that you do
            not trust.
        **kwargs
            What differs for this call.
        """
        reasoner = self._engine.get()
        return completion_of(self._ask(reasoner, self._text(reasoner, prompt, formatted), kwargs).answer())

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Like :meth:`complete`, without blocking the event loop; cancelling it frees its rows and KV."""
        reasoner = await self._engine.aget()
        return completion_of(await self._ask(reasoner, self._text(reasoner, prompt, formatted), kwargs).aanswer())

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Like :meth:`complete`, as the answer grows."""
        reasoner = self._engine.get()
        responses = self._ask(reasoner, self._text(reasoner, prompt, formatted), kwargs).stream()
        return (completion_of(response) for response in responses)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Like :meth:`stream_complete`, without blocking the event loop; await it for the generator."""
        reasoner = await self._engine.aget()
        responses = self._ask(reasoner, self._text(reasoner, prompt, formatted), kwargs).astream()
        return (completion_of(response) async for response in responses)

    # -- one call -------------------------------------------------------------------------------

    def _ask(self, reasoner: RKSCReasoner, prompt: Prompt, given: Mapping[str, Any]) -> Ask:
        check_names(type(self).__name__, given, _CALL, "a call of ")
        settings = {name: getattr(self, name) for name in (*SETTINGS, "logprobs")} | dict(given)
        settings = {name: value for name, value in settings.items() if value is not None}
        if self.grammar is not None and not {"tools", "response_format"} & settings.keys():
            settings.setdefault("grammar", self.grammar)
        options = options_of({**settings, "tools": openai_tools(settings.get("tools", []))}, schema_of)
        if "like" in settings:
            options["like"] = settings["like"]
        return Ask.of(reasoner, prompt, options, logprobs=bool(settings["logprobs"]))

    def _conversed(self, messages: Sequence[ChatMessage]) -> Prompt:
        if self.messages_to_prompt is not None and self.messages_to_prompt is not default_messages_to_prompt:
            return Rendered(self.messages_to_prompt(messages))
        return conversation(messages, self.system_prompt)

    def _text(self, reasoner: RKSCReasoner, prompt: str, formatted: bool) -> Prompt:
        if formatted:
            return Rendered(prompt) if reasoner.is_chat_model else prompt
        if self.completion_to_prompt is not None and self.completion_to_prompt is not default_completion_to_prompt:
            return Rendered(self.completion_to_prompt(prompt))
        if self.query_wrapper_prompt is not None:
            prompt = self.query_wrapper_prompt.format(query_str=prompt)
        if not self.system_prompt:
            return prompt
        if not reasoner.is_chat_model:
            return f"{self.system_prompt}\n\n{prompt}"
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": prompt}]

    # -- tools ----------------------------------------------------------------------------------

    def _prepare_chat_with_tools(  # noqa: PLR0917  (LlamaIndex's own signature)
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The arguments of :meth:`chat` for a call with tools.

        `tool_choice` beats `tool_required`: "auto", "any" or "required", "none", a tool's name, or a mapping that names
        a tool. With `allow_parallel_tool_calls` False the model can make one call at most.
        """
        message = ChatMessage(content=user_msg) if isinstance(user_msg, str) else user_msg
        choice = kwargs.pop("tool_choice", None)
        if choice is None and (tool_required or spells_an_object(tools)):
            choice = "any"
        return {
            "messages": [*(chat_history or []), *([] if message is None else [message])],
            "tools": openai_tools(tools),
            "tool_choice": choice,
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in a response.

        Raises
        ------
        ValueError
            If there are none, unless `error_on_no_tool_call` is False.
        """
        return selections_of(response, error_on_no_tool_call=error_on_no_tool_call)

    # -- what is written down -------------------------------------------------------------------

    @field_serializer("strategy", "sharing", "exit", "engine", "load_kwargs")
    def _settings(self, value: Any) -> Any:
        """Objects of the core as plain settings."""
        return plain(value)
