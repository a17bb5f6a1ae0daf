"""What one forward pass computes, and which stored KV each of its tokens reads.

A pass is a list of runs: groups of rows that each add `q` tokens to their tail. All their tokens
are laid out flat, run by run and row by row; `Plan` says for every shared segment which of these
tokens read it, so that the attention reads each segment once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rksc_agents.cache.store import Segment
from rksc_agents.cache.tree import Node
from rksc_agents.model.partial import MASKED
from rksc_agents.model.protocol import RunningTail


@dataclass(slots=True)
class Scattered:
    """KV at given positions of a row, in no node: what a prompt took from another place of the tree.

    Attributes
    ----------
    segment : Segment
        The KV, one token for each of `positions`.
    positions : list of int
        Ascending.
    """

    segment: Segment
    positions: list[int]


@dataclass(slots=True)
class Run:
    """Rows that each add the same number of tokens in one pass.

    Attributes
    ----------
    tail : RunningTail
        Where the new KV goes; it has room for the new tokens.
    tokens : list of list of int
        Per row the new tokens, all rows equally many.
    bases : list of Node
        Per row the node that ends its prefix (the root for none).
    wanted : int
        After how many of each row's last new tokens the logits are needed.
    positions : list of int or None
        Where the new tokens stand, ascending, if not one after the other; for a single row whose tail is empty.
    scattered : Scattered or None
        More KV that the single row reads, each key by the tokens behind it.
    """

    tail: RunningTail
    tokens: list[list[int]]
    bases: list[Node]
    wanted: int = 1
    positions: list[int] | None = None
    scattered: Scattered | None = None

    @property
    def width(self) -> int:
        return len(self.tokens[0])


@dataclass(slots=True)
class Read:
    """Some of the pass's tokens attend to a piece of one segment.

    `rows` picks the flat tokens: None for all, a slice where they are adjacent; `skip` is the first key of the
    segment that any of them sees; `mask` is [tokens, keys] and added to the scores, or None.
    """

    segment: Segment
    rows: slice | Tensor | None
    skip: int = 0
    mask: Tensor | None = None


@dataclass(slots=True)
class OwnRead:
    """A run's rows attend to their own tails.

    `skip` is the first token of the tail that any of them sees. `past_mask` is for the piece [skip, length)
    that was there before this pass, `new_mask` for the new tokens; None where nothing but the future is hidden.
    """

    run: Run
    rows: slice
    skip: int
    past_mask: Tensor | None
    new_mask: Tensor | None


@dataclass(slots=True)
class Plan:
    """The reads of one pass, for full attention and for each sliding window."""

    runs: Sequence[Run]
    device: torch.device
    positions: list[int] = field(init=False)
    starts: list[int] = field(init=False)
    _reads: dict[int | None, list[Read]] = field(init=False, default_factory=dict)
    _own: dict[int | None, list[OwnRead]] = field(init=False, default_factory=dict)
    _readers: list[tuple[Node, list[int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.positions, self.starts = [], []
        readers: dict[int, tuple[Node, list[int]]] = {}
        for run in self.runs:
            self.starts.append(len(self.positions))
            for base in run.bases:
                first = len(self.positions)
                at = base.end + run.tail.length
                self.positions.extend(run.positions or range(at, at + run.width))
                flat = range(first, first + run.width)
                for node in base.path():
                    readers.setdefault(id(node), (node, []))[1].extend(flat)
        self._readers = list(readers.values())

    @property
    def tokens(self) -> list[int]:
        return [token for run in self.runs for row in run.tokens for token in row]

    def wanted(self) -> list[int]:
        """Flat indices of the tokens after which logits are wanted, in order."""
        return [
            start + row * run.width + at
            for start, run in zip(self.starts, self.runs, strict=True)
            for row in range(len(run.tokens))
            for at in range(run.width - run.wanted, run.width)
        ]

    def reads(self, window: int | None) -> list[Read]:
        """The reads of shared segments; each query sees the last `window` positions, itself included."""
        if window not in self._reads:
            made = (self._read(node, flat, window) for node, flat in self._readers)
            self._reads[window] = [read for read in made if read is not None] + [
                self._scattered_read(run.scattered, start, run.width, window)
                for start, run in zip(self.starts, self.runs, strict=True)
                if run.scattered is not None
            ]
        return self._reads[window]

    def _read(self, node: Node, flat: list[int], window: int | None) -> Read | None:
        assert isinstance(node.payload, Segment)
        rows: slice | Tensor | None = None
        if len(flat) < len(self.positions):
            adjacent = flat[-1] - flat[0] + 1 == len(flat)
            rows = slice(flat[0], flat[-1] + 1) if adjacent else torch.tensor(flat, device=self.device)
        if window is None:
            return Read(node.payload, rows)
        oldest = [self.positions[i] - window + 1 for i in flat]
        first = max(node.start, min(oldest))
        if first >= node.end:
            return None
        mask = self._mask(range(first, node.end), oldest) if max(oldest) > first else None
        return Read(node.payload, rows, first - node.start, mask)

    def _scattered_read(self, scattered: Scattered, start: int, width: int, window: int | None) -> Read:
        rows = slice(start, start + width)
        return Read(scattered.segment, rows, 0, self._by_age(self.positions[rows], scattered.positions, window))

    def own(self, window: int | None) -> list[OwnRead]:
        """The reads of the rows' own tails."""
        if window not in self._own:
            self._own[window] = [
                self._own_read(run, start, window) for start, run in zip(self.starts, self.runs, strict=True)
            ]
        return self._own[window]

    def _own_read(self, run: Run, start: int, window: int | None) -> OwnRead:
        n, q = run.tail.length, run.width
        rows = slice(start, start + q * len(run.tokens))
        if window is None:
            return OwnRead(run, rows, 0, None, None)
        if run.positions is not None:
            return OwnRead(run, rows, 0, None, self._by_age(run.positions, run.positions, window))
        # Positions within the tail: all rows of a run are equally far past their base.
        oldest = [n + i - window + 1 for i in range(q)]
        skip = min(max(0, oldest[0]), n)
        past_mask = self._mask(range(skip, n), oldest) if q > 1 and skip < n and oldest[-1] > skip else None
        new_mask = self._causal_mask(q, window) if q > window else None
        return OwnRead(run, rows, skip, past_mask, new_mask)

    def _mask(self, keys: range, oldest: list[int]) -> Tensor:
        at = torch.arange(keys.start, keys.stop, device=self.device)
        hidden = at[None, :] < torch.tensor(oldest, device=self.device)[:, None]
        return torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, MASKED)

    def _causal_mask(self, q: int, window: int) -> Tensor:
        return self._by_age(range(q), range(q), window)

    def _by_age(self, queries: Sequence[int], keys: Sequence[int], window: int | None) -> Tensor:
        """Hide keys that come after a query, or `window` positions and more before it."""
        at, of = (torch.tensor(positions, device=self.device) for positions in (queries, keys))
        age = at[:, None] - of[None, :]
        hidden = age < 0 if window is None else (age < 0) | (age >= window)
        return torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, MASKED)
