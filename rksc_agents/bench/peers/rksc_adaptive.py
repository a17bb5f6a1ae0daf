"""This package with everything that may stop early."""

from __future__ import annotations

from typing import ClassVar

from rksc_agents.bench.peers.ours import OwnSystem
from rksc_agents.bench.peers.weights import Weights
from rksc_agents.bench.unit import Unit
from rksc_agents.reasoning import SelfConsistency, Strategy
from rksc_agents.verify.self_verifier import SelfVerifier


class RkscAdaptive(OwnSystem):
    """A vote by verdicts in which branches end early: with the model's end token, and when they are too unsure.

    T is the most that a branch may write. A quarter of the branches, at least two, run first and set the confidence
    under which later ones are ended (DeepConf); where there are fewer than three branches, all run. Branches that were
    ended so are not verified, and a decisively confident one spares the rest. A vote by verdicts waits for all
    verdicts, so it is never decided before.
    """

    name: ClassVar[str] = "rksc-adaptive"
    early: ClassVar[bool] = True
    ignores_eos: ClassVar[bool] = False

    def open(self, weights: Weights, unit: Unit) -> None:
        super().open(weights, unit)
        warmup = _warmup(unit)
        self.note += ", no warm-up" if warmup is None else f", {warmup} branches warm up"

    def strategy(self, unit: Unit) -> Strategy:
        return SelfConsistency(
            branches=unit.branches, vote="verifier", verifier=SelfVerifier(), warmup=_warmup(unit), stop=None
        )


def _warmup(unit: Unit) -> int | None:
    return max(2, unit.branches // 4) if unit.branches > 2 else None
