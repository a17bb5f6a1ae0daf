"""The tensors behind the tree: sealed segments, and the growing tails of running rows.

A `Segment` is what a tree node stores: per attention layer the keys and values of a run of
tokens, and for models with recurrent or convolution states a snapshot of them at the run's end. A
`Tail` is what a group of rows that run in step writes to; a finished row's part of it is sealed
into a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rksc_agents.cache.budget import Budget


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one attention layer, per token and row."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * (self.key_width + self.value_width) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """What one token, and one row, takes.

    Attributes
    ----------
    layers : dict of int to LayerShape
        The attention layers that store KV, by their index in the model.
    state_bytes : int
        Bytes of all recurrent and convolution states of one row; 0 for pure attention.
    """

    layers: dict[int, LayerShape]
    state_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token, over all layers."""
        return sum(shape.token_bytes for shape in self.layers.values())


KV = tuple[Tensor, Tensor]
State = list[Tensor]
"""Recurrent and convolution states, each with the rows as its first dimension."""


def _state_bytes(state: State | None) -> int:
    return sum(t.nbytes for t in state) if state is not None else 0


@dataclass(slots=True)
class Segment:
    """Sealed KV of a run of tokens.

    Attributes
    ----------
    kv : dict of int to (keys, values)
        Per attention layer, shapes [heads, tokens, key_width] and [heads, tokens, value_width].
    state : list of Tensor or None
        States after the run's last token, one row each.
    """

    kv: dict[int, KV]
    state: State | None = None

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.kv.values()) + _state_bytes(self.state)

    def split(self, at: int) -> tuple[Segment, Segment]:
        """Cut after `at` tokens. Each part owns its memory, so that freeing one frees its bytes."""
        head, tail = Segment({}), Segment({}, self.state)
        for layer in list(self.kv):
            k, v = self.kv.pop(layer)  # popped, so that only one layer is held twice at a time
            head.kv[layer] = (k[:, :at].clone(), v[:, :at].clone())
            tail.kv[layer] = (k[:, at:].clone(), v[:, at:].clone())
        return head, tail

    @classmethod
    def merged(cls, parts: Sequence[tuple[Segment, Sequence[int]]]) -> Segment:
        """One segment out of several, each with the place of every token of it; together they fill all places."""
        total = sum(len(places) for _, places in parts)
        made = cls({})
        for layer in list(parts[0][0].kv):
            pieces = [(part.kv.pop(layer), places) for part, places in parts]
            k, v = pieces[0][0]
            keys, values = k.new_empty(k.shape[0], total, k.shape[2]), v.new_empty(v.shape[0], total, v.shape[2])
            for (some_k, some_v), places in pieces:
                at = torch.tensor(places, dtype=torch.long, device=k.device)
                keys[:, at], values[:, at] = some_k, some_v
            made.kv[layer] = (keys, values)
        return made


class Tail:
    """KV of a group of rows that run in step: all are `length` tokens past their base.

    Parameters
    ----------
    layout : Layout
        Shapes per layer.
    budget : Budget
        Counts the bytes; growth settles what was promised first.
    rows : int
        Rows in the group.
    most : int
        Tokens a row will hold at most.
    state : list of Tensor or None
        Recurrent states at the rows' base, copied for each row; None at the root.
    promised : int
        Bytes set aside for this tail in the budget.
    """

    GROWTH = 16  # tokens; a finer step copies more often, a coarser one holds more unused bytes

    def __init__(
        self, layout: Layout, budget: Budget, rows: int, most: int, *, state: State | None = None, promised: int = 0
    ) -> None:
        self.layout = layout
        self.budget = budget
        self.rows = rows
        self.most = most
        self.state = state
        self.length = 0
        self.capacity = 0
        self.kv: dict[int, KV] = {
            index: (
                torch.empty(rows, s.heads, 0, s.key_width, dtype=s.dtype, device=s.device),
                torch.empty(rows, s.heads, 0, s.value_width, dtype=s.dtype, device=s.device),
            )
            for index, s in layout.layers.items()
        }
        self._promised = promised
        self._take(_state_bytes(state))

    @staticmethod
    def most_bytes(layout: Layout, rows: int, most: int) -> int:
        """Bytes that a tail of `rows` rows and `most` tokens takes at its largest."""
        return rows * (most * layout.token_bytes + layout.state_bytes)

    @property
    def nbytes(self) -> int:
        return self.rows * self.capacity * self.layout.token_bytes + _state_bytes(self.state)

    def _take(self, nbytes: int) -> None:
        settled = min(nbytes, self._promised)
        self._promised -= settled
        self.budget.settle(settled)
        self.budget.hold(nbytes)

    def growth(self, tokens: int) -> int:
        """Bytes that making room for `tokens` more tokens per row takes."""
        return self.rows * (self._capacity_for(tokens) - self.capacity) * self.layout.token_bytes

    def _capacity_for(self, tokens: int) -> int:
        need = self.length + tokens
        if need <= self.capacity:
            return self.capacity
        step = max(self.GROWTH, self.capacity // 8)
        return max(need, min(-(-need // step) * step, self.most))

    def grow(self, tokens: int) -> None:
        """Make room for `tokens` more tokens per row."""
        capacity = self._capacity_for(tokens)
        if capacity == self.capacity:
            return
        nbytes, self.capacity = self.growth(tokens), capacity
        self._take(nbytes)
        for layer, (k, v) in self.kv.items():
            self.kv[layer] = (_regrown(k, self.length, capacity), _regrown(v, self.length, capacity))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the new tokens' keys and values of a layer, shapes [rows, heads, new, width]."""
        k, v = self.kv[layer]
        stop = self.length + keys.shape[2]
        k[:, :, self.length : stop] = keys
        v[:, :, self.length : stop] = values

    def part(self, sealed: Sequence[int], kept: Sequence[int]) -> list[Segment]:
        """Seal the rows `sealed`, keep running the rows `kept`, drop all others.

        Returns the segments in the order of `sealed`; their bytes are counted as held.
        """
        before = self.nbytes
        segments = [Segment({}) for _ in sealed]
        whole = self.rows == 1 and self.capacity == self.length  # a finished prefill: hand over, copy nothing
        for layer, (k, v) in self.kv.items():
            for segment, row in zip(segments, sealed, strict=True):
                keys, values = k[row, :, : self.length], v[row, :, : self.length]
                segment.kv[layer] = (keys, values) if whole else (keys.clone(), values.clone())
            self.kv[layer] = (_rows(k, kept), _rows(v, kept))
        if self.state is not None:
            for segment, row in zip(segments, sealed, strict=True):
                segment.state = [t[row : row + 1].clone() for t in self.state]
            self.state = [_rows(t, kept) for t in self.state]
        promised = self._promised * len(kept) // self.rows
        self.rows = len(kept)
        self.budget.free(before - self.nbytes)
        self.budget.settle(self._promised - promised)
        self._promised = promised
        for segment in segments:
            self.budget.hold(segment.nbytes)
        return segments

    def close(self) -> None:
        """Give everything back."""
        self.budget.free(self.nbytes)
        self.budget.settle(self._promised)
        self._promised = self.rows = self.capacity = self.length = 0
        self.kv = {}
        self.state = None

    def set_state(self, state: State) -> None:
        """Replace the rows' recurrent states after a pass."""
        if self.state is None:
            self._take(_state_bytes(state))
        self.state = state


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, torch.tensor(rows, dtype=torch.long, device=tensor.device))


def _regrown(old: Tensor, length: int, capacity: int) -> Tensor:
    new = old.new_empty(old.shape[0], old.shape[1], capacity, old.shape[3])
    new[:, :, :length] = old[:, :, :length]
    return new
