"""What the engine needs of whatever runs a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rksc_agents.cache.tree import Node, Payload, Tree

if TYPE_CHECKING:
    from rksc_agents.model.exits import Watch
    from rksc_agents.model.plan import Run
    from rksc_agents.model.readout import Readout
    from rksc_agents.model.rotation import Rotation
    from rksc_agents.types import Quantization


class RunningTail(Protocol):
    """KV of rows that run in step; see :class:`rksc_agents.cache.store.Tail`."""

    length: int

    @property
    def nbytes(self) -> int: ...
    def growth(self, tokens: int) -> int: ...
    def grow(self, tokens: int) -> None: ...
    def part(self, sealed: Sequence[int], kept: Sequence[int]) -> Sequence[Payload]: ...
    def close(self) -> None: ...


class Runner(Protocol):
    """Runs a model; see :class:`rksc_agents.model.runner.TreeRunner`.

    Attributes
    ----------
    splittable : bool
        Whether tree nodes can be split; if not, prefixes are reused at node ends only.
    chunked : bool
        Whether a prompt can be computed in pieces.
    shares : bool
        Whether branches read one copy of what they have in common.
    retryable : bool
        Whether a pass that failed leaves everything as it was.
    depth : int
        Layers of the model.
    readout : Readout or None
        What the model's head makes of hidden states; None where passes cannot end before the last layer.
    quantization : Quantization or None
        What 8-bit weights changed, where there are any.
    passes, tokens_computed : int
        Forward passes made and tokens computed in them, since the start.
    """

    @property
    def splittable(self) -> bool: ...
    @property
    def chunked(self) -> bool: ...
    @property
    def shares(self) -> bool: ...
    @property
    def retryable(self) -> bool: ...
    @property
    def depth(self) -> int: ...
    @property
    def readout(self) -> Readout | None: ...
    @property
    def quantization(self) -> Quantization | None: ...
    @property
    def passes(self) -> int: ...
    @property
    def tokens_computed(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    def attached(self) -> AbstractContextManager[None]: ...
    def tree(self) -> Tree: ...
    def most_bytes(self, ends: Sequence[int], most: int) -> int: ...
    def tail(self, bases: Sequence[Node], most: int, promised: int) -> RunningTail: ...
    def forward(self, runs: Sequence[Run]) -> Tensor: ...
    def rotation(self) -> Rotation: ...
    def forward_watched(self, runs: Sequence[Run], watch: Watch, targets: Sequence[int]) -> tuple[Tensor, int]: ...
    def close(self) -> None: ...


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its tokens; a dispatched model has its layers on several devices."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.device


def output_device(model: PreTrainedModel) -> torch.device:
    """Where a model computes its logits."""
    weight = model.get_output_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.device


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many tokens a model can take."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def context_length(model: PreTrainedModel) -> int:
    """The model's context; a recurrent model without a limit gets a million tokens."""
    config = model.config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(limit := getattr(config, name, None), int) and limit > 0:
            return limit
    return 1_000_000
