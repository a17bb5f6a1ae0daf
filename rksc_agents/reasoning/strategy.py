"""What a strategy is, and what it works with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rksc_agents.config import Config
from rksc_agents.errors import ConfigError
from rksc_agents.reasoning.answers import EXTRACTORS, AnswerExtractor
from rksc_agents.reasoning.problem import Problem
from rksc_agents.types import Prompt, Vote
from rksc_agents.verify.confidence import Confidence, confidence
from rksc_agents.verify.self_verifier import SelfVerifier
from rksc_agents.verify.verifier import Verifier


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy settled on.

    Attributes
    ----------
    winner : int
        Index of the winning branch.
    answer : str or None
        Its answer.
    votes : tuple of Vote
        Best first; empty where there was no vote.
    rule : str or None
        Which rule decided the vote.

    Examples
    --------
    >>> Outcome(winner=0, answer="4").votes
    ()
    """

    winner: int
    answer: str | None
    votes: tuple[Vote, ...] = ()
    rule: str | None = None


class Strategy(Config):
    """Base of all strategies: a frozen object with settings and one coroutine, :meth:`solve`.

    Attributes
    ----------
    name : str
        The strategy's name in results, the command line and JSON.
    confidence : str or Confidence, default "mean-top-probability"
        How sure a branch was of itself; see :mod:`rksc_agents.verify.confidence`.
    extract : str or callable, default "auto"
        Finds the answer in a branch's text; see :mod:`rksc_agents.reasoning.answers`.
    verifier : Verifier or None, default None
        Says how right a branch is, where the strategy verifies; None asks the model itself
        (:class:`~rksc_agents.verify.self_verifier.SelfVerifier`).

    Examples
    --------
    >>> class One(Strategy):
    ...     name = "one"
    ...
    ...     async def solve(self, problem):
    ...         async with problem.branching(await problem.start(1)) as ended:
    ...             async for index, branch in ended:
    ...                 return Outcome(index, branch.answer)
    >>> reasoner.reason("Q", strategy=One()).answer
    '4'
    """

    name: ClassVar[str]

    confidence: str | Confidence = "mean-top-probability"
    extract: str | AnswerExtractor = "auto"
    verifier: Verifier | None = None

    def model_post_init(self, _: object) -> None:
        self.measure  # noqa: B018  (raises where the name is unknown)
        self.extractor  # noqa: B018

    @property
    def measure(self) -> Confidence:
        """The confidence measure that `confidence` names."""
        return confidence(self.confidence)

    @property
    def extractor(self) -> AnswerExtractor:
        """The extractor that `extract` names."""
        if not isinstance(self.extract, str):
            return self.extract
        if self.extract not in EXTRACTORS:
            raise ConfigError(f"extract = {self.extract!r}: give one of {', '.join(sorted(EXTRACTORS))}, or a function")
        return EXTRACTORS[self.extract]

    @property
    def checker(self) -> Verifier:
        """The verifier in use."""
        return self.verifier if self.verifier is not None else SelfVerifier()

    def prompts(self, question: Prompt, phrasings: Sequence[Prompt]) -> list[Prompt]:
        """What the branches are asked, in turn: the question and its other phrasings."""
        return [question, *phrasings]

    @abstractmethod
    async def solve(self, problem: Problem) -> Outcome:
        """Answer `problem` with its verbs; runs in the engine's thread and must not block."""
