"""`ChatRKSC`: a chat model that thinks in several branches."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
)
from langchain_core.callbacks.manager import BaseRunManager
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from langchain_rksc.asking import Ask
from langchain_rksc.events import Progress
from langchain_rksc.fields import ModelFields
from langchain_rksc.messages import conversation
from langchain_rksc.runs import Runs
from langchain_rksc.structured import Method, Structured, structured_output
from langchain_rksc.tools import ToolLike, openai_tools
from rksc_agents.adapter.call import ToolChoice, choice_of
from rksc_agents.adapter.settings import described

if TYPE_CHECKING:
    from rksc_agents import RKSCReasoner


class ChatRKSC(ModelFields, Runs):
    """A chat model on a local Hugging Face model that answers with several branches of reasoning on one KV cache.

    ::

        from langchain_rksc import ChatRKSC

        chat = ChatRKSC(strategy="self-consistency", max_tokens=64)
        chat.invoke("What is 17 + 25?")

    The constructor is instant; the first call loads the model. Every field but `model`, `engine` and `load_kwargs` can
    be set for one call as well, as in ``chat.invoke(question, temperature=0.2)``, and the call's value holds. An
    unknown argument raises :class:`~rksc_agents.errors.ConfigError`, here and in calls.

    Parameters
    ----------
    model : str, default "smollm2-135m-instruct"
        A hub id, a local folder or a GGUF file; also `model_name`.
    strategy : str, Strategy or mapping or None
        A strategy's name, the strategy itself, or its settings as ``{"name": "self-consistency", "branches": 5}``.
        A name and settings are checked at the first call. None is the reasoner's own: ``SelfConsistency(branches=8)``
        for a model that is loaded here.
    temperature, top_k, top_p, min_p, repetition_penalty, max_tokens, stop, seed
        As in :class:`~rksc_agents.config.Sampling`; `stop` also as `stop_sequences`. None is the reasoner's own.
    n : int, default 1
        How many answers to give, 1 to 1024; ``chat.generate`` returns all. With the strategy "direct" they are
        branches of one prefill, with another one they are runs with the seeds `seed`, `seed` + 1, and so on. Each
        answer's usage is that of the whole request.
    logprobs : bool, default False
        Tell the log-probabilities of the answer's tokens in ``response_metadata["logprobs"]``.
    sharing, exit
        As for :meth:`~rksc_agents.reasoner.RKSCReasoner.from_pretrained`, or their settings as mappings.
    engine : EngineConfig or mapping or None
        KV budget and sizes of a step.
    load_kwargs : mapping
        Passed on to :meth:`~rksc_agents.reasoner.RKSCReasoner.from_pretrained`, untouched: `dtype`, `device`,
        `device_map`, `quantization_config`, `gguf_file`, `revision` and so on. A `token` is written down nowhere.
    stream_reasoning : bool, default False
        Show the branches' texts as reasoning blocks, each with its branch's index, before the answer.
    streaming : bool, default False
        Stream also in :meth:`invoke`, for handlers that want tokens.
    reasoner : RKSCReasoner or None
        A live reasoner to use instead of loading one. It stays yours to close, and is not serialized.

    Raises
    ------
    ConfigError
        If an argument is unknown or outside its range.

    Notes
    -----
    Copies (``bind``, ``model_copy``, ``configurable_fields``) share the loaded model. The default of `seed` is fixed,
    so that equal calls give equal answers; set `seed` for others.

    A strategy with several branches tells what they do by the custom events "rksc_branch_end",
    "rksc_branch_verified" and "rksc_votes" (:func:`rksc_agents.adapter.progress.told`), under the model's run. A
    stream of it brings the winning answer once it is known; "direct" streams tokens.
    """

    def __init__(self, *, reasoner: RKSCReasoner | None = None, **fields: Any) -> None:
        super().__init__(reasoner=reasoner, **fields)

    @property
    def _llm_type(self) -> str:
        return "rksc-chat"

    # -- one answer -----------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ask = self._ask(self._live(self._engine.get()), messages, stop, run_manager, kwargs)
        return ask.answer()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ask = self._ask(self._live(await self._engine.aget()), messages, stop, run_manager, kwargs)
        return await ask.aanswer()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        ask = self._ask(self._live(self._engine.get()), messages, stop, run_manager, kwargs)
        with closing(ask.chunks()) as chunks:
            for chunk in chunks:
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        ask = self._ask(self._live(await self._engine.aget()), messages, stop, run_manager, kwargs)
        async with aclosing(ask.achunks()) as chunks:
            async for chunk in chunks:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _ask(
        self,
        reasoner: RKSCReasoner,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: BaseRunManager | None,
        given: Mapping[str, Any],
    ) -> Ask:
        progress = Progress.of(run_manager) if run_manager is not None else self._progress
        return Ask(reasoner, self._call(stop, given), conversation(messages), progress)

    def _live(self, reasoner: RKSCReasoner) -> RKSCReasoner:
        """The reasoner, its context noted in the profile, which copies share."""
        if self.profile is not None:
            self.profile.setdefault("max_input_tokens", reasoner.context)
        return reasoner

    # -- tools and structured output ------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: ToolChoice = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to the model. Calls always follow the tools' schemas; several branches vote on them.

        Parameters
        ----------
        tools : sequence
            Tools, functions, pydantic classes or mappings.
        tool_choice : str, bool, mapping or None
            None, "auto" and False leave the choice to the model; "any", "required" and True ask for a call of some
            tool; a name, or a mapping that names a tool, for a call of that one; "none" for none.
        strict : bool or None
            True closes the tools' schemas: all properties required and no others.
        parallel_tool_calls : bool or None
            Whether several calls may be made at once. None is True where the model chooses, and False where a call is
            demanded, as small models would repeat it.
        **kwargs
            What else holds for the calls, such as `temperature`.

        Raises
        ------
        ConfigError
            If something is no tool, or the choice is none of them.
        """
        formatted = openai_tools(tools, strict)
        bound = {"tool_choice": choice_of(tool_choice, formatted), "parallel_tool_calls": parallel_tool_calls}
        given = {name: value for name, value in bound.items() if value is not None}
        return self.bind(tools=formatted, **given, **kwargs)

    def with_structured_output(
        self,
        schema: Mapping[str, Any] | type | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Structured]:
        """Return a runnable that answers with objects of a schema.

        Parameters
        ----------
        schema : class, mapping or None
            A pydantic class, for instances of it; a TypedDict, a JSON schema or a function in OpenAI's form, for
            mappings. None with "json_mode" alone.
        method : "json_schema", "function_calling" or "json_mode", default "json_schema"
            "json_schema" writes the answer under the schema's grammar, so that it is always valid; it is the default
            since it works alike for models with and without tools in their templates, and takes the fewest tokens.
            "function_calling" demands a call of a tool of that schema, which suits models that were trained on tools.
            "json_mode" is any JSON object; say in the prompt what it is to hold.
        include_raw : bool, default False
            Return a mapping of "raw", the message, "parsed" and "parsing_error".
        strict : bool or None
            True closes the schema: all properties required and no others.
        **kwargs
            What else holds for the calls, such as `temperature`.

        Raises
        ------
        ConfigError
            If the schema or the method is none of these.
        """
        return structured_output(self, schema, method=method, include_raw=include_raw, strict=strict, kwargs=kwargs)

    # -- tokens ---------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """The tokens that the model's own tokenizer makes of a text; loads the model."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.reasoner.token_ids(text)

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[ToolLike] | None = None
    ) -> int:
        """How many tokens a conversation has as the model reads it, with its template; loads the model."""
        return self.reasoner.count_prompt_tokens(conversation(messages), openai_tools(tools or []))

    # -- what is written down -------------------------------------------------------------------

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._traced("chat", stop, kwargs)

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The cache's key beside the messages: all that the answer depends on, the call's settings laid over."""
        call = self._call(stop, kwargs)
        return json.dumps({"_type": self._llm_type, **self._identity(), "call": described(call)}, sort_keys=True)

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            pdf_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
            temperature=True,
        )
        if self.shared_engine is not None and self.shared_engine.injected is not None:
            profile["max_input_tokens"] = self.shared_engine.injected.context
        return profile
