"""Game of 24: a tree of thought against best-of-n with as many generated tokens, both checked by the rules.

    python examples/04_game_of_24.py --limit 20

The file of puzzles has one JSON object per line with the four numbers as `question`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rksc_agents import BestOfN, CallableVerifier, ReasoningResult, RKSCReasoner, TreeOfThought
from rksc_agents.questions import read_questions
from rksc_agents.verify.checkers import game24

PUZZLES = Path(__file__).parent.parent / "tests" / "data" / "game24_small.jsonl"
SHOWN = {
    "4 4 6 8": "4 + 8 = 12 (left: 4 6 12)\n6 - 4 = 2 (left: 2 12)\n2 * 12 = 24 (left: 24)",
    "2 3 5 9": "5 - 2 = 3 (left: 3 3 9)\n9 * 3 = 27 (left: 3 27)\n27 - 3 = 24 (left: 24)",
    "1 1 3 8": "1 * 1 = 1 (left: 1 3 8)\n1 * 3 = 3 (left: 3 8)\n3 * 8 = 24 (left: 24)",
}


def conversation(numbers: str) -> list[dict[str, str]]:
    """The puzzle behind three solved ones."""
    messages = [{"role": "system", "content": "Make 24 from four numbers. Each line takes two numbers that are left."}]
    for puzzle, solution in SHOWN.items():
        messages += [{"role": "user", "content": puzzle}, {"role": "assistant", "content": solution}]
    return [*messages, {"role": "user", "content": numbers}]


def solved(result: ReasoningResult) -> bool:
    """Whether a line reaches 24 by the rules."""
    return any(branch.verdict is not None and branch.verdict.score == 1.0 for branch in result.branches)


def main() -> None:
    """Solve each puzzle in both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=PUZZLES)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--limit", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    rules = CallableVerifier(game24)
    tree = TreeOfThought(proposals=8, breadth=5, depth=3, threshold=0.1, step_tokens=24, verifier=rules)
    counts = {"tree-of-thought": [0, 0], "best-of-n": [0, 0]}
    with RKSCReasoner.from_pretrained(options.model) as reasoner:
        for puzzle in read_questions(options.data, limit=options.limit):
            for seed in range(options.seeds):
                asked = conversation(puzzle.text)
                settings = {"temperature": 0.8, "stop": ["\n\n"], "seed": seed}
                grown = reasoner.reason(asked, strategy=tree, max_tokens=24, **settings)
                spent = grown.usage.completion_tokens
                drawn, branches = None, max(1, spent // 45)
                while drawn is None or drawn.usage.completion_tokens < spent:  # at least as many tokens
                    best = BestOfN(branches=branches, score="verifier", verifier=rules)
                    drawn = reasoner.reason(asked, strategy=best, max_tokens=72, **settings)
                    branches += max(1, branches // 5)
                for result in (grown, drawn):
                    counts[result.strategy][0] += solved(result)
                    counts[result.strategy][1] += result.usage.completion_tokens
                branches = len(drawn.branches)
                print(f"{puzzle.text}: tree {solved(grown)}, best-of-n {solved(drawn)} with {branches} branches")
    for name, (number, tokens) in counts.items():
        print(f"{name}: {number} solved with {tokens} tokens")


if __name__ == "__main__":
    main()
