"""Counting what goes through a model, the same way for every system that runs it in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache

from rksc_agents.model.private_runner import cache_bytes


@dataclass(slots=True, eq=False)
class Meter:
    """What was counted so far.

    Attributes
    ----------
    tokens : int
        Tokens that went through the model's layers.
    passes : int
        Calls of the model.
    kv_bytes : int
        Most bytes that a cache of transformers held after a pass.
    first_at : float or None
        When the pass had ended that :meth:`mark` asked about.
    """

    device: torch.device
    tokens: int = 0
    passes: int = 0
    kv_bytes: int = 0
    first_at: float | None = None
    _marked: bool = False

    def now(self) -> float:
        """Seconds, after what a GPU still does."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def mark(self) -> None:
        """Note the end of the next pass as `first_at`."""
        self._marked = True

    def began(self, ids: Tensor) -> None:
        """Note a pass that begins."""
        self.tokens += ids.numel()
        self.passes += 1

    def ended(self, cache: object) -> None:
        """Note a pass that has ended, with the cache that it filled."""
        if isinstance(cache, (DynamicCache, StaticCache)):
            self.kv_bytes = max(self.kv_bytes, cache_bytes(cache))
        if self._marked:
            self.first_at, self._marked = self.now(), False


@contextmanager
def metered(model: PreTrainedModel) -> Iterator[Meter]:
    """Count every call of `model` in the block."""
    meter = Meter(model.device)

    def before(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
        meter.began(given["input_ids"])

    def after(_: nn.Module, __: tuple[Any, ...], ___: dict[str, Any], out: Any) -> None:
        meter.ended(getattr(out, "cache", None))

    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),  # a pass that ends early has no end to hook
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield meter
    finally:
        for hook in hooks:
            hook.remove()
