"""A query engine whose answers are found by several branches over one retrieved context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from llama_index.core import Settings
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine

from llama_index.llms.rksc.sources import DocumentOrder
from llama_index.llms.rksc.synthesizer import RKSCSynthesizer
from rksc_agents.adapter.fields import check_names
from rksc_agents.errors import ConfigError

_SETTINGS = ("branches", "strategy", "cite", "sharing", "template", "empty_response")


class RKSCQueryEngine(RetrieverQueryEngine):
    """Retrieves nodes, and answers over them with branches that share their KV, are verified against them, and vote.

    ::

        engine = RKSCQueryEngine(index.as_retriever(), llm=llm, branches=8)
        response = engine.query("Who built the mill?")
        response.metadata["rksc"]["per_branch"]

    Parameters
    ----------
    retriever : BaseRetriever
    llm : RKSC or None
        None is ``Settings.llm``.
    order : "document" or "score", default "document"
        The order of the sources in the prompt: as they stand in their documents, so that the same nodes share their KV
        whatever the question, or as the retriever ranks them.
    node_postprocessors : sequence, default ()
        What is done to the retrieved nodes before they are put in order.
    callback_manager : CallbackManager or None
    **settings
        Those of :class:`~llama_index.llms.rksc.RKSCSynthesizer`: `branches`, `strategy`, `cite`, `sharing`,
        `template`, `empty_response`.

    Raises
    ------
    ConfigError
        If a setting is unknown or outside its range.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: LLM | None = None,
        *,
        order: Literal["document", "score"] = "document",
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        callback_manager: CallbackManager | None = None,
        **settings: Any,
    ) -> None:
        if order not in ("document", "score"):
            raise ConfigError(f"order = {order!r}: give 'document' or 'score'")
        check_names(
            type(self).__name__, settings, (*_SETTINGS, "llm", "order", "node_postprocessors", "callback_manager")
        )
        synthesizer = RKSCSynthesizer(llm or Settings.llm, callback_manager=callback_manager, **settings)  # type: ignore[arg-type]
        ordering = [DocumentOrder()] if order == "document" else []
        super().__init__(retriever, synthesizer, [*node_postprocessors, *ordering], callback_manager)
