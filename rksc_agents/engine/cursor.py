"""What strategies hold: a place in the KV tree, and what decoding from it gave."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rksc_agents.cache.tree import Node
from rksc_agents.model.constraint import Constraint
from rksc_agents.types import FinishReason


@dataclass(frozen=True, slots=True)
class Graft:
    """How a prompt took KV from another: enough to do it again.

    Attributes
    ----------
    source, target : tuple of int
        The tokens of both prompts.
    pairs : tuple of (int, int)
        Target position and source position of each token that was taken.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]


class Cursor:
    """A sequence of tokens with a claim on its KV.

    Decoding goes on from it as often as one likes. Its KV may be evicted while nothing runs on it;
    then it is computed again when it is needed, with the same result.

    Attributes
    ----------
    tokens : tuple of int
        The whole sequence. The last token of a finished branch has no KV yet: nothing came after it.
    node : Node
        The tree node that ends the part of the sequence with KV.
    logits : Tensor or None
        [vocabulary], after the last token; None where they have not been computed.
    depth : int
        How many times decoding went on to get here.
    score : float or None
        How good the branch is, from 0 to 1; None where nobody has said.
    graft : Graft or None
        Set where the prompt took KV from another one at other positions, so that it is not exact.
    constraint : Constraint or None
        Where the sequence stands in the grammar that its continuation must follow; never changed, only forked.
    """

    __slots__ = ("constraint", "depth", "graft", "logits", "node", "released", "score", "tokens")

    def __init__(self, tokens: tuple[int, ...], node: Node, logits: Tensor | None = None, depth: int = 0) -> None:
        self.tokens = tokens
        self.node = node
        self.logits = logits
        self.depth = depth
        self.released = False
        self.score: float | None = None
        self.graft: Graft | None = None
        self.constraint: Constraint | None = None

    @property
    def ready(self) -> bool:
        """Whether the next token can be drawn without computing anything."""
        return self.logits is not None and self.node.alive and self.node.end == len(self.tokens)


@dataclass(frozen=True, slots=True)
class Completion:
    """What one row generated.

    Attributes
    ----------
    index : int
        Its place among the cursors that were decoded.
    tokens, logprobs : tuple
        Generated tokens and their log-probabilities.
    scores : tuple of float
        The confidence measure's score of each token.
    text : str
        Decoded text up to a stop text.
    finish_reason : str
        "eos", "stop", "length", "cancelled" or "unsure".
    depth : int
        Depth of the cursor that it started from.
    cursor : Cursor or None
        Where to go on from; None if the branch was cancelled.
    pieces : tuple of str
        What became readable with each token, and last what was held back where the branch was cancelled.
    """

    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    scores: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    depth: int
    cursor: Cursor | None
    pieces: tuple[str, ...] = ()
