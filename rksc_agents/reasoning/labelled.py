"""How good the verifier and the ways to choose are, where the right answers are known."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rksc_agents.reasoning.equivalence import equivalent
from rksc_agents.reasoning.observe import Sample
from rksc_agents.verify.certificate import Labelled
from rksc_agents.verify.decisions import best_of_n, weighted_vote
from rksc_agents.verify.intervals import auc

RULES = ("majority", "confidence", "verifier", "best-of-n by verifier", "best-of-n by confidence")
"""Ways to choose among branches that labelled questions compare."""


def labelled(samples: Sequence[Sample], answers: Sequence[str]) -> Labelled:
    """How good the verifier and the vote rules are where the right answers are known."""
    right = [
        [branch.answer is not None and equivalent(branch.answer, answer) for branch in sample.branches]
        for sample, answer in zip(samples, answers, strict=True)
    ]
    scores = [float(score) for sample in samples for score in sample.log_odds - sample.zeros]
    marks = [mark for marks in right for mark in marks]
    mixed = len(set(marks)) == 2
    area = auc(scores, marks) if mixed else None
    accuracy = {rule: _accuracy(rule, samples, right) for rule in RULES}
    return Labelled(
        questions=len(samples),
        verifier_auc=area,
        accuracy={**accuracy, "single branch": sum(marks) / len(marks)},
        recommendation=_recommendation(area, accuracy),
    )


def _accuracy(rule: str, samples: Sequence[Sample], right: Sequence[Sequence[bool]]) -> float:
    correct = 0
    for sample, marks in zip(samples, right, strict=True):
        confidences = [branch.confidence for branch in sample.branches]
        scores = torch.sigmoid(sample.log_odds - sample.zeros).tolist()
        match rule:
            case "majority":
                key = weighted_vote(confidences, sample.keys, [1.0] * len(scores))
            case "confidence":
                key = weighted_vote(
                    confidences, sample.keys, torch.softmax(torch.tensor(confidences) / 0.1, 0).tolist()
                )
            case "verifier":
                key = weighted_vote(confidences, sample.keys, scores)
            case "best-of-n by verifier":
                key = best_of_n(confidences, sample.keys, scores)
            case _:
                key = best_of_n(confidences, sample.keys, confidences)
        correct += key >= 0 and marks[sample.keys.index(key)]
    return correct / len(samples)


def _recommendation(area: float | None, accuracy: dict[str, float]) -> str:
    best = max(accuracy, key=lambda rule: accuracy[rule])
    if area is None:
        return "all branches are right, or all wrong: take other questions to compare verifiers and votes"
    if area < 0.6:
        return (
            f"the verifier is little better than a coin (AUC {area:.2f}): do not verify with it; "
            f"best here was {best!r} ({accuracy[best]:.1%})"
        )
    return f"the verifier tells right from wrong (AUC {area:.2f}); best here was {best!r} ({accuracy[best]:.1%})"
