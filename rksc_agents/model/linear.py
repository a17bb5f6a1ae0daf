"""Faster linear layers on the CPU: weights prepacked for oneDNN, where a quick measurement says it pays.

A few rows per step leave a matrix product bound by memory, and the layout of the weights decides how
near it gets to the memory's speed. The packing ops are private to torch, so they are used behind a
feature check and an equality test, with the plain layer as the fallback.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

ROWS = (1, 8, 32)
"""Batch sizes at which packed and plain are compared: one branch, the default, several requests."""

GAIN = 0.85
"""Pack a shape if its time, relative to plain and averaged over `ROWS`, is at most this."""


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
def packed_linears(model: nn.Module, mode: Literal["auto"] | bool) -> Iterator[tuple[str, ...]]:
    """Pack the model's float32 CPU linear layers for the length of the block.

    The plain weight is dropped as soon as it is packed, one layer at a time, and unpacked at the end; a weight
    that something else uses too (tied embeddings) is kept beside the packed one.

    Parameters
    ----------
    model : nn.Module
        Its plain `nn.Linear` layers are considered; others are left alone.
    mode : "auto", True or False
        Pack the shapes that are measured to be faster, all, or none.

    Yields
    ------
    tuple of str
        Names of the packed layers.
    """
    layers = {} if mode is False or not packing_available() else _candidates(model)
    chosen: dict[tuple[int, ...], bool] = {}
    packed: dict[str, tuple[nn.Linear, Tensor | None]] = {}
    owners = _owners(model)
    try:
        for name, layer in layers.items():
            shape = tuple(layer.weight.shape)
            if shape not in chosen:
                alike = [other for other in layers.values() if tuple(other.weight.shape) == shape]
                chosen[shape] = _packs_equally(layer) and (mode is True or _gain(alike) <= GAIN)
            if chosen[shape]:
                tied = owners[id(layer.weight)] > 1
                packed[name] = (layer, _install(layer, tied))
        yield tuple(packed)
    finally:
        for layer, weight in packed.values():
            del vars(layer)["forward"]
            if weight is not None:
                layer.weight.data = weight.to_dense()


@torch.no_grad()
def _install(layer: nn.Linear, tied: bool) -> Tensor | None:
    """Give `layer` a packed forward; return the packed weight if the plain one was dropped."""
    weight = pack(layer.weight.detach())
    bias = layer.bias
    if tied:  # both are there, so each batch takes the quicker: a single row gains nothing from packing
        plain = layer.weight

        def forward(x: Tensor) -> Tensor:
            if x.numel() == x.shape[-1]:
                return nn.functional.linear(x, plain, bias)
            return packed_linear(x, weight, bias)

    else:

        def forward(x: Tensor) -> Tensor:
            return packed_linear(x, weight, bias)

        layer.weight.data = layer.weight.new_empty(0, 0)
    vars(layer)["forward"] = forward  # an attribute of the instance comes before the class's method
    return None if tied else weight


def _candidates(model: nn.Module) -> dict[str, nn.Linear]:
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
def _gain(layers: list[nn.Linear], most: int = 4) -> float:
    """Packed time over plain time, as the geometric mean over `ROWS`.

    Several layers are timed in turn, because in a step every weight comes from memory, not from a cache.
    """
    some = layers[:most]
    packed = [pack(layer.weight.detach()) for layer in some]
    ratios: list[float] = []
    for rows in ROWS:
        x = torch.ones(rows, some[0].in_features)

        def plain(x: Tensor = x) -> None:
            for layer in some:
                nn.functional.linear(x, layer.weight, layer.bias)

        def fast(x: Tensor = x) -> None:
            for layer, weight in zip(some, packed, strict=True):
                packed_linear(x, weight, layer.bias)

        ratios.append(_ratio_of_medians(fast, plain))
    return math.prod(ratios) ** (1.0 / len(ratios))


def _ratio_of_medians(a: Callable[[], None], b: Callable[[], None], runs: int = 5) -> float:
    """Median time of `a` over that of `b`, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs + 1):
        for function, taken in zip((a, b), times, strict=True):
            began = time.perf_counter()
            function()
            taken.append(time.perf_counter() - began)
    first, second = (sorted(taken[1:])[runs // 2] for taken in times)
    return first / second


@contextmanager
def compiled_blocks(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Compile the model's feed-forward blocks for the length of the block, if `enabled`."""
    blocks = [m for name, m in model.named_modules() if enabled and name.rsplit(".", 1)[-1] in ("mlp", "feed_forward")]
    for block in blocks:
        vars(block)["forward"] = torch.compile(block.forward, dynamic=True)
    try:
        yield
    finally:
        for block in blocks:
            del vars(block)["forward"]
