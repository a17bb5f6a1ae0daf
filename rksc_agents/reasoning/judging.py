"""Having branches verified: whether at all (CGEE level 1), on which KV, and what is noted of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rksc_agents.errors import PromptTooLongError
from rksc_agents.reasoning.voting import answer_keys
from rksc_agents.types import Verdict
from rksc_agents.verify.verifier import Claim

if TYPE_CHECKING:
    from rksc_agents.reasoning.problem import Problem


class CertificateWarning(UserWarning):
    """A certificate is used for something else than it was made for, or cannot be used.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("error", CertificateWarning)  # doctest: +SKIP
    """


async def judge(problem: Problem, indices: Sequence[int], *, finished: bool, gate: bool) -> list[Verdict]:
    """The verdicts on branches; see :meth:`rksc_agents.reasoning.problem.Problem.verify`."""
    if not indices:
        return []
    if problem.settings.differing:
        warnings.warn(
            "the certificate was made for something else, so its promise does not hold here ("
            + "; ".join(problem.settings.differing)
            + "): calibrate anew with `rksc calibrate`, or set exit='strict'",
            CertificateWarning,
            stacklevel=2,
        )
    if finished and gate and await _decisive(problem, indices):
        return [Verdict(skipped=True)] * len(indices)
    return await _verified(problem, claims_of(problem, indices, finished=finished))


def claims_of(problem: Problem, indices: Sequence[int], *, finished: bool = True) -> list[Claim]:
    """Branches as verifiers take them."""
    return [
        Claim(
            question=problem.question,
            text=problem.text_of(index) or problem.branch(index).answer or "",
            answer=problem.branch(index).answer,
            cursor=problem.cursors[index],
            finished=finished,
        )
        for index in indices
    ]


async def _verified(problem: Problem, claims: Sequence[Claim]) -> list[Verdict]:
    """Verify claims; those that leave no room in the context to ask about them get no score."""
    session, settings = problem.session, problem.settings
    try:
        return await settings.verifier.verify(session, claims, settings.exits.rule(session.depth))
    except PromptTooLongError as error:
        if len(claims) > 1:
            return [verdict for claim in claims for verdict in await _verified(problem, [claim])]
        warnings.warn(
            f"a branch was not verified, because there is no room left to ask about it ({error}): lower max_tokens",
            stacklevel=2,
        )
        return [Verdict()]


async def _decisive(problem: Problem, indices: Sequence[int]) -> bool:
    """Level 1: whether one branch is decisively confident. A program's check is never spared."""
    settings = problem.settings
    if getattr(settings.verifier, "always", False):
        return False
    branches = [problem.branch(index) for index in indices]
    keys = await problem.session.call(answer_keys, [branch.answer for branch in branches], settings.reader.same)
    confidences = [branch.confidence for branch in branches]
    return settings.exits.decisive(settings.measure.name, confidences, keys) is not None
