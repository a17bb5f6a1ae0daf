"""What the systems that run transformers itself have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig

from rksc_agents.bench.peers.meter import Meter
from rksc_agents.bench.peers.system import System, Took
from rksc_agents.bench.peers.weights import Weights
from rksc_agents.bench.unit import Unit
from rksc_agents.verify.decisions import sigmoid


class PlainSystem(System):
    """Runs the plain model with sdpa attention, without gradients, drawing from the whole vocabulary."""

    needs: ClassVar[Literal["plain", "lent"] | None] = "plain"

    model: Any  # a PreTrainedModel, whose attributes are typed as tensors

    def open(self, weights: Weights, unit: Unit) -> None:
        self.model = weights.plain
        self._before = self.model.config._attn_implementation, self.model.generation_config
        self.model.set_attn_implementation("sdpa")
        self.model.generation_config = GenerationConfig()  # `generate` would fill what is left out from the model's own

    def close(self) -> None:
        if hasattr(self, "_before"):
            attention, generation = self._before
            self.model.set_attn_implementation(attention)
            self.model.generation_config = generation
            del self._before

    def generation(self, unit: Unit, count: int) -> GenerationConfig:
        """The unit's sampling for `count` branches of each row, without an end token."""
        sampling = unit.sampling
        return GenerationConfig(
            do_sample=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_new_tokens=unit.tokens,
            num_return_sequences=count,
            pad_token_id=0,
            return_dict_in_generate=True,
        )

    def tensor(self, rows: list[list[int]]) -> Tensor:
        """Token ids on the model's device."""
        return torch.tensor(rows, device=self.model.device)

    def last_logits(self, ids: Tensor, **given: Any) -> Tensor:
        """Logits [rows, vocabulary] after the last token of each row; the head computes no others where it can."""
        if self.model._supports_logits_to_keep():
            given["logits_to_keep"] = 1
        logits: Tensor = self.model(input_ids=ids, **given).logits
        return logits[:, -1].float()

    @staticmethod
    def took(meter: Meter, began: float, written: float, scores: tuple[float, ...]) -> Took:
        """What a run took that began, had written its branches, and has its verdicts now."""
        ended = meter.now()
        assert meter.first_at is not None
        return Took(
            seconds=ended - began,
            scores=scores,
            tokens_computed=meter.tokens,
            kv_bytes=meter.kv_bytes,
            passes=meter.passes,
            prefill_s=meter.first_at - began,
            decode_s=written - meter.first_at,
            verify_s=ended - written,
        )

    @staticmethod
    def scores(logits: Tensor, unit: Unit) -> tuple[float, ...]:
        """P(YES) / (P(YES) + P(NO)) of each row."""
        yes, no = (logits[:, list(group)].logsumexp(-1) for group in unit.verdicts)
        return tuple(map(sigmoid, (yes - no).tolist()))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """`generate` draws from the global generator: it is seeded in the block, and as it was afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        yield
