"""Retrieved nodes as numbered sources, and what answers say of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from rksc_agents.model.grammar import Regex
from rksc_agents.result import ReasoningResult

_CITED = re.compile(r"\[(\d+)\]")


def numbered(texts: Sequence[str]) -> str:
    """Texts as sources that can be cited by their numbers, from 1."""
    return "\n\n".join(f"[{number}] {text.strip()}" for number, text in enumerate(texts, start=1))


def cited(text: str, sources: int) -> list[int]:
    """The numbers of the sources that a text cites, ascending; those that do not exist are left out."""
    return sorted({int(number) for number in _CITED.findall(text) if 1 <= int(number) <= sources})


def stated(text: str) -> str | None:
    """What an answer states, apart from its citations, white space and final stop: answers are compared by it."""
    bare = " ".join(_CITED.sub(" ", text).split())
    bare = re.sub(r"\s+([.,;:!?])", r"\1", bare).rstrip(". ")
    return bare or None


def citing(sources: int) -> Regex:
    """Sentences each of which ends with the sources that it cites."""
    number = "|".join(map(str, range(1, sources + 1)))
    sentence = rf"([^\[\]\n.!?]|[.!?][^\s\[\]])+[.!?]? (\[({number})\])+"
    return Regex(rf"{sentence}(\s{sentence})*")


def evidence(result: ReasoningResult, sources: int) -> dict[str, Any]:
    """What a response tells of how it was found: the `rksc` record, and what each branch said and was worth.

    Each of `per_branch` has `text`, `states` (the text without citations), `cites` (numbers of sources), `confidence`,
    `finish_reason`, `supported` (how likely the sources support it, in [0, 1]; None where that was not asked) and
    `winner`.
    """
    branches = [
        {
            "text": branch.text,
            "states": stated(branch.text),
            "cites": cited(branch.text, sources),
            "confidence": branch.confidence,
            "finish_reason": branch.finish_reason,
            "supported": branch.verdict.score if branch.verdict is not None else None,
            "winner": index == result.winner,
        }
        for index, branch in enumerate(result.branches)
    ]
    return {**result.evidence(), "cites": cited(result.text, sources), "per_branch": branches}


class DocumentOrder(BaseNodePostprocessor):
    """Brings nodes into the order in which they stand in their documents.

    The same nodes then make the same beginning of a prompt whatever the question, so that their KV is found again.
    """

    @classmethod
    def class_name(cls) -> str:
        """The name by which it is serialized."""
        return "DocumentOrder"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return sorted(nodes, key=_place)


def _place(scored: NodeWithScore) -> tuple[str, int, str]:
    node = scored.node
    return node.ref_doc_id or "", getattr(node, "start_char_idx", None) or 0, node.node_id
