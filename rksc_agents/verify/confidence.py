"""How sure a branch was of its own tokens: one number per branch, larger is surer, no second model call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from torch import Tensor

from rksc_agents.errors import ConfigError

LOGPROB_FLOOR = -100.0
"""Log-probabilities below this count as this, so that a token that was ruled out leaves every score finite."""


@runtime_checkable
class Confidence(Protocol):
    """A measure of confidence: a score per token while a branch decodes, and one number when it has ended."""

    @property
    def name(self) -> str:
        """The name under which results and settings mention the measure."""
        ...

    def per_token(self, logprobs: Tensor) -> Tensor:
        """Score the next token of each row.

        Parameters
        ----------
        logprobs : Tensor, [rows, vocabulary]
            Log-probabilities of the model's raw distribution: no temperature, penalty or filter.

        Returns
        -------
        Tensor, [rows]
        """
        ...

    def of_branch(self, token_scores: Sequence[float], logprobs: Sequence[float]) -> float:
        """Return the confidence of a branch.

        Parameters
        ----------
        token_scores : sequence of float
            What `per_token` gave for each token of the branch; may be empty.
        logprobs : sequence of float
            Log-probability of each token that was drawn.
        """
        ...


@dataclass(frozen=True, slots=True)
class MeanTopProbability:
    """Mean over the tokens of the likeliest token's probability (RKSC, arXiv 2606.09937). In [0, 1].

    A branch without tokens has 0.
    """

    name = "mean-top-probability"
    ceiling = 1.0

    def per_token(self, logprobs: Tensor) -> Tensor:
        """Return the largest probability of each row."""
        return logprobs.amax(-1).exp()

    def of_branch(self, token_scores: Sequence[float], logprobs: Sequence[float]) -> float:
        """Return the mean of the token scores."""
        return _mean(token_scores, empty=0.0)


@dataclass(frozen=True, slots=True)
class MeanLogProbability:
    """Mean log-probability of the drawn tokens, which is log of the inverse perplexity. At most 0.

    A branch without tokens has ``LOGPROB_FLOOR``.
    """

    name = "mean-log-probability"
    ceiling = 0.0

    def per_token(self, logprobs: Tensor) -> Tensor:
        """Return the likeliest token's log-probability; `of_branch` uses the drawn tokens' instead."""
        return logprobs.amax(-1)

    def of_branch(self, token_scores: Sequence[float], logprobs: Sequence[float]) -> float:
        """Return the mean of the drawn tokens' log-probabilities."""
        return _mean([max(value, LOGPROB_FLOOR) for value in logprobs], empty=LOGPROB_FLOOR)


@dataclass(frozen=True, slots=True)
class GroupMinimum:
    """Lowest mean over a sliding window of token confidences (DeepConf, arXiv 2508.15260). At least 0, unbounded.

    A token's confidence is minus the mean log-probability of the `top_k` likeliest tokens: large where the
    distribution is peaked. One shaky stretch lowers the branch, however sure the rest is. A branch shorter
    than the window is one group; a branch without tokens has 0.

    Parameters
    ----------
    window : int, default 64
        Tokens in a group; the paper uses 1,024 and 2,048 on traces of tens of thousands of tokens.
    top_k : int, default 20
        Likeliest tokens that are looked at.
    """

    window: int = 64
    top_k: int = 20
    name = "group-minimum"
    ceiling = math.inf

    def __post_init__(self) -> None:
        if self.window < 1 or self.top_k < 1:
            raise ConfigError(
                f"GroupMinimum(window={self.window!r}, top_k={self.top_k!r}): both must be whole numbers from 1"
            )

    def per_token(self, logprobs: Tensor) -> Tensor:
        """Return minus the mean log-probability of the `top_k` likeliest tokens of each row."""
        top = logprobs.topk(min(self.top_k, logprobs.shape[-1]), dim=-1).values
        return -top.clamp(min=LOGPROB_FLOOR).mean(-1)

    def of_branch(self, token_scores: Sequence[float], logprobs: Sequence[float]) -> float:
        """Return the lowest mean of `window` token scores in a row."""
        if not token_scores:
            return 0.0
        width = min(self.window, len(token_scores))
        sums = [0.0, *accumulate(token_scores)]
        return min(end - start for start, end in zip(sums, sums[width:], strict=False)) / width


@dataclass(frozen=True, slots=True)
class SelfCertainty:
    """Mean KL divergence of the next token's distribution from the uniform one (arXiv 2502.18581). At least 0.

    A token's score is ``-(1 / V) * sum(log(V * p))`` over a vocabulary of V. A branch without tokens has 0.
    """

    name = "self-certainty"
    ceiling = math.inf

    def per_token(self, logprobs: Tensor) -> Tensor:
        """Return the divergence of each row from the uniform distribution, in nats."""
        return -logprobs.clamp(min=LOGPROB_FLOOR).mean(-1) - math.log(logprobs.shape[-1])

    def of_branch(self, token_scores: Sequence[float], logprobs: Sequence[float]) -> float:
        """Return the mean of the token scores."""
        return _mean(token_scores, empty=0.0)


CONFIDENCE: Mapping[str, Confidence] = MappingProxyType(
    {measure.name: measure for measure in (MeanTopProbability(), MeanLogProbability(), GroupMinimum(), SelfCertainty())}
)
"""The measures by name, with their default settings; "mean-top-probability" is the one used by default."""


def confidence(measure: str | Confidence) -> Confidence:
    """Return the measure of that name, or the measure itself.

    Raises
    ------
    ConfigError
        If there is no measure of that name, or the object is none.
    """
    if isinstance(measure, str):
        if measure in CONFIDENCE:
            return CONFIDENCE[measure]
    elif isinstance(measure, Confidence) and not isinstance(measure, type):
        return measure
    raise ConfigError(
        f"confidence = {measure!r}: give one of {', '.join(CONFIDENCE)}, or an object with name, per_token, of_branch"
    )


def ceiling(measure: Confidence) -> float:
    """Return the largest value that `measure` can have; infinity where there is none or it is not told."""
    return float(getattr(measure, "ceiling", math.inf))


def _mean(values: Sequence[float], empty: float) -> float:
    return math.fsum(values) / len(values) if values else empty
