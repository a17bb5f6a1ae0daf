"""Asking the model itself: a short YES/NO probe on the branch's own KV."""

from __future__ import annotations

from collections.abc import Sequence

from rksc_agents.config import Config
from rksc_agents.engine.probe import Reading
from rksc_agents.engine.session import Session
from rksc_agents.engine.work import all_of
from rksc_agents.model.exits import ExitRule
from rksc_agents.types import Prompt, Verdict
from rksc_agents.verify.decisions import sigmoid
from rksc_agents.verify.early_exit import binary_entropy
from rksc_agents.verify.verifier import Claim
from rksc_agents.verify.words import verdict_tokens


class SelfVerifier(Config):
    """Asks the model about a branch in the turn after it, and reads P(YES) / (P(YES) + P(NO)).

    The probe goes on from the branch's own KV, so it computes its own tokens and the branch's last one, no prefix.

    Parameters
    ----------
    request : str
        What is asked about a finished branch.
    step_request : str
        What is asked about a step of a longer line.
    calibrated : bool, default False
        Take what the model says about a content-free answer as the zero point (contextual calibration, Zhao et al.
        2021, arXiv 2102.09690). Costs one more short probe per call.

    Examples
    --------
    >>> best = BestOfN(branches=2, score="verifier", verifier=SelfVerifier(calibrated=False))
    >>> reasoner.reason("Q", strategy=best, exit="off").verification.verified
    2
    """

    request: str = "Is the answer above correct? Reply YES or NO."
    step_request: str = "Is the reasoning above right so far? Reply YES or NO."
    calibrated: bool = False

    @property
    def name(self) -> str:
        """The name in results, settings and certificates."""
        return "self-calibrated" if self.calibrated else "self"

    @property
    def prompt(self) -> str:
        """What verdicts depend on, for certificates."""
        return f"{self.request}\n{self.step_request}"

    async def verify(self, session: Session, claims: Sequence[Claim], exit_rule: ExitRule | None) -> list[Verdict]:
        """Return a verdict for each claim, in order; see :class:`~rksc_agents.verify.verifier.Verifier`."""
        return [verdict(reading, zero) for reading, zero in await self.read(session, claims, exit_rule)]

    async def read(
        self, session: Session, claims: Sequence[Claim], exit_rule: ExitRule | None
    ) -> list[tuple[Reading, float]]:
        """What the probes read, and the log-odds at which each verdict changes sides."""
        found: dict[int, tuple[Reading, float]] = {}
        for finished in (True, False):
            indices = [index for index, claim in enumerate(claims) if claim.finished is finished]
            if indices:
                some = await self._ask(session, [claims[index] for index in indices], finished, exit_rule)
                found.update(zip(indices, some, strict=True))
        return [found[index] for index in range(len(claims))]

    async def _ask(
        self, session: Session, claims: Sequence[Claim], finished: bool, exit_rule: ExitRule | None
    ) -> list[tuple[Reading, float]]:
        request = self.request if finished else self.step_request
        groups = verdict_tokens(session.codec)
        zero = await self._zero(session, request) if self.calibrated else 0.0
        rule = exit_rule.about(zero) if exit_rule is not None else None
        extensions = [session.codec.follow_up(claim.question, request, claim.cursor.tokens) for claim in claims]
        # never on KV that a lossy mode made
        cursors = await all_of([session.exact(claim.cursor) for claim in claims])
        try:
            readings = await session.probe(cursors, extensions, groups, exit_rule=rule)
        finally:
            for cursor, claim in zip(cursors, claims, strict=True):
                if cursor is not claim.cursor:
                    session.release(cursor)
        return [(reading, zero) for reading in readings]

    async def _zero(self, session: Session, request: str) -> float:
        """Log-odds of YES about an answer without content."""
        cursor = await session.prefill(session.codec.encode(_NOTHING), counted=False)
        extension = session.codec.follow_up(_NOTHING, request, cursor.tokens)
        (reading,) = await session.probe([cursor], [extension], verdict_tokens(session.codec))
        session.release(cursor)
        return reading.values[0] - reading.values[1]


_NOTHING: Prompt = [{"role": "user", "content": "N/A"}, {"role": "assistant", "content": "N/A"}]


def verdict(reading: Reading, zero: float = 0.0) -> Verdict:
    """The verdict that a probe's log-odds of YES give, relative to `zero`."""
    return Verdict(
        score=sigmoid(reading.values[0] - reading.values[1] - zero),
        exit_layer=reading.exit_layer,
        layers=reading.layers,
        tokens_computed=reading.tokens,
        entropies={layer: binary_entropy(value - zero) for layer, value in reading.trace.log_odds.items()},
    )
