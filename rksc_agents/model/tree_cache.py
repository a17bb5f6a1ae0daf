"""The face of the KV tree towards transformers: a `Cache` whose layers hold nothing themselves.

Keys and values are stored by our attention function, after any expansion the model does between
cache and attention (DeepSeek's latents), so `update` only passes them through. Recurrent and
convolution states live in transformers' own layers for the time of a pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from rksc_agents.cache.store import State


class PassThroughLayer(CacheLayerMixin):
    """An attention layer's place in the cache."""

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class LayerKinds:
    """What each layer of a model keeps, read from the cache transformers itself would make.

    Attributes
    ----------
    windows : dict of int to (int or None)
        Sliding window of each attention layer that stores KV.
    linear : dict of int to int
        Layers with recurrent or convolution states, and how many each has.
    reusing : bool
        Whether some layers store nothing, which they do when they reuse another layer's KV.
    changing_rope : int
        Length from which the rotary embedding of all positions changes (longrope, dynamic scaling); 0 for never.
    unsupported : set of str
        Kinds of layers that the tree cannot hold.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.windows: dict[int, int | None] = {}
        self.linear: dict[int, int] = {}
        self.reusing = False
        self.unsupported: set[str] = set()
        text_config = config.get_text_config(decoder=True)
        self.changing_rope = _changing_rope(text_config)
        layers = DynamicCache(config=config).layers
        chunked = "chunked_attention" in (getattr(text_config, "layer_types", None) or ())
        if chunked or getattr(text_config, "attention_chunk_size", None) is not None:
            self.unsupported.add("chunked_attention")
        for index, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                self.windows[index] = None
            elif type(layer) is DynamicSlidingWindowLayer:
                self.windows[index] = layer.sliding_window
            elif type(layer) is LinearAttentionLayer:
                self.linear[index] = layer.number_of_states
            elif type(layer) is DummyLayer:
                self.reusing = True
            else:
                self.unsupported.add(type(layer).__name__)
        self.count = len(layers)


def _changing_rope(config: PreTrainedConfig) -> int:
    given = getattr(config, "rope_parameters", None) or {}
    ropes = [given] if "rope_type" in given else [rope for rope in given.values() if isinstance(rope, dict)]
    lengths = [
        int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        for rope in ropes
        if rope.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(lengths, default=0)


StateSlot = tuple[int, str, int]
"""A state tensor's place: layer, "conv" or "recurrent", index within the layer."""


class TreeCache(Cache):
    """The cache object handed to one forward pass.

    Parameters
    ----------
    kinds : LayerKinds
        What each layer keeps.
    length : int
        Tokens before this pass; models that are given position ids only compare it with zero.
    slots : list of StateSlot
        Where each tensor of `state` belongs.
    state : list of Tensor or None
        Recurrent states of the pass's rows; None for rows at the root.
    """

    def __init__(self, kinds: LayerKinds, length: int, slots: list[StateSlot], state: State | None) -> None:
        layers: list[Any] = [DummyLayer() for _ in range(kinds.count)]
        for index in kinds.windows:
            layers[index] = PassThroughLayer(length)
        for index, number in kinds.linear.items():
            layers[index] = LinearAttentionLayer(number_of_states=number)
        super().__init__(layers=layers)
        if state is not None:
            for (index, kind, which), tensor in zip(slots, state, strict=True):
                _put(layers[index], kind, which, tensor)

    def state(self, slots: list[StateSlot]) -> State:
        """The states after the pass."""
        return [getattr(self.layers[index], f"{kind}_states")[which] for index, kind, which in slots]

    def slots(self) -> list[StateSlot]:
        """Where the model put states; known after its first pass."""
        return [
            (index, kind, which)
            for index, layer in enumerate(self.layers)
            if isinstance(layer, LinearAttentionLayer)
            for kind in ("conv", "recurrent")
            for which, there in getattr(layer, f"is_{kind}_states_initialized").items()
            if there
        ]


def _put(layer: Any, kind: str, which: int, tensor: Tensor) -> None:
    getattr(layer, f"{kind}_states")[which] = tensor
    getattr(layer, f"is_{kind}_states_initialized")[which] = True
    layer.has_previous_state[which] = True
    layer.dtype, layer.device = tensor.dtype, tensor.device
    if kind == "conv":
        layer.conv_kernel_size[which] = tensor.shape[-1]


def cat_states(states: list[State]) -> State:
    """The states of several groups of rows as one batch, copied: layers change them in place."""
    return [torch.cat(tensors) for tensors in zip(*states, strict=True)]


def split_states(state: State, rows: list[int]) -> list[State]:
    """The inverse of :func:`cat_states`, for groups of these sizes."""
    if len(rows) == 1:
        return [state]
    return [list(group) for group in zip(*(tensor.split(rows) for tensor in state), strict=True)]
