"""This package without any shortcut: shared KV, and every branch verified at full depth on its own KV."""

from __future__ import annotations

from typing import ClassVar

from rksc_agents.bench.peers.ours import OwnSystem
from rksc_agents.bench.unit import Unit
from rksc_agents.reasoning import BestOfN, Strategy
from rksc_agents.verify.self_verifier import SelfVerifier


class Rksc(OwnSystem):
    """Best of n by the model's own verdicts, exactly.

    It computes P + B (T - 1) + B (V + 1) tokens.
    """

    name: ClassVar[str] = "rksc"

    def strategy(self, unit: Unit) -> Strategy:
        return BestOfN(branches=unit.branches, score="verifier", verifier=SelfVerifier())
