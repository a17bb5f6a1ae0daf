"""transformers at its best: one prefill whose KV is expanded for the branches, and verification on their own KV."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from rksc_agents.bench.peers.meter import Meter, metered
from rksc_agents.bench.peers.plain import PlainSystem, seeded
from rksc_agents.bench.peers.system import Took
from rksc_agents.bench.peers.weights import Weights
from rksc_agents.bench.unit import Unit

Kind = Literal["dynamic", "static"]


class Generate(PlainSystem):
    """`generate` with `num_return_sequences`, a prefilled cache, and a batched verification that goes on from it.

    `generate` alone would prefill the prompt B times, so it is given the KV of all the prompt's tokens but the last.
    It computes P - 1 + B T + B (V + 1) tokens. A static cache has its room from the start and a dynamic one grows by
    copying; which one is faster is measured before the rounds.

    Parameters
    ----------
    cache : "dynamic", "static" or None, default None
        The kind of cache; None measures.
    """

    name: ClassVar[str] = "transformers"

    def __init__(self, cache: Kind | None = None) -> None:
        super().__init__()
        self.kind = cache

    def open(self, weights: Weights, unit: Unit) -> None:
        super().open(weights, unit)
        if self.kind is None:
            self.kind = self._faster(unit)
        self.note = f"{self.kind} cache"

    def _faster(self, unit: Unit) -> Kind:
        layers = DynamicCache(config=self.model.config).layers
        if any(type(layer) is not DynamicLayer for layer in layers):
            return "dynamic"  # windows and recurrent states cannot be handed from one kind to the other
        taken: dict[Kind, float] = {}
        for _ in range(2):  # the first run of each warms up
            for kind in get_args(Kind):
                self.kind = kind
                taken[kind] = self.run(unit, 0).seconds
        return min(taken, key=taken.__getitem__)

    def run(self, unit: Unit, seed: int) -> Took:
        with metered(self.model) as meter, seeded(seed, self.model.device):
            began = meter.now()
            prompt = self.tensor([list(unit.prompt)])
            cache = self._prefilled(prompt, unit, meter)
            meter.mark()
            done = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                cache=cache,
                generation_config=self.generation(unit, unit.branches),
            )
            written = meter.now()
            asked = self.tensor([list(unit.verification)] * unit.branches)
            # the last token of each branch has no KV yet
            more = torch.cat([done.sequences[:, -1:], asked], 1)
            scores = self.scores(self.last_logits(more, cache=cache, use_cache=True), unit)
            return self.took(meter, began, written, scores)

    def _prefilled(self, prompt: torch.Tensor, unit: Unit, meter: Meter) -> Cache:
        """The KV of the prompt without its last token, once for each branch."""
        once = DynamicCache(config=self.model.config)
        if prompt.shape[1] > 1:
            self.last_logits(prompt[:, :-1], cache=once, use_cache=True)
        if self.kind == "dynamic":
            once.batch_repeat_interleave(unit.branches)
            return once
        cache = StaticCache(config=self.model.config, max_cache_len=unit.length)
        for index, layer in enumerate(once.layers):
            assert isinstance(layer, DynamicLayer)
            if layer.keys is not None and layer.values is not None:
                keys, values = (kv.expand(unit.branches, -1, -1, -1) for kv in (layer.keys, layer.values))
                cache.update(keys, values, index)
            layer.keys = layer.values = None  # so that one layer at most is held twice
        return cache
