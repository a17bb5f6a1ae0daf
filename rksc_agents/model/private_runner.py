"""The fallback for models the tree cannot hold: every branch keeps a cache of its own.

A node stores the model's whole cache after its path, and a fork copies it. Nothing is shared
between branches but the prefill, which is still done once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from rksc_agents.cache.budget import Budget
from rksc_agents.cache.tree import Node, Tree
from rksc_agents.errors import UnsupportedModelError
from rksc_agents.model.borrowed import BorrowedModel
from rksc_agents.model.exits import Watch
from rksc_agents.model.plan import Run
from rksc_agents.model.rotation import Rotation


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors that a transformers cache holds."""
    return sum(t.nbytes for layer in cache.layers for t in _tensors(vars(layer)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.ndim > 1:
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


class PrivateSegment:
    """A model's cache after a whole path."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.nbytes = cache_bytes(cache)

    def split(self, at: int) -> tuple[PrivateSegment, PrivateSegment]:
        raise AssertionError("a private cache is whole or nothing")


class PrivateTail:
    """Running rows, each with its own cache; the counterpart of :class:`rksc_agents.cache.store.Tail`."""

    def __init__(self, budget: Budget, caches: list[Cache], token_bytes: int, promised: int) -> None:
        self.budget = budget
        self.caches = caches
        self.length = 0
        self.nbytes = 0
        self._token_bytes = token_bytes
        self._promised = promised
        self.count()

    @property
    def rows(self) -> int:
        return len(self.caches)

    def growth(self, tokens: int) -> int:
        return self.rows * tokens * self._token_bytes

    def grow(self, tokens: int) -> None:
        """The caches grow by themselves; their bytes are counted after the pass."""

    def count(self) -> None:
        """Bring the budget up to date with what the caches hold."""
        now = sum(map(cache_bytes, self.caches))
        if now >= self.nbytes:
            settled = min(now - self.nbytes, self._promised)
            self._promised -= settled
            self.budget.settle(settled)
            self.budget.hold(now - self.nbytes)
        else:
            self.budget.free(self.nbytes - now)
        self.nbytes = now

    def part(self, sealed: Sequence[int], kept: Sequence[int]) -> list[PrivateSegment]:
        segments = [PrivateSegment(self.caches[row]) for row in sealed]
        promised = self._promised * len(kept) // len(self.caches)
        self.budget.settle(self._promised - promised)
        self._promised = promised
        self.caches = [self.caches[row] for row in kept]
        self.count()
        for segment in segments:
            self.budget.hold(segment.nbytes)
        return segments

    def close(self) -> None:
        self.caches = []
        self.count()
        self.budget.settle(self._promised)
        self._promised = 0


class PrivateRunner(BorrowedModel):
    """Runs any causal language model, one row at a time.

    The interface is that of :class:`rksc_agents.model.runner.TreeRunner`.
    """

    splittable = False
    chunked = False
    shares = False
    retryable = False  # a row's own cache may have grown before another row failed
    readout = None

    def _prepare(self) -> None:
        # Purely recurrent models take a mask for padding only, of the new tokens' length.
        self._masked = any(
            isinstance(layer, CacheLayerMixin) for layer in DynamicCache(config=self.model.config).layers
        )
        sizes = [self._cache_bytes_after(n) for n in (1, 2)]
        self._token_bytes = sizes[1] - sizes[0]
        self._fixed_bytes = sizes[0] - self._token_bytes

    @property
    def token_bytes(self) -> int:
        return self._token_bytes

    @property
    def depth(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    @torch.inference_mode()
    def _cache_bytes_after(self, tokens: int) -> int:
        cache = DynamicCache(config=self.model.config)
        self._call([0] * tokens, 0, cache)
        return cache_bytes(cache)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Nothing to switch: the model runs as it is."""
        yield

    def tree(self) -> Tree:
        return Tree(self.budget, splittable=False)

    def most_bytes(self, ends: Sequence[int], most: int) -> int:
        return sum((end + most) * self._token_bytes + self._fixed_bytes for end in ends)

    def tail(self, bases: Sequence[Node], most: int, promised: int) -> PrivateTail:
        caches = [self._copy(base) for base in bases]
        return PrivateTail(self.budget, caches, self._token_bytes, promised)

    def _copy(self, base: Node) -> Cache:
        if base.payload is None:
            return DynamicCache(config=self.model.config)
        assert isinstance(base.payload, PrivateSegment)
        return copy.deepcopy(base.payload.cache)

    @torch.inference_mode()
    def forward(self, runs: Sequence[Run]) -> Tensor:
        logits = []
        for run in runs:
            assert isinstance(run.tail, PrivateTail)
            for cache, base, tokens in zip(run.tail.caches, run.bases, run.tokens, strict=True):
                at = base.end + run.tail.length
                # Not every model can continue a recurrent state by several tokens at once.
                pieces = [tokens] if at == 0 else [[token] for token in tokens]
                found = [self._call(piece, at + i, cache, run.wanted) for i, piece in enumerate(pieces)]
                if run.wanted:
                    logits.append(torch.cat(found)[-run.wanted :])
                self.passes += len(pieces)
                self.tokens_computed += len(tokens)
            run.tail.length += run.width
            run.tail.count()
        return torch.cat(logits) if logits else torch.empty(0)

    def rotation(self) -> Rotation:
        """Raises UnsupportedModelError: a cache per branch takes nothing from others."""
        raise UnsupportedModelError(
            f"{type(self.model).__name__} runs with a cache per branch, which takes no KV from others; use mode exact"
        )

    def forward_watched(self, runs: Sequence[Run], watch: Watch, targets: Sequence[int]) -> tuple[Tensor, int]:
        """Raises UnsupportedModelError: rows run one after the other, so no pass can end early for all of them."""
        raise UnsupportedModelError(
            f"{type(self.model).__name__} runs with a cache per branch, so no pass can end early: switch the layer "
            "exit off (exit='strict' or 'off')"
        )

    def _call(self, tokens: list[int], at: int, cache: Cache, wanted: int = 1) -> Tensor:
        """Compute tokens and return the logits [at most `wanted`, vocabulary] after the last of them."""
        arguments: dict[str, Any] = {"input_ids": torch.tensor([tokens], device=self.device), "use_cache": True}
        if "position_ids" in self._takes:
            arguments["position_ids"] = torch.arange(at, at + len(tokens), device=self.device)[None]
        if self._masked and "attention_mask" in self._takes:  # ALiBi models build their biases from it
            arguments["attention_mask"] = torch.ones(1, at + len(tokens), dtype=torch.long, device=self.device)
        logits: Tensor = self.model(**arguments, cache=cache).logits[0]
        return logits[max(0, len(tokens) - wanted) :]
