"""Structured prediction: the answer is written under its class's JSON schema, so that it can always be read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatResponse
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictInProgressEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.llm import LLM
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import Model, PydanticProgramMode
from llama_index_instrumentation import get_dispatcher

if TYPE_CHECKING:
    from llama_index.core.program.utils import FlexibleModel

dispatcher = get_dispatcher(__name__)


class Structured(LLM):
    """LLMs whose `chat` takes a class as `response_format`.

    Where `pydantic_program_mode` is not the default, LlamaIndex's own programs are used.
    """

    @property
    def _plain(self) -> bool:
        return self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Answer a prompt with an instance of a class.

        Parameters
        ----------
        output_cls : pydantic class
        prompt : PromptTemplate or ChatPromptTemplate
        llm_kwargs : dict or None
            For :meth:`chat`.
        **prompt_args
            What the prompt's places hold.

        Raises
        ------
        pydantic.ValidationError
            If validators of the class, which no schema can tell, refuse what the model wrote.
        """
        if not self._plain:
            predicted: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return predicted
        _start(output_cls, prompt, prompt_args)
        response = self.chat(self._asked(prompt, prompt_args), response_format=output_cls, **(llm_kwargs or {}))
        return _end(output_cls.model_validate_json(response.message.content or ""))

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Like :meth:`structured_predict`, without blocking the event loop."""
        if not self._plain:
            predicted: Model = await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return predicted
        _start(output_cls, prompt, prompt_args)
        asked = self._asked(prompt, prompt_args)
        response = await self.achat(asked, response_format=output_cls, **(llm_kwargs or {}))
        return _end(output_cls.model_validate_json(response.message.content or ""))

    def stream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Model | FlexibleModel, None, None]:
        """Like :meth:`structured_predict`; yields what is there so far, and at the end the instance."""
        if not self._plain:
            yield from super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        _start(output_cls, prompt, prompt_args)
        partial = _Partial(output_cls)
        asked = self._asked(prompt, prompt_args)
        for response in self.stream_chat(asked, response_format=output_cls, **(llm_kwargs or {})):
            if (part := partial.push(response)) is not None:
                yield part
        yield _end(partial.whole())

    async def astream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Model | FlexibleModel, None]:
        """Like :meth:`stream_structured_predict`, without blocking the event loop; await it for the generator."""
        if not self._plain:
            return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        _start(output_cls, prompt, prompt_args)
        asked = self._asked(prompt, prompt_args)
        responses = await self.astream_chat(asked, response_format=output_cls, **(llm_kwargs or {}))

        async def parts() -> AsyncGenerator[Model | FlexibleModel, None]:
            partial = _Partial(output_cls)
            async for response in responses:
                if (part := partial.push(response)) is not None:
                    yield part
            yield _end(partial.whole())

        return parts()

    def _asked(self, prompt: BasePromptTemplate, prompt_args: dict[str, Any]) -> list[Any]:
        return self._extend_messages(prompt.format_messages(llm=self, **prompt_args))


class _Partial:
    """An object that grows with the text that spells it."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._class = output_cls
        self._objects: list[Any] | None = None
        self._text = ""

    def push(self, response: ChatResponse) -> Any:
        """What is there so far, where the response brings something new."""
        if (text := response.message.content or "") == self._text:
            return None
        self._text = text
        found = process_streaming_objects(response, self._class, self._objects)
        self._objects = [found]
        dispatcher.event(LLMStructuredPredictInProgressEvent(output=found))
        return found

    def whole(self) -> Any:
        """The instance that the whole text spells."""
        return self._class.model_validate_json(self._text)


def _start(output_cls: type[BaseModel], prompt: BasePromptTemplate, prompt_args: dict[str, Any]) -> None:
    dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args))


def _end(output: Model) -> Model:
    dispatcher.event(LLMStructuredPredictEndEvent(output=output))
    return output
