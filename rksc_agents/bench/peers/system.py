"""What a system is: it is opened, does the unit once per run, and is closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from rksc_agents.bench.peers.weights import Weights
from rksc_agents.bench.unit import Unit
from rksc_agents.errors import RKSCError


class MissingSystemError(RKSCError):
    """A system cannot run here; the message says what it lacks and how to get it."""


@dataclass(frozen=True, slots=True)
class Took:
    """What one run took.

    Attributes
    ----------
    seconds : float
        From the prompt to the last verdict.
    scores : tuple of float or None
        P(YES) / (P(YES) + P(NO)) of each branch; None where verification was skipped.
    tokens_computed, passes : int or None
        Tokens that went through the model's layers, padding included, and calls of the model; None where unknown.
    kv_bytes : int or None
        Most bytes of KV held after a pass; one layer's worth of scratch memory is not counted.
    prefill_s, decode_s, verify_s : float or None
        Parts of `seconds`.
    """

    seconds: float
    scores: tuple[float | None, ...]
    tokens_computed: int | None = None
    kv_bytes: int | None = None
    passes: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    verify_s: float | None = None

    @property
    def verified(self) -> int:
        """Branches that were verified."""
        return sum(score is not None for score in self.scores)


class System(ABC):
    """Base of all systems.

    Attributes
    ----------
    name : str
        As it is typed.
    needs : "plain", "lent" or None
        What it takes of :class:`~rksc_agents.bench.peers.weights.Weights`: the model as transformers loads it, the
        model that a reasoner borrows, or neither.
    note : str
        What was chosen for it, to stand beside its result; empty where there is nothing to tell.
    """

    name: ClassVar[str]
    needs: ClassVar[Literal["plain", "lent"] | None] = None

    def __init__(self) -> None:
        self.note = ""

    @abstractmethod
    def open(self, weights: Weights, unit: Unit) -> None:
        """Make everything ready that is not to be timed.

        Raises
        ------
        MissingSystemError
            If it cannot run here.
        """

    @abstractmethod
    def run(self, unit: Unit, seed: int) -> Took:
        """Do the unit once, from nothing: no KV of an earlier run is used."""

    def close(self) -> None:  # noqa: B027 - some hold nothing
        """Give back what :meth:`open` took. Closing what was never opened does nothing."""
