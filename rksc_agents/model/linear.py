"""Faster linear layers on the CPU: weights packed for oneDNN, where a quick measurement says it pays.

With a few rows the plain product lays the weight out anew in every call before it multiplies; a weight that
is packed once spares that. The packing ops are private to torch, so they are used behind a feature check
and an equality test, with the plain layer as the fallback.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn

from rksc_agents.errors import EngineError

ROWS = (1, 8, 32, 256)
"""Rows at which packed and plain are compared: one branch, the default, several requests, a piece of a prompt."""

ENOUGH = 2**27
"""Bytes of a shape's weights to measure with, where there are that many: in a step weights come from memory."""

GAIN = 0.8
"""Pack a shape if that takes at most this, relative to plain, on average over the middle of `ROWS`."""

LOSS = 1.15
"""Pack no shape that takes longer than this, relative to plain, for a single row or for a prompt."""


def packing_available() -> bool:
    """Whether this torch and CPU have the packed linear ops."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack(weight: Tensor, rows: int = 8) -> Tensor:
    """`weight` in oneDNN's layout, best for about `rows` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)  # type: ignore[no-any-return]


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """The linear map of a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


@contextmanager
def fast_linears(model: nn.Module, mode: Literal["auto"] | bool) -> Iterator[frozenset[str]]:
    """Pack the model's float32 CPU linear layers for the length of the block.

    A packed layer's plain weight is dropped as soon as the packed one is there, one layer at a time, and is
    unpacked at the end. A weight that something else uses too (tied embeddings) is kept beside the packed one.

    Parameters
    ----------
    model : nn.Module
        Its plain `nn.Linear` layers are considered; others are left alone.
    mode : "auto", True or False
        Pack the shapes that are measured to be quicker, all, or none.

    Yields
    ------
    frozenset of str
        Names of the packed layers.
    """
    layers = {} if mode is False or not packing_available() else candidates(model)
    owners = _owners(model)
    packs: dict[tuple[torch.Size, bool], bool] = {}
    packed: dict[str, Callable[[], None]] = {}
    try:
        for name, layer in layers.items():
            tied = owners[id(layer.weight)] > 1
            kind = (layer.weight.shape, tied)
            if kind not in packs:
                alike = [other for other in layers.values() if other.weight.shape == layer.weight.shape]
                packs[kind] = _packs_equally(layer) and (mode is True or _gains(alike, tied))
            if packs[kind]:
                packed[name] = _pack(layer, tied)
        yield frozenset(packed)
    finally:
        for undo in packed.values():
            undo()


def override(layer: nn.Linear, product: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Let `layer` multiply by `product`; return how to undo it."""
    # An attribute of the instance comes before the class's method.
    vars(layer)["forward"] = product
    return lambda: vars(layer).pop("forward")


@torch.no_grad()
def _pack(layer: nn.Linear, tied: bool) -> Callable[[], None]:
    """Give `layer` a packed forward; return how to undo it."""
    weight, plain, bias = pack(layer.weight.detach()), layer.weight, layer.bias
    if tied:

        def quicker(x: Tensor) -> Tensor:  # both are there, and a single row gains nothing from packing
            single = x.numel() == x.shape[-1]
            return nn.functional.linear(x, plain, bias) if single else packed_linear(x, weight, bias)

        return override(layer, quicker)
    restore = override(layer, lambda x: packed_linear(x, weight, bias))
    layer.weight.data = layer.weight.new_empty(0, 0)

    guard = layer.register_state_dict_pre_hook(_refuse_to_save)

    def undo() -> None:
        guard.remove()
        restore()
        layer.weight.data = weight.to_dense()

    return undo


def _refuse_to_save(*_: object) -> None:
    raise EngineError(
        "the model's weights are packed while a reasoner uses it, and cannot be saved: close() the reasoner first, "
        "or make it with EngineConfig(fast_linears=False)"
    )


def candidates(model: nn.Module) -> dict[str, nn.Linear]:
    """The plain float32 linear layers on the CPU that nobody else has a hand in."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and "forward" not in vars(module)  # someone else's hook (dispatch, offload)
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and module.weight.layout == torch.strided
    }


def _owners(model: nn.Module) -> dict[int, int]:
    """How many modules hold each parameter."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


@torch.no_grad()
def _packs_equally(layer: nn.Linear) -> bool:
    x = torch.linspace(-1, 1, 3 * layer.in_features).view(3, -1)
    try:
        got = packed_linear(x, pack(layer.weight.detach()), layer.bias)
    except RuntimeError:
        return False
    return torch.allclose(got, nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def _gains(layers: list[nn.Linear], tied: bool) -> bool:
    """Whether packing layers of one shape pays."""
    plain = [layer.weight.detach() for layer in islice(layers, max(1, ENOUGH // layers[0].weight.nbytes))]
    packed = [pack(weight) for weight in plain]
    single, few, many, prompt = ROWS

    def time_of(rows: int) -> float:
        return _relative_time(plain, packed, rows)

    return (
        math.sqrt(time_of(few) * time_of(many)) <= GAIN
        and time_of(prompt) <= LOSS
        and (tied or time_of(single) <= LOSS)
    )


def _relative_time(plain: list[Tensor], packed: list[Tensor], rows: int) -> float:
    """Median time of one product with each of `packed`, relative to those with `plain`, taken in turn."""
    x = torch.ones(rows, plain[0].shape[-1])
    runs = 7
    if rows == ROWS[-1]:  # bound by arithmetic: less of it tells as much
        plain, packed, runs = plain[:4], packed[:4], 3
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs + 1):
        began = time.perf_counter()
        for weight in packed:
            packed_linear(x, weight, None)
        halfway = time.perf_counter()
        for weight in plain:
            nn.functional.linear(x, weight)
        taken[0].append(halfway - began)
        taken[1].append(time.perf_counter() - halfway)
    mine, others = (sorted(times[1:])[runs // 2] for times in taken)
    return mine / others


@contextmanager
def compiled_blocks(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Compile the model's feed-forward blocks for the length of the block, if `enabled`."""
    blocks = [m for name, m in model.named_modules() if enabled and name.rsplit(".", 1)[-1] in ("mlp", "feed_forward")]
    before = [vars(block).get("forward") for block in blocks]  # someone else's hook
    for block in blocks:
        vars(block)["forward"] = torch.compile(block.forward, dynamic=True)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            del vars(block)["forward"]
            if forward is not None:
                vars(block)["forward"] = forward
