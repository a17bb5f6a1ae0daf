"""Moving stored keys to other positions.

Keys are stored after the rotary embedding, which turns pairs of dimensions by an angle proportional to the position.
A key moves by turning it on by the difference. How a layer turns its keys is not read from its code but measured: the
keys of single tokens at several positions are compared with what each kind of rotation would make of the keys at
position 0. A token alone sees itself only, so nothing else of it depends on the position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rksc_agents.cache.store import KV, Layout
from rksc_agents.errors import ConfigError, UnsupportedModelError
from rksc_agents.model.protocol import context_length, input_device, vocabulary_size
from rksc_agents.model.tree_cache import LayerKinds, TreeCache

POSITIONS = (1, 7, 100)
"""Where keys are compared with those at position 0, beside the end of the context."""

TOKENS = 4
"""Tokens that are tried; one alone might have an embedding of zeros, as padding has."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """How one layer turns its keys.

    Attributes
    ----------
    frequencies : Tensor [pairs], float64
        Angle per position of each pair of dimensions.
    start : int
        The first dimension that is turned; the ``2 * pairs`` from there on are.
    interleaved : bool
        Whether a pair are neighbours (GPT-J), or `pairs` dimensions apart (Llama).
    """

    frequencies: Tensor
    start: int
    interleaved: bool

    def turned(self, keys: Tensor, by: Tensor) -> Tensor:
        """The keys [heads, tokens, width], each token's turned by `by` [tokens] positions, in float32 at least."""
        out = keys.to(torch.promote_types(keys.dtype, torch.float32), copy=True)
        # Angles in float64 stay exact for large moves; runs move as one, so there are few different ones.
        steps, where = by.cpu().unique(return_inverse=True)
        angles = (steps.double()[:, None] * self.frequencies)[where]
        cos, sin = (table.to(out.device, out.dtype) for table in (angles.cos(), angles.sin()))
        one, other = self._pairs(out)
        turned = one * cos - other * sin, other * cos + one * sin
        one.copy_(turned[0])
        other.copy_(turned[1])
        return out

    def _pairs(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and of the second dimension of all pairs."""
        pairs = self.frequencies.shape[0]
        turned = keys[..., self.start : self.start + 2 * pairs]
        return (turned[..., ::2], turned[..., 1::2]) if self.interleaved else (turned[..., :pairs], turned[..., pairs:])


@dataclass(frozen=True, slots=True)
class Rotation:
    """How each layer of a model that stores KV turns its keys.

    Attributes
    ----------
    layers : dict of int to (Rotary or None)
        None for a layer whose keys do not depend on the position (SmolLM3's layers without rotary embedding).
    """

    layers: dict[int, Rotary | None]

    @staticmethod
    def measure(model: PreTrainedModel, layout: Layout) -> Rotation:
        """Find out how the layers of `model` turn their keys, with one pass over some single tokens per position.

        Parameters
        ----------
        model : PreTrainedModel
            One that runs on the KV tree; left as found.
        layout : Layout
            The layers that store KV.

        Raises
        ------
        UnsupportedModelError
            If the keys of a layer depend on the position in a way that is no known rotation, or its values do.
        """
        context = context_length(model)
        positions = sorted({position for position in (*POSITIONS, context - 1) if 0 < position < context})
        seen = [_single_tokens(model, layout, position) for position in (0, *positions)]
        frequencies = _frequencies(model)
        layers = {}
        for layer in layout.layers:
            keys, values = zip(*(at[layer] for at in seen), strict=True)
            if not all(_differ(values[0], value, 0) <= 1.0 for value in values):
                raise _unsupported(model, layer, "its values depend on the position")
            fits = []
            for rotary in (None, *_candidates(frequencies, keys[0].shape[-1])):
                moved = (_turned(rotary, keys[0], torch.full(keys[0].shape[1:2], at)) for at in positions)
                worst = max(_differ(key, mine, at) for key, mine, at in zip(keys[1:], moved, positions, strict=True))
                fits.append((worst, rotary))
            worst, best = min(fits, key=lambda fit: fit[0])  # the first of equals
            if not worst <= 1.0:
                raise _unsupported(model, layer, "its keys are not turned with the position by any frequencies it has")
            layers[layer] = best
        return Rotation(layers)

    def moved(self, layer: int, keys: Tensor, by: Tensor) -> Tensor:
        """The keys as they would be `by` positions further on.

        Parameters
        ----------
        layer : int
            The layer of the model that stored the keys.
        keys : Tensor [heads, tokens, width]
            Keys after the rotary embedding; not changed.
        by : Tensor [tokens], integer
            New position minus old position of each token.

        Returns
        -------
        Tensor [heads, tokens, width]
            New memory, in the dtype of `keys`; computed in float32 at least.

        Raises
        ------
        ConfigError
            If the layer stores no keys, or `by` is not one whole number per token.
        """
        if layer not in self.layers:
            raise ConfigError(f"layer = {layer!r} stores no keys: give one of {', '.join(map(str, self.layers))}")
        if by.shape != keys.shape[1:2] or by.is_floating_point() or by.is_complex():
            raise ConfigError(
                f"by is of shape {tuple(by.shape)} and {by.dtype}: give one whole number for each of the "
                f"{keys.shape[1]} tokens"
            )
        return _turned(self.layers[layer], keys, by).to(keys.dtype)


def _turned(rotary: Rotary | None, keys: Tensor, by: Tensor) -> Tensor:
    return keys.clone() if rotary is None else rotary.turned(keys, by)


def _candidates(frequencies: list[Tensor], width: int) -> Iterator[Rotary]:
    for inv_freq in frequencies:
        spare = width - 2 * inv_freq.shape[0]
        if spare >= 0:
            for start in sorted({0, spare}):  # DeepSeek's MLA turns the last dimensions, all others the first
                yield Rotary(inv_freq, start, interleaved=False)
                yield Rotary(inv_freq, start, interleaved=True)


def _frequencies(model: PreTrainedModel) -> list[Tensor]:
    """The different frequencies of the model's rotary embeddings; Gemma 3 has some per kind of layer."""
    found: list[Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            inv_freq = buffer.detach().to("cpu", torch.float64).flatten()
            if not any(torch.equal(inv_freq, other) for other in found):
                found.append(inv_freq)
    return found


def _differ(expected: Tensor, got: Tensor, position: int) -> float:
    """The largest relative difference of a head, as a multiple of what rounding at `position` may give."""
    allowed = max(1e-3, 4 * torch.finfo(expected.dtype).eps)
    allowed += position * 2.0**-23  # models round their angles to float32
    size = expected.double().flatten(1).norm(dim=1)
    difference = (expected.double() - got.double()).flatten(1).norm(dim=1)
    return float((difference / size.clamp(min=torch.finfo(torch.float32).tiny)).max()) / allowed


def _unsupported(model: PreTrainedModel, layer: int, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer} of {type(model).__name__} cannot take KV from another position: {why}. Aligned sharing needs "
        "a rotary embedding (default, linear, dynamic within the original length, yarn, llama3): use mode exact"
    )


@torch.inference_mode()
def _single_tokens(model: PreTrainedModel, layout: Layout, position: int) -> dict[int, KV]:
    """Keys and values [heads, tokens, width] of tokens that each stand alone at `position`, as the tree stores them."""
    vocabulary = vocabulary_size(model)
    ids = torch.tensor([[vocabulary * (i + 1) // (TOKENS + 1)] for i in range(TOKENS)], device=input_device(model))
    seen: dict[int, KV] = {}
    with _noting(model, seen):
        cache = TreeCache(LayerKinds(model.config), 0, [], None)
        model(input_ids=ids, position_ids=torch.full_like(ids, position), cache=cache, use_cache=True)
    for layer, shape in layout.layers.items():
        if layer not in seen or seen[layer][0].shape[::2] != (shape.heads, shape.key_width):
            raise _unsupported(model, layer, "it does not show its keys as they are stored")
        if not seen[layer][0].any():
            raise _unsupported(model, layer, "its keys are all zero for the tokens tried")
    return seen


@contextmanager
def _noting(model: PreTrainedModel, seen: dict[int, KV]) -> Iterator[None]:
    """Switch the model's attention to one for tokens that see only themselves and that notes their KV, and back.

    The model's own cache would not do: DeepSeek's holds latents, and the tree what they are expanded to.
    """

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        seen[layer] = (key[:, :, 0].transpose(0, 1).cpu(), value[:, :, 0].transpose(0, 1).cpu())
        groups = query.shape[1] // key.shape[1]
        return value.transpose(1, 2).repeat_interleave(groups, 2).contiguous(), None

    before, name = model.config._attn_implementation, f"rksc_rotation_{id(seen)}"
    AttentionInterface.register(name, attend)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(name, None)
