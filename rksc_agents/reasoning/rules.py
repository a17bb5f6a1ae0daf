"""The rules of a vote: from branches that ended to the one that wins."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence

from rksc_agents.reasoning.consensus import closest
from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.strategy import Outcome
from rksc_agents.reasoning.voting import Ballot, softmax_weights
from rksc_agents.types import Branch, Vote


def candidates(problem: Problem) -> list[int]:
    """The branches that ended, neither cancelled nor unsure; all of them where none did."""
    ended = [i for i, b in enumerate(problem.branches) if b.finish_reason not in ("cancelled", "unsure")]
    return ended or list(range(len(problem.branches)))


def by_count(problem: Problem, ballot: Ballot, rule: str) -> Outcome:
    """The answer that leads `ballot`, as its surest branch gave it; without answers the surest branch."""
    votes = ballot.standing()
    if not votes:
        return Outcome(problem.surest(tuple(candidates(problem))), None, rule="confidence")
    return Outcome(problem.surest(votes[0].branches), votes[0].answer, votes, rule)


async def by_confidence(problem: Problem, temperature: float) -> Outcome:
    """Each branch counts its share of a softmax over the confidences."""
    voters = candidates(problem)
    weights = _softmax(problem, voters, temperature)
    ballot = await problem.session.call(_count_answers, problem, voters, weights)
    return by_count(problem, ballot, "confidence")


async def by_verdict(problem: Problem, temperature: float) -> Outcome:
    """Each branch counts its verdict's score; where verification was skipped, the decisively confident branch wins.

    Without answers equal texts count together. Branches that could not be verified do not vote; by confidence where
    none could.
    """
    voters = candidates(problem)
    verdicts = await problem.verify(voters)
    if any(verdict.skipped for verdict in verdicts):
        winner = problem.surest(voters)
        return Outcome(winner, problem.branches[winner].answer, rule="confidence")
    scored = [(voter, verdict.score) for voter, verdict in zip(voters, verdicts, strict=True)]
    pairs = [(voter, score) for voter, score in scored if score is not None]
    if not pairs:
        return await by_confidence(problem, temperature)
    voters, scores = [voter for voter, _ in pairs], [score for _, score in pairs]
    answered = any(problem.branches[i].answer is not None for i in voters)
    count = _count_answers if answered else _count_texts
    votes = (await problem.session.call(count, problem, voters, scores)).standing()
    if not votes:
        return Outcome(problem.surest(tuple(voters)), None, rule="confidence")
    score = dict(zip(voters, scores, strict=True))
    winner = max(votes[0].branches, key=lambda i: (score[i], problem.branches[i].confidence, -i))
    return Outcome(winner, problem.branches[winner].answer, votes, "verifier")


async def by_closeness(problem: Problem, temperature: float | None = None) -> Outcome:
    """The text that is closest to the others: alike, or with `temperature` by the softmax of their confidences.

    Of equals the surest wins, which decides between two texts.
    """
    voters = sorted(candidates(problem), key=lambda i: (-problem.branches[i].confidence, i))
    texts = [_wrote(problem.branches[i]) for i in voters]
    weights = [1.0] * len(voters) if temperature is None else _softmax(problem, voters, temperature)
    first, utilities = await problem.session.call(closest, texts, weights)
    # the winner comes first, also where no text has a utility; the sort keeps the surer of equals before the other
    order = sorted(range(len(voters)), key=lambda k: (k != first, -utilities[k]))
    votes = [
        Vote(answer=_stands_for(problem.branches[voters[k]]), weight=utilities[k], branches=(voters[k],)) for k in order
    ]
    winner = voters[first]
    return Outcome(winner, problem.branches[winner].answer, tuple(votes), "mbr")


async def by_name(problem: Problem) -> Outcome:
    """The text that the model names as the most consistent; the closest where they do not fit its context."""
    voters = [i for i in candidates(problem) if _wrote(problem.branches[i]).strip()]
    if len(voters) < 2:
        return await by_closeness(problem)
    named = await problem.name_best([_wrote(problem.branches[i]) for i in voters])
    if named is None:
        warnings.warn(
            f"the {len(voters)} candidates do not fit the model's context, so the vote went by 'mbr': take fewer "
            "branches or smaller max_tokens, or set vote='mbr'",
            stacklevel=2,
        )
        return await by_closeness(problem)
    winner = voters[named]
    branch = problem.branches[winner]
    vote = Vote(answer=_stands_for(branch), weight=1.0, branches=(winner,))
    return Outcome(winner, branch.answer, (vote,), "universal")


def _softmax(problem: Problem, voters: Sequence[int], temperature: float) -> tuple[float, ...]:
    return softmax_weights([problem.branches[i].confidence for i in voters], temperature)


def _count_answers(problem: Problem, voters: Sequence[int], weights: Sequence[float]) -> Ballot:
    ballot = problem.ballot()
    for index, weight in zip(voters, weights, strict=True):
        ballot.add(index, problem.branches[index].answer, weight)
    return ballot


def _count_texts(problem: Problem, voters: Sequence[int], weights: Sequence[float]) -> Ballot:
    ballot = Ballot(operator.eq)
    for index, weight in zip(voters, weights, strict=True):
        ballot.add(index, problem.branches[index].text.strip() or None, weight)
    return ballot


def _wrote(branch: Branch) -> str:
    """A branch's text, with its tool calls in their canonical form."""
    if not branch.tool_calls or branch.answer is None:
        return branch.text
    return f"{branch.text}\n{branch.answer}" if branch.text else branch.answer


def _stands_for(branch: Branch) -> str:
    return branch.answer if branch.answer is not None else branch.text.strip()
