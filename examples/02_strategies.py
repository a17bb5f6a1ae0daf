"""Five strategies on one question: what each answers, and what it takes.

python examples/02_strategies.py
"""

from rksc_agents import BeamSearch, BestOfN, Direct, RKSCReasoner, SelfConsistency, Strategy, TreeOfThought

QUESTION = "Tom has 3 boxes of 4 pens and gives away 5. How many pens are left?"
STRATEGIES: list[Strategy] = [
    Direct(),
    SelfConsistency(branches=4),
    BestOfN(branches=4, score="verifier"),
    TreeOfThought(proposals=3, breadth=2, depth=2),
    BeamSearch(beams=2, expansions=2, depth=2),
]

with RKSCReasoner.from_pretrained() as reasoner:
    for strategy in STRATEGIES:
        result = reasoner.reason(QUESTION, strategy=strategy, max_tokens=64, seed=1)
        took = f"{result.usage.completion_tokens} tokens, {result.timings.total_s:.1f} s"
        print(f"{strategy.name:<17} {result.answer or 'none'!s:.20}  ({len(result.branches)} branches, {took})")
