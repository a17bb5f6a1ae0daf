"""Replays settings of early exit on observed problems and counts what they err and save."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rksc_agents.errors import ConfigError
from rksc_agents.verify.decisions import OFF, Decide, Observed, Setting, outcome


@dataclass(frozen=True, slots=True)
class Run:
    """One setting on many problems; layers are shares of the model's, summed over branches."""

    losses: list[bool]
    skipped: list[bool]
    branches: list[int]
    layers: list[float]

    @property
    def errors(self) -> int:
        return sum(self.losses)

    @property
    def skip_rate(self) -> float:
        return sum(self.skipped) / len(self.skipped)

    @property
    def risk_among_skipped(self) -> float | None:
        among = [loss for loss, skipped in zip(self.losses, self.skipped, strict=True) if skipped]
        return sum(among) / len(among) if among else None

    @property
    def layers_saved(self) -> float:
        verified = sum(count for count, skipped in zip(self.branches, self.skipped, strict=True) if not skipped)
        return 1.0 - math.fsum(self.layers) / verified if verified else 0.0

    @property
    def work_saved(self) -> float:
        return 1.0 - math.fsum(self.layers) / sum(self.branches)


class Bench:
    """Problems with the decisions that full verification makes."""

    def __init__(
        self,
        problems: Sequence[Observed],
        layers: Sequence[int],
        errors: Sequence[float],
        total_layers: int,
        decide: Decide,
    ) -> None:
        if any(not 1 <= layer < total_layers for layer in layers):
            raise ConfigError(
                f"layers = {tuple(layers)!r} of a model of {total_layers}: exits lie before its last layer"
            )
        self._problems, self._layers, self._errors = problems, layers, errors
        self._total, self._decide = total_layers, decide
        self._full = [outcome(problem, OFF, layers, errors, decide).decision for problem in problems]

    def run(self, setting: Setting) -> Run:
        results = [outcome(problem, setting, self._layers, self._errors, self._decide) for problem in self._problems]
        return Run(
            losses=[result.decision != full for result, full in zip(results, self._full, strict=True)],
            skipped=[result.skipped for result in results],
            branches=[len(result.layers_run) for result in results],
            layers=[
                math.fsum(1.0 if layers is None else layers / self._total for layers in result.layers_run)
                for result in results
            ],
        )
