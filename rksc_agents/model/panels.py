"""Linear layers as a batched product over pieces of their weight, for a handful of rows on the CPU.

Between 2 and some 12 rows a plain product waits for memory and yet does not stream the weight at the
memory's speed. As a batch of products over 8 pieces of the same weight it gets nearer. That shows only when
weights come from memory, so it is measured over more of them than a cache can hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from rksc_agents.model.linear import candidates, override

PANELS = 8
"""Pieces that a weight is multiplied in."""

ROWS = range(2, 13)
"""Rows for which it is done; a single row and larger batches go the plain way."""

GAIN = 0.98
"""Use panels if a pass over the weights takes at most this, relative to plain."""

ENOUGH = 2**30
"""Bytes of weights to measure with: more than a cache holds."""


def panelled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear map of `weight`; its number of rows is a multiple of `PANELS`."""
    width = x.shape[-1]
    rows = x.numel() // width
    if rows not in ROWS:
        return nn.functional.linear(x, weight, bias)
    pieces = weight.view(PANELS, -1, width).transpose(1, 2)
    out = torch.bmm(x.reshape(1, rows, width).expand(PANELS, rows, width), pieces)
    out = out.transpose(0, 1).reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


@contextmanager
def panelled_linears(model: nn.Module, mode: Literal["auto"] | bool) -> Iterator[frozenset[str]]:
    """Let the float32 CPU linear layers that are still plain multiply in panels, for the length of the block.

    Parameters
    ----------
    model : nn.Module
        Its weights stay as they are.
    mode : "auto", True or False
        With "auto", where a measurement says that it is quicker; else not.

    Yields
    ------
    frozenset of str
        Names of the layers that were changed.
    """
    layers = {name: layer for name, layer in candidates(model).items() if layer.out_features % PANELS == 0}
    if mode != "auto" or not _pays(list(layers.values())):
        layers = {}
    with ExitStack() as undo:
        for layer in layers.values():
            undo.callback(override(layer, partial(panelled_linear, weight=layer.weight, bias=layer.bias)))
        yield frozenset(layers)


@torch.no_grad()
def _pays(layers: list[nn.Linear], rows: int = 8, runs: int = 7) -> bool:
    weights: list[Tensor] = []
    for layer in layers:
        if sum(weight.nbytes for weight in weights) < ENOUGH:
            weights.append(layer.weight.detach())
    if sum(weight.nbytes for weight in weights) < ENOUGH // 8:
        return False  # a model this small stays in the cache
    inputs = {weight.shape[1]: torch.ones(1, rows, weight.shape[1]) for weight in weights}
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs + 1):
        for times in taken:
            product = panelled_linear if times is taken[0] else nn.functional.linear
            began = time.perf_counter()
            for weight in weights:
                product(inputs[weight.shape[1]], weight, None)
            times.append(time.perf_counter() - began)
    panelled, plain = (sorted(times[1:])[runs // 2] for times in taken)
    return panelled <= GAIN * plain
