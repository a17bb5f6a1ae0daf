"""What a verifier is: claims in, verdicts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rksc_agents.engine.cursor import Cursor
from rksc_agents.engine.probe import Reading
from rksc_agents.engine.session import Session
from rksc_agents.model.chat import conversation
from rksc_agents.model.exits import ExitRule
from rksc_agents.types import Prompt, Verdict


@dataclass(frozen=True, slots=True)
class Claim:
    """A line of reasoning that is to be verified.

    Attributes
    ----------
    question : str or sequence of messages
        What was asked.
    text : str
        What was written, from the prompt on, without thinking.
    answer : str or None
        The answer extracted from it.
    cursor : Cursor
        The line itself, with its KV.
    finished : bool
        False for a step of a longer line, which can be on the right track but not right yet.

    Examples
    --------
    >>> def brief(claim: Claim) -> float:
    ...     return float(len(claim.text) < 80)
    """

    question: Prompt
    text: str
    answer: str | None
    cursor: Cursor
    finished: bool = True

    @property
    def asked(self) -> str:
        """The text of the question; of a conversation, that of its last user message."""
        texts = [str(message["content"]) for message in conversation(self.question) if message["role"] == "user"]
        return texts[-1] if texts else ""


@runtime_checkable
class Verifier(Protocol):
    """Says how right claims are.

    Attributes
    ----------
    name : str
        The name in results, settings and certificates.
    always : bool, optional
        True where a verdict is better than any confidence, so that level 1 never spares it: a program that checks.

    Examples
    --------
    >>> isinstance(SelfVerifier(), Verifier)
    True
    """

    @property
    def name(self) -> str:
        """The name in results, settings and certificates."""
        ...

    async def verify(self, session: Session, claims: Sequence[Claim], exit_rule: ExitRule | None) -> list[Verdict]:
        """Return a verdict for each claim, in order; runs in the engine's thread and must not block.

        Parameters
        ----------
        session : Session
            The request's verbs; ``session.call`` runs a blocking function in another thread.
        claims : sequence of Claim
            Lines of one request.
        exit_rule : ExitRule or None
            When a pass of the reasoner's own model may stop before the last layer; None for never. A verifier that
            does not use that model ignores it.
        """
        ...


@runtime_checkable
class ProbingVerifier(Verifier, Protocol):
    """A verifier that asks the reasoner's own model, so that its passes can be watched."""

    @property
    def prompt(self) -> str:
        """What verdicts depend on, for certificates."""
        ...

    async def read(
        self, session: Session, claims: Sequence[Claim], exit_rule: ExitRule | None
    ) -> list[tuple[Reading, float]]:
        """What the probes read for each claim, and the log-odds at which its verdict changes sides."""
        ...
