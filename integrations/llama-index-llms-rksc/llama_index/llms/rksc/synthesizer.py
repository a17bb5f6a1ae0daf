"""Answers over retrieved nodes by several branches, each verified against the nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore

from llama_index.llms.rksc.base import RKSC
from llama_index.llms.rksc.messages import conversation
from llama_index.llms.rksc.responses import Answered
from llama_index.llms.rksc.sources import citing, evidence, numbered, stated
from rksc_agents.adapter.settings import sharing_of, strategy_of
from rksc_agents.config import Sharing
from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from rksc_agents import Strategy

Cite = Literal["asked", "required", "off"]
"""Whether answers cite their sources: the prompt asks for it, a grammar makes sure of it, or nothing is said."""

SUPPORTED = "Do the sources support all that the answer above says? Reply YES or NO."
"""What is asked about each answer."""

REMEMBERED = 8
"""Earlier prompts that KV may be taken from with sharing "aligned"."""

_SYSTEM = "Answer the question from the sources alone. If they do not tell, say that they do not."
_CITE = " After each statement give the number of its source in brackets, like [1]."


def default_template(cite: Cite) -> ChatPromptTemplate:
    """Sources first, so that questions over the same ones share their KV; the question last."""
    system = _SYSTEM if cite == "off" else _SYSTEM + _CITE
    return ChatPromptTemplate(
        message_templates=[
            ChatMessage(role=MessageRole.SYSTEM, content=system),
            ChatMessage(role=MessageRole.USER, content="Sources:\n\n{context_str}\n\nQuestion: {query_str}"),
        ]
    )


class RKSCSynthesizer(BaseSynthesizer):
    """Answers over retrieved nodes with branches that share the nodes' KV, are verified against them, and vote.

    Each branch is asked whether the sources support its answer, on its own KV, and counts with how likely that is. All
    nodes go into one prompt; where they do not fit, :class:`~rksc_agents.errors.PromptTooLongError` says so.

    Parameters
    ----------
    llm : RKSC
    branches : int, default 8
        Branches of the default strategy.
    strategy : Strategy, str or mapping or None
        What is done instead of the default: ``SelfConsistency(vote="verifier")`` with a verifier that asks whether the
        sources support the answer, and answers compared apart from their citations.
    cite : "asked", "required" or "off", default "asked"
        Whether answers cite sources by number. "required" makes small models cite too; which source they name is
        theirs.
    sharing : str, Sharing or mapping or None
        "aligned" takes the KV of nodes that earlier queries had at other places of their prompts; this loses something,
        and verification computes the prompt anew. None is the model's own.
    template : BasePromptTemplate or None
        A prompt with the places ``{context_str}`` and ``{query_str}``; also by ``update_prompts``, as
        "text_qa_template".
    callback_manager : CallbackManager or None
    empty_response : str or None
        What is answered where nothing was retrieved; LlamaIndex's own text unless given.

    Raises
    ------
    ConfigError
        If an argument is outside its range, or `llm` is another kind of LLM.

    Notes
    -----
    ``response.metadata["rksc"]`` tells what each branch said; see :func:`llama_index.llms.rksc.sources.evidence`. What
    `synthesize` is given beside query and nodes goes to :meth:`llama_index.llms.rksc.RKSC.chat`.
    """

    def __init__(
        self,
        llm: RKSC,
        *,
        branches: int = 8,
        strategy: Any = None,
        cite: Cite = "asked",
        sharing: Any = None,
        template: BasePromptTemplate | None = None,
        callback_manager: CallbackManager | None = None,
        empty_response: str | None = None,
    ) -> None:
        if not isinstance(llm, RKSC):
            raise ConfigError(f"llm = {llm!r}: an RKSCSynthesizer needs an RKSC; other LLMs go with LlamaIndex's own")
        if cite not in ("asked", "required", "off"):
            raise ConfigError(f"cite = {cite!r}: give 'asked', 'required' or 'off'")
        super().__init__(llm, callback_manager, empty_response=empty_response)
        self.model = llm
        self.strategy = supported(branches) if strategy is None else strategy_of(strategy)
        self.cite = cite
        self.sharing: Sharing | None = sharing_of(sharing)
        self._template = default_template(cite) if template is None else template
        self._earlier: deque[Any] = deque(maxlen=REMEMBERED)

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._template}

    def _update_prompts(self, prompts_dict: PromptDictType) -> None:
        self._template = prompts_dict.get("text_qa_template", self._template)

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> str:
        """Answer a question from texts; what is returned is a text with its evidence."""
        messages, settings = self._asked(query_str, text_chunks, response_kwargs)
        return Supported.of(self.model.chat(messages, **settings), len(text_chunks))

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> str:
        """Like :meth:`get_response`, without blocking the event loop."""
        messages, settings = self._asked(query_str, text_chunks, response_kwargs)
        return Supported.of(await self.model.achat(messages, **settings), len(text_chunks))

    def _asked(
        self, query: str, texts: Sequence[str], given: dict[str, Any]
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        messages = self._template.format_messages(llm=self.model, context_str=numbered(texts), query_str=query)
        settings: dict[str, Any] = {"strategy": self.strategy}
        if self.cite == "required":
            settings["grammar"] = citing(len(texts))
        if self.sharing is not None:
            settings["sharing"] = self.sharing
            if self.sharing.mode == "aligned":
                settings["like"] = list(self._earlier)
                self._earlier.append(conversation(messages, self.model.system_prompt))
        return messages, {**settings, **given}

    def _prepare_response_output(self, response_str: Any, source_nodes: list[NodeWithScore]) -> RESPONSE_TYPE:
        response = super()._prepare_response_output(response_str, source_nodes)
        if isinstance(response_str, Supported):
            response.metadata = {**(response.metadata or {}), "rksc": response_str.evidence}
        return response


class Supported(str):
    """An answer with the evidence behind it."""

    evidence: dict[str, Any]

    @classmethod
    def of(cls, response: Any, sources: int) -> Supported:
        """The answer in a response over so many sources."""
        assert isinstance(response, Answered)
        answer = cls(response.message.content or "")
        answer.evidence = evidence(response.result, sources)
        return answer


def supported(branches: int) -> Strategy:
    """The default strategy: branches vote, each with how likely the sources support it."""
    from rksc_agents import SelfConsistency, SelfVerifier

    return SelfConsistency(branches=branches, vote="verifier", verifier=SelfVerifier(request=SUPPORTED), extract=stated)
