"""A question, eight branches, the answer that most of them give, and the tree of the run.

python examples/01_quickstart.py
"""

from rksc_agents import RKSCReasoner

QUESTION = "A farmer has 12 cows. He sells 5 and buys 3 more. How many cows does he have now?"

with RKSCReasoner.from_pretrained() as reasoner:
    result = reasoner.reason(QUESTION, max_tokens=96, seed=0)
print(result.answer)
for vote in result.votes:
    print(f"  {vote.answer}: {len(vote.branches)} branches")
print(result.trace)
