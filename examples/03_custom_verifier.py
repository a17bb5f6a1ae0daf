"""A verifier of your own: a function from a claim to a score. Here a program checks, so it is always asked.

python examples/03_custom_verifier.py
"""

import re

from rksc_agents import BestOfN, CallableVerifier, Claim, RKSCReasoner


def adds_up(claim: Claim) -> float:
    """The share of the sums in a text that are right."""
    sums = re.findall(r"(\d+)\s*\+\s*(\d+)\s*=\s*(\d+)", claim.text)
    return sum(int(a) + int(b) == int(total) for a, b, total in sums) / len(sums) if sums else 0.0


strategy = BestOfN(branches=6, score="verifier", verifier=CallableVerifier(adds_up, "adds_up", always=True))
with RKSCReasoner.from_pretrained() as reasoner:
    result = reasoner.reason("What is 17 + 25? Write the sum as a + b = c.", strategy=strategy, max_tokens=48, seed=0)
for index, branch in enumerate(result.branches):
    score = branch.verdict.score if branch.verdict else None
    print(f"{'*' if index == result.winner else ' '} {score}  {branch.text.strip()[:70]!r}")
