"""Asking the model in a conversation of its own, where the question and the answer are quoted."""

from __future__ import annotations

from collections.abc import Sequence

from rksc_agents.config import Config
from rksc_agents.engine.probe import Reading
from rksc_agents.engine.session import Session
from rksc_agents.errors import ConfigError
from rksc_agents.model.exits import ExitRule
from rksc_agents.types import Verdict
from rksc_agents.verify.self_verifier import verdict
from rksc_agents.verify.verifier import Claim
from rksc_agents.verify.words import verdict_tokens


class JudgeVerifier(Config):
    """Asks the model in a separate prompt, and reads P(YES) / (P(YES) + P(NO)).

    The prompt is not on the branch, so question and answer are read anew; what the prompts of several branches have
    in common is computed once. An early exit saves most here.

    Parameters
    ----------
    request : str
        The prompt, with the places ``{question}`` and ``{answer}``.

    Examples
    --------
    >>> BestOfN(score="verifier", verifier=JudgeVerifier()).verifier.name
    'judge'
    """

    request: str = (
        "Here is a question and an answer that somebody gave.\n\nQuestion: {question}\n\nAnswer: {answer}\n\n"
        "Is this answer correct? Reply YES or NO."
    )

    def model_post_init(self, _: object) -> None:
        if "{question}" not in self.request or "{answer}" not in self.request:
            raise ConfigError(
                f"JudgeVerifier.request = {self.request!r}: it must hold {{question}} and {{answer}}, where they go"
            )

    @property
    def name(self) -> str:
        """The name in results, settings and certificates."""
        return "judge"

    @property
    def prompt(self) -> str:
        """What verdicts depend on, for certificates."""
        return self.request

    async def verify(self, session: Session, claims: Sequence[Claim], exit_rule: ExitRule | None) -> list[Verdict]:
        """Return a verdict for each claim, in order; see :class:`~rksc_agents.verify.verifier.Verifier`."""
        return [verdict(reading) for reading, _ in await self.read(session, claims, exit_rule)]

    async def read(
        self, session: Session, claims: Sequence[Claim], exit_rule: ExitRule | None
    ) -> list[tuple[Reading, float]]:
        """What the probes read, and the log-odds at which each verdict changes sides, which is 0."""
        groups = verdict_tokens(session.codec)
        found: dict[int, Reading] = {}
        by_question: dict[str, list[int]] = {}
        for index, claim in enumerate(claims):
            by_question.setdefault(claim.asked, []).append(index)
        for question, indices in by_question.items():
            prompts = [session.codec.encode(self._written(question, claims[index].text)) for index in indices]
            blank = session.codec.encode(self._written(question, ""))
            common = _common([*prompts, blank])
            if common:
                root = await session.prefill(blank[:common], keep=False, counted=False)
            else:
                root = session.cached(blank, 0)
            rest = [prompt[common:] for prompt in prompts]
            try:
                readings = await session.probe([root] * len(rest), rest, groups, exit_rule=exit_rule)
            finally:
                session.release(root)
            found.update(zip(indices, readings, strict=True))
        return [(found[index], 0.0) for index in range(len(claims))]

    def _written(self, question: str, answer: str) -> str:
        before, _, after = self.request.partition("{question}")
        return before.replace("{answer}", answer) + question + after.replace("{answer}", answer)


def _common(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all begin with; each keeps at least one beyond them."""
    most = min(map(len, sequences)) - 1
    first = sequences[0]
    return next((at for at in range(most) if any(other[at] != first[at] for other in sequences)), most)
