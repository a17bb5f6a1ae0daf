"""Ending a pass before the last layer: what decides, and what it gets to see."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Glimpse(Protocol):
    """What a layer holds for the last tokens of a pass's rows; each part is computed when it is asked for."""

    @property
    def raw(self) -> Tensor:
        """[rows, width], float32: the layer's output."""
        ...

    @property
    def hidden(self) -> Tensor:
        """[rows, width], float32: the same after the model's final norm."""
        ...

    @property
    def logits(self) -> Tensor:
        """[rows, targets], float32: what the model's head makes of it, for the target tokens only."""
        ...


class Watch(Protocol):
    """Looks at the last tokens of a pass's rows after some layers, and may end the pass.

    Attributes
    ----------
    layers : collection of int
        After which layers to look, counted from 1.
    """

    @property
    def layers(self) -> Collection[int]: ...

    def look(self, layer: int, glimpse: Glimpse) -> bool:
        """Return whether the pass may end here, after `layer` layers."""
        ...


@dataclass(slots=True)
class Trace:
    """What a watch saw of one row.

    Attributes
    ----------
    log_odds : dict of int to float
        By layer, what the layer made of the verdict.
    states : dict of int to Tensor
        By layer, the hidden state [width]; empty unless the watch keeps them.
    settled : int or None
        The layer at which the row settled.
    """

    log_odds: dict[int, float] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)
    settled: int | None = None


class ExitRule(Protocol):
    """When a verdict has settled. Rows with equal rules share a pass, so a rule can be compared and hashed."""

    def about(self, zero: float) -> ExitRule:
        """The same rule for verdicts that change sides at these log-odds of the first group."""
        ...

    def watch(self, rows: int, groups: tuple[tuple[int, ...], ...]) -> Settling:
        """A watch over one pass of `rows` rows.

        Parameters
        ----------
        rows : int
            Rows of the pass.
        groups : tuple of tuple of int
            Positions of each group of target tokens among the logits: YES forms first, then NO forms.
        """
        ...


class Settling(Watch, Protocol):
    """A watch that remembers what it saw of each row."""

    @property
    def traces(self) -> Sequence[Trace]:
        """One for each row."""
        ...
