"""CGEE: when verification may be skipped (level 1), and when it may stop early (level 2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from rksc_agents.config import Config
from rksc_agents.errors import ConfigError
from rksc_agents.model.exits import ExitRule
from rksc_agents.verify.certificate import Certificate
from rksc_agents.verify.decisions import lead
from rksc_agents.verify.early_exit import FittedExit, RawExit
from rksc_agents.verify.lens import FittedLens

PRESETS = ("off", "strict", "paper")


class ExitConfig(Config):
    """Thresholds of both levels of early exit.

    Parameters
    ----------
    source : str, default "custom"
        Where they come from, for the result: a preset's name, "certificate" or "custom".
    confidence : float or None, default None
        Level 1: nothing is verified if the most confident branch has at least this confidence ...
    gap : float, default 0.0
        ... and leads the best branch with a different answer by at least this much. None of `confidence` switches
        level 1 off.
    relative : bool, default False
        Whether `gap` is a share of the top confidence instead of a difference.
    measure : str, default "mean-top-probability"
        The confidence measure that the thresholds are for; branches scored by another are always verified.
    lens : "raw", FittedLens or None, default None
        Level 2: what reads the middle layers; None switches it off.
    margin : float, default 3.0
        Of a fitted lens: standard deviations of its error that a prediction must be from zero.
    theta, epsilon : float, default 0.3, 0.05
        Of the raw lens: the entropy, in nats, below which a verdict has settled, and its change since the last layer.
    certificate : Certificate or None
        Where the thresholds come from one; a call warns where it was made for another model, prompt or settings.

    Examples
    --------
    >>> reasoner.reason("Q", exit=ExitConfig()).answer
    '4'
    """

    source: str = "custom"
    confidence: float | None = None
    gap: float = Field(default=0.0, ge=0.0)
    relative: bool = False
    measure: str = "mean-top-probability"
    lens: Literal["raw"] | FittedLens | None = None
    margin: float = Field(default=3.0, gt=0.0)
    theta: float = Field(default=0.3, gt=0.0)
    epsilon: float = Field(default=0.05, gt=0.0)
    certificate: Certificate | None = None

    @classmethod
    def preset(cls, name: str) -> ExitConfig:
        """Return a preset.

        "off" verifies everything at full depth. "strict" is level 1 with thresholds that docs/cgee.md justifies.
        "paper" is the paper's constants at both levels, with the raw lens.

        Raises
        ------
        ConfigError
            If there is none of that name.
        """
        if name == "off":
            return cls(source="off")
        if name == "strict":
            return cls(source="strict", confidence=0.70, gap=0.30)
        if name == "paper":
            return cls(source="paper", confidence=0.70, gap=0.06, lens="raw")
        raise ConfigError(f"exit = {name!r}: give one of {', '.join(PRESETS)}, 'auto', or a certificate's path")

    @classmethod
    def from_certificate(cls, certificate: Certificate | Path | str) -> ExitConfig:
        """Return the thresholds and the lens of a certificate, given as it is or by its path.

        Raises
        ------
        ConfigError
            If the file is missing or is no certificate of this version.
        """
        read = certificate if isinstance(certificate, Certificate) else Certificate.load(certificate)
        lens = None if read.lens is None or read.margin is None else FittedLens.from_json(read.lens)
        return cls(
            source="certificate",
            confidence=read.confidence,
            gap=read.gap,
            measure=read.measure,
            lens=lens,
            certificate=read,
            **({} if read.margin is None else {"margin": read.margin}),
        )

    def decisive(self, measure: str, confidences: Sequence[float], keys: Sequence[int]) -> int | None:
        """Level 1: the branch that is decisively confident, or None.

        Parameters
        ----------
        measure : str
            Name of the confidence measure.
        confidences : sequence of float
            Of each branch.
        keys : sequence of int
            Equal numbers for branches with equal answers, which are no rivals; -1 for no answer.
        """
        if self.confidence is None or measure != self.measure or not confidences:
            return None
        top, best, ahead = lead(confidences, keys)
        needed = self.gap * best if self.relative else self.gap
        return top if best >= self.confidence and ahead >= needed else None

    def rule(self, depth: int) -> ExitRule | None:
        """Level 2: when a pass of a model of `depth` layers may stop; None for never."""
        if self.lens is None:
            return None
        if self.lens == "raw":
            return RawExit(depth, self.theta, self.epsilon)
        return FittedExit(self.lens, self.margin)
