"""What a run comes to: the answer with its evidence."""

from __future__ import annotations

from typing import Any

from pydantic import PrivateAttr

from rksc_agents.errors import ConfigError
from rksc_agents.trace import Trace
from rksc_agents.types import (
    Branch,
    FinishReason,
    InvalidToolCall,
    KVUsage,
    Quantization,
    Record,
    Timings,
    ToolCall,
    Usage,
    VerificationUsage,
    Vote,
)


class ReasoningResult(Record):
    """The answer with its evidence.

    Attributes
    ----------
    answer : str or None
        The answer that the strategy settled on; the winning branch's text where none can be extracted.
    text : str
        The winning branch's text.
    tool_calls, invalid_tool_calls : tuple
        What the winning branch called.
    strategy : str
        Name of the strategy, such as "self-consistency".
    branches : tuple of Branch
        All branches in the order they were forked.
    winner : int
        Index of the winning branch.
    votes : tuple of Vote
        Best first; empty for strategies that do not vote.
    rule : str or None
        Which rule decided: "majority", "confidence", "verifier", "mbr" or "universal"; None for strategies that do
        not vote.
    verification : VerificationUsage
        What verification took, and what early exit spared.
    quantization : Quantization or None
        What 8-bit weights changed; None where weights are as they were loaded.
    usage, kv, timings
        What it took.

    Examples
    --------
    >>> result.answer, result.agreement, result.winner
    ('4', 1.0, 0)
    """

    answer: str | None
    text: str
    strategy: str
    branches: tuple[Branch, ...]
    winner: int
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: tuple[InvalidToolCall, ...] = ()
    votes: tuple[Vote, ...] = ()
    rule: str | None = None
    verification: VerificationUsage = VerificationUsage()
    quantization: Quantization | None = None
    usage: Usage
    kv: KVUsage
    timings: Timings
    _trace: Trace | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """Whether all that is printed is equal; the trace is not."""
        return isinstance(other, ReasoningResult) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash((self.strategy, self.text, self.winner, self.timings))

    def traced(self, trace: Trace) -> ReasoningResult:
        """The same result with the trace of its run."""
        copy = self.model_copy()
        copy._trace = trace
        return copy

    @property
    def trace(self) -> Trace:
        """The run as a tree that can be printed, drawn and saved; it is no part of the result's JSON.

        Raises
        ------
        ConfigError
            If the result was read from JSON.
        """
        if self._trace is None:
            raise ConfigError("a result that was read from JSON has no trace: save the trace itself, with Trace.save")
        return self._trace

    @property
    def line(self) -> tuple[Branch, ...]:
        """The branches from the prompt to the winner: one, but for a search."""
        line: list[Branch] = []
        at: int | None = self.winner
        while at is not None:
            line.append(self.branches[at])
            at = self.branches[at].parent
        return tuple(line[::-1])

    @property
    def thinking(self) -> str:
        """What the winner wrote inside thinking markers."""
        return "\n\n".join(branch.thinking for branch in self.line if branch.thinking)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the winner ended."""
        return self.branches[self.winner].finish_reason

    @property
    def agreement(self) -> float | None:
        """The share of the branches that voted which gave the winner's answer; None without a vote."""
        voted = sum(len(vote.branches) for vote in self.votes)
        mine = next((len(vote.branches) for vote in self.votes if self.winner in vote.branches), 0)
        return mine / voted if voted else None

    def evidence(self) -> dict[str, Any]:
        """The evidence behind the answer in short, as JSON values: what frameworks keep beside a message.

        - strategy, rule: what decided.
        - branches: how many there were; votes: each answer with its weight and its branches, best first.
        - agreement: see :attr:`agreement`; confidence: the winner's.
        - verification: the verifier, how many branches were verified, skipped and exited early, the winner's score.
        - quantization: what 8-bit weights changed, or None.
        - tokens_reused: prompt tokens whose KV was there; kv_bytes: most KV held at once, in bytes.
        - timings: seconds.
        """
        winner = self.branches[self.winner]
        return {
            "strategy": self.strategy,
            "rule": self.rule,
            "branches": len(self.branches),
            "votes": [vote.model_dump(mode="json") for vote in self.votes],
            "agreement": self.agreement,
            "confidence": winner.confidence,
            "verification": {
                **self.verification.model_dump(include={"verifier", "verified", "skipped", "exited"}),
                "score": winner.verdict.score if winner.verdict is not None else None,
            },
            "quantization": self.quantization.model_dump() if self.quantization is not None else None,
            "tokens_reused": self.usage.prompt_tokens_reused,
            "kv_bytes": self.kv.peak_bytes,
            "timings": self.timings.model_dump(),
        }
