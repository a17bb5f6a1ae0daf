"""CGEE level 2: stopping a verification pass at the layer where its verdict has settled.

Both rules look at the rows' last tokens, after the model's final norm. `RawExit` reads the model's head there, from the
middle layer on, as the paper does; on small models it says the same word at every layer, whatever the verdict.
`FittedExit` predicts the full-depth log-odds with a lens fitted for each layer, and exits where the prediction is
further from zero than the lens errs.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from rksc_agents.errors import ConfigError
from rksc_agents.model.exits import Glimpse, Trace
from rksc_agents.verify.lens import FittedLens


class _Settling:
    """Notes what each layer makes of each row, and where the rows settle."""

    def __init__(self, rows: int, layers: Collection[int]) -> None:
        self.layers = layers
        self.traces = [Trace() for _ in range(rows)]

    def _note(self, layer: int, log_odds: list[float], there: list[bool]) -> bool:
        for trace, value, settled in zip(self.traces, log_odds, there, strict=True):
            trace.log_odds[layer] = value
            if settled and trace.settled is None:
                trace.settled = layer
        return all(trace.settled is not None for trace in self.traces)


@dataclass(frozen=True, slots=True)
class RawExit:
    """The paper's rule: entropy H of YES against NO under the model's own head, per layer.

    A verdict has settled where H < `theta` and H changed by less than `epsilon` since the layer before.

    Parameters
    ----------
    depth : int
        Layers of the model; the rule looks from the middle one on.
    theta : float, default 0.3
        In nats; ln 2 is undecided.
    epsilon : float, default 0.05
        In nats.
    zero : float, default 0.0
        Log-odds at which a verdict changes sides.
    """

    depth: int
    theta: float = 0.3
    epsilon: float = 0.05
    zero: float = 0.0

    def about(self, zero: float) -> RawExit:
        """The same rule for verdicts that change sides at these log-odds."""
        return replace(self, zero=zero)

    def watch(self, rows: int, groups: tuple[tuple[int, ...], ...]) -> _RawSettling:
        return _RawSettling(self, rows, groups)


class _RawSettling(_Settling):
    def __init__(self, rule: RawExit, rows: int, groups: tuple[tuple[int, ...], ...]) -> None:
        super().__init__(rows, range(max(1, rule.depth // 2 - 1), rule.depth))
        self._rule = rule
        self._groups = groups
        self._before: list[float] | None = None

    def look(self, layer: int, glimpse: Glimpse) -> bool:
        yes, no = (glimpse.logits[:, list(group)].logsumexp(-1) for group in self._groups)
        log_odds: list[float] = (yes - no).tolist()
        now = [binary_entropy(value - self._rule.zero) for value in log_odds]
        before, self._before = self._before, now
        if before is None:  # the layer before the first is there for the difference only
            return self._note(layer, log_odds, [False] * len(now))
        rule = self._rule
        steady = [h < rule.theta and abs(h - b) < rule.epsilon for h, b in zip(now, before, strict=True)]
        return self._note(layer, log_odds, steady)


@dataclass(frozen=True, slots=True)
class FittedExit:
    """Exit at the first layer whose lens is sure of the full-depth verdict.

    Parameters
    ----------
    lens : FittedLens
        Fitted on the model's own full-depth verdicts; see :mod:`rksc_agents.verify.lens`.
    margin : float
        How many standard deviations of the lens's error the predicted log-odds must be from zero; above 0.
    zero : float, default 0.0
        Log-odds at which a verdict changes sides.
    """

    lens: FittedLens
    margin: float
    zero: float = 0.0

    def __post_init__(self) -> None:
        if not self.margin > 0:
            raise ConfigError(f"FittedExit.margin = {self.margin!r}: give a number above 0, such as 2.0")

    def about(self, zero: float) -> FittedExit:
        """The same rule for verdicts that change sides at these log-odds."""
        return replace(self, zero=zero)

    def watch(self, rows: int, groups: tuple[tuple[int, ...], ...]) -> _FittedSettling:
        return _FittedSettling(self, rows)


class _FittedSettling(_Settling):
    def __init__(self, rule: FittedExit, rows: int) -> None:
        super().__init__(rows, rule.lens.layers)
        self._rule = rule

    def look(self, layer: int, glimpse: Glimpse) -> bool:
        rule = self._rule
        error = rule.lens.error[rule.lens.layers.index(layer)]
        log_odds: list[float] = rule.lens.predict(layer, glimpse.hidden).tolist()
        return self._note(layer, log_odds, [abs(v - rule.zero) >= rule.margin * error for v in log_odds])


@dataclass(frozen=True, slots=True)
class Record:
    """Never exits, and keeps the hidden states of the given layers: for fitting lenses and for measuring."""

    layers: tuple[int, ...]

    def about(self, zero: float) -> Record:
        """The rule itself: it takes no sides."""
        return self

    def watch(self, rows: int, groups: tuple[tuple[int, ...], ...]) -> _Recording:
        return _Recording(self, rows, groups)


class _Recording(_Settling):
    def __init__(self, rule: Record, rows: int, groups: tuple[tuple[int, ...], ...]) -> None:
        super().__init__(rows, rule.layers)
        self._groups = groups

    def look(self, layer: int, glimpse: Glimpse) -> bool:
        for trace, state in zip(self.traces, glimpse.hidden.cpu(), strict=True):
            trace.states[layer] = state
        yes, no = (glimpse.logits[:, list(group)].logsumexp(-1) for group in self._groups)
        return self._note(layer, (yes - no).tolist(), [False] * len(self.traces))


def binary_entropy(log_odds: float) -> float:
    """Entropy in nats of a choice with these log-odds."""
    if abs(log_odds) > 40:
        return 0.0
    p = 1.0 / (1.0 + math.exp(-log_odds))
    return -(p * math.log(p) + (1 - p) * math.log1p(-p))
