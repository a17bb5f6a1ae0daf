"""This package with confidence-gated early exit."""

from __future__ import annotations

from typing import ClassVar

from rksc_agents.bench.peers.rksc import Rksc


class RkscCgee(Rksc):
    """Best of n, where one decisively confident branch spares the verification of all, or verdicts settle early."""

    name: ClassVar[str] = "rksc-cgee"
    early: ClassVar[bool] = True
