"""The paper's baseline: nothing is shared between branches, and verification computes everything again."""

from __future__ import annotations

from typing import ClassVar

import torch

from rksc_agents.bench.peers.meter import metered
from rksc_agents.bench.peers.plain import PlainSystem, seeded
from rksc_agents.bench.peers.system import Took
from rksc_agents.bench.unit import Unit


class NoKV(PlainSystem):
    """Prefills B copies of the prompt in one batch, decodes them with a cache each, and verifies by a new prefill.

    It computes B P + B (T - 1) + B (P + T + V) tokens.
    """

    name: ClassVar[str] = "no-kv"

    def run(self, unit: Unit, seed: int) -> Took:
        with metered(self.model) as meter, seeded(seed, self.model.device):
            began = meter.now()
            ids = self.tensor([list(unit.prompt)] * unit.branches)
            meter.mark()
            done = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=self.generation(unit, 1)
            )
            written = meter.now()
            asked = self.tensor([list(unit.verification)] * unit.branches)
            whole = torch.cat([done.sequences, asked], 1)
            del done  # its cache is of no use to a prefill from nothing
            scores = self.scores(self.last_logits(whole, use_cache=False), unit)
            return self.took(meter, began, written, scores)
