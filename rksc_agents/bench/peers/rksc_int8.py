"""This package with weights in 8-bit integers, and no other shortcut."""

from __future__ import annotations

from typing import ClassVar, Literal

from rksc_agents.bench.peers.rksc import Rksc
from rksc_agents.bench.peers.system import MissingSystemError
from rksc_agents.bench.peers.weights import Weights
from rksc_agents.config import EngineConfig
from rksc_agents.errors import ConfigError
from rksc_agents.reasoner import RKSCReasoner


class RkscInt8(Rksc):
    """Lossy in its weights alone; the note tells what that changes. It has a copy of the model to itself."""

    name: ClassVar[str] = "rksc-int8"
    needs: ClassVar[Literal["plain", "lent"] | None] = "plain"

    def __init__(self) -> None:
        super().__init__()
        self._own: RKSCReasoner | None = None

    def lend(self, weights: Weights) -> RKSCReasoner:
        self.model = weights.copied_plain()
        try:
            self._own = weights.reasoner_on(self.model, EngineConfig(int8=True))
        except ConfigError as error:
            raise MissingSystemError(str(error)) from error
        return self._own

    def describe(self) -> str:
        told = self.reasoner.quantization
        assert told is not None
        return f"divergence {told.divergence:.4f}, agreement {told.agreement:.3f}"

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None
