"""Tree of thought: what the searches find, what they give up, and that a small KV budget changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
from tiny_models import tiny_model

from rksc_agents import ConfigError, EngineConfig, ReasoningResult, RKSCReasoner, Sampling, TreeOfThought
from rksc_agents.cache.budget import Budget
from rksc_agents.model.runners import make_runner
from rksc_agents.model.text import TextCodec
from rksc_agents.reasoning import STRATEGIES
from rksc_agents.reasoning.problem import Problem
from rksc_agents.testing import scripted_reasoner, scripted_tokenizer
from rksc_agents.verify.callable_verifier import CallableVerifier
from rksc_agents.verify.gates import ExitConfig
from rksc_agents.verify.verifier import Claim


class Judge:
    """Scores a line by its steps, and remembers what it was asked."""

    def __init__(self, scores: dict[str, float] | Callable[[str], float]) -> None:
        self._of = scores.__getitem__ if isinstance(scores, dict) else scores
        self.asked: list[tuple[str, bool]] = []

    def __call__(self, claim: Claim) -> float:
        line = claim.text.strip()
        self.asked.append((line, claim.finished))
        return self._of(line)


def ask(answers: Any, judge: Judge | None = None, *, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Ask a scripted model; afterwards nothing is claimed."""
    if judge is not None:
        settings["verifier"] = CallableVerifier(judge, "judge", always=not settings.pop("spared", False))
    with scripted_reasoner({"Q": answers}, context=settings.pop("context", 4096)) as reasoner:
        strategy = TreeOfThought(**{"proposals": 12, **settings})
        result = reasoner.reason("Q", strategy=strategy, **{"exit": "off", "seed": 3, **(options or {})})
        reasoner.clear_cache()
        assert reasoner.kv_bytes == 0
    return result


def expanded(result: ReasoningResult) -> list[str]:
    """The thoughts that were gone on from, in order."""
    parents = dict.fromkeys(b.parent for b in result.branches if b.parent is not None)
    return [result.branches[p].text for p in parents]


# -- searching ------------------------------------------------------------------------------------

TRAP = ["A\ndead", "B\ngold"]
TRAP_SCORES = {"A": 0.9, "B": 0.5, "A\ndead": 0.1, "B\ngold": 1.0}


@pytest.mark.parametrize(("breadth", "text"), [(1, "A\ndead"), (2, "B\ngold")])
def test_bfs_finds_behind_a_worse_step_what_its_breadth_allows(breadth: int, text: str) -> None:
    judge = Judge(TRAP_SCORES)
    result = ask(TRAP, judge, breadth=breadth, depth=2)
    assert (result.text, result.rule) == (text, "verifier")
    assert result.strategy == "tree-of-thought"
    winner = result.branches[result.winner]
    assert (winner.depth, winner.finish_reason, result.branches[winner.parent].text) == (1, "eos", text[0])
    assert len(result.branches) == 12 * (1 + breadth)
    assert result.usage.completion_tokens_winner == len(text) + 1
    assert sorted(judge.asked)[:2] == [("A", False), ("A\ndead", True)]


def test_dfs_comes_back_from_a_dead_end() -> None:
    judge = Judge(TRAP_SCORES)
    result = ask(TRAP, judge, search="dfs", breadth=1, depth=2, threshold=0.3, budget=99)
    assert result.text == "B\ngold"
    assert expanded(result) == ["A", "B"]
    assert [line for line, _ in judge.asked[2:]] == ["A\ndead", "B\ngold"]


def test_dfs_ends_with_the_leaf_that_nothing_can_beat() -> None:
    result = ask(TRAP, Judge({**TRAP_SCORES, "A\ndead": 1.0}), search="dfs", breadth=9, depth=2)
    assert (result.text, expanded(result)) == ("A\ndead", ["A"])


DEEP = ["A\na\nend", "B\nb\nend"]
DEEP_SCORES = {"A": 0.6, "B": 0.5, "A\na": 0.2, "B\nb": 0.55, "A\na\nend": 0.9, "B\nb\nend": 0.8}


@pytest.mark.parametrize(
    ("search", "order", "text"),
    [("best-first", ["A", "B", "b"], "B\nb\nend"), ("dfs", ["A", "a"], "A\na\nend")],
)
def test_best_first_goes_on_from_the_best_thought_anywhere(search: str, order: list[str], text: str) -> None:
    result = ask(DEEP, Judge(DEEP_SCORES), search=search, breadth=1, depth=3, budget=99)
    assert (result.text, expanded(result)) == (text, order)


@pytest.mark.parametrize("search", ["dfs", "best-first"])
def test_the_budget_bounds_the_thoughts(search: str) -> None:
    result = ask(DEEP, Judge(DEEP_SCORES), search=search, depth=3, budget=30, breadth=9)
    assert len(result.branches) == 30
    assert [branch.depth for branch in result.branches].count(0) == 12


@pytest.mark.parametrize("search", ["bfs", "dfs", "best-first"])
def test_what_is_under_the_threshold_is_given_up(search: str) -> None:
    result = ask(DEEP, Judge(DEEP_SCORES), search=search, depth=3, threshold=0.3)
    assert result.text == "B\nb\nend"
    assert "a" not in expanded(result)


@pytest.mark.parametrize("search", ["bfs", "dfs", "best-first"])
def test_where_all_is_given_up_the_best_of_the_deepest_thoughts_answers(search: str) -> None:
    result = ask(DEEP, Judge(DEEP_SCORES), search=search, depth=3, threshold=0.58)
    assert result.text.strip() == "A\na"
    assert result.branches[result.winner].text == "a"
    assert result.answer == "A\na"


@pytest.mark.parametrize("search", ["bfs", "dfs", "best-first"])
@pytest.mark.parametrize("salt", ["x", "y", "z"])
def test_a_search_that_sees_all_finds_the_best_leaf(search: str, salt: str) -> None:
    """The oracle is a look at every line."""
    lines = ["\n".join(steps) for steps in product("ab", "cd", "ef")]
    judge = Judge(lambda line: noise(salt + line))
    result = ask(lines, judge, search=search, proposals=24, breadth=99, depth=3, budget=None)
    assert {line for line, finished in judge.asked if finished} == set(lines)
    assert result.text == max(lines, key=lambda line: noise(salt + line))


def noise(text: str) -> float:
    return int(hashlib.sha256(text.encode()).hexdigest()[:6], 16) / 16**6


# -- thoughts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dedupe", "asked"), [(True, 2), (False, 12)])
def test_equal_thoughts_of_one_parent_are_one(dedupe: bool, asked: int) -> None:
    judge = Judge(lambda line: 0.5)
    ask(["go  there\nx", "Go there \nx", "stay\nx"], judge, dedupe=dedupe, depth=2)
    assert sum(not finished for _, finished in judge.asked) == asked


def test_equal_thoughts_of_two_parents_are_two() -> None:
    judge = Judge(lambda line: 0.5)
    ask(["A\nx\n1", "B\nx\n1"], judge, depth=3)
    assert sorted(line for line, finished in judge.asked if not finished) == ["A", "A\nx", "B", "B\nx"]


def test_the_last_step_runs_to_the_lines_end() -> None:
    assert ask("a\nb\nc\nd", Judge(lambda line: 0.5), depth=2).text == "a\nb\nc\nd"


def test_a_line_may_end_before_the_last_step_and_competes_with_longer_ones() -> None:
    scores = {"short": 0.7, "long": 0.9, "long\nx": 0.6}
    assert ask(["short", "long\nx"], Judge(scores), depth=5).text == "short"
    assert ask(["short", "long\nx"], Judge({**scores, "long\nx": 0.8}), depth=5).text == "long\nx"


def test_the_requests_own_stop_text_ends_the_line() -> None:
    judge = Judge(lambda line: 0.5)
    result = ask("a\nthe answer is 4. STOP more\nb", judge, depth=5, options={"stop": "STOP"})
    assert (result.text, result.answer) == ("a\nthe answer is 4. ", "4")
    assert judge.asked == [("a", False), ("a\nthe answer is 4.", True)]
    assert result.branches[result.winner].finish_reason == "stop"
    result = ask("a\n\nb", judge, depth=5, options={"stop": "\n\n"})  # begins with the delimiter of the step before
    assert result.text == "a"


def test_a_step_that_is_too_long_goes_on_as_the_next() -> None:
    result = ask("abcdefgh", Judge(lambda line: 0.5), depth=3, step_tokens=3)
    assert [result.branches[i].text for i in (0, 12, 24)] == ["abc", "def", "gh"]
    assert result.text == "abcdefgh"


def test_blank_thoughts_are_given_up() -> None:
    judge = Judge(lambda line: 0.5)
    result = ask({"\n\n\nx": 1, "a\nb": 1}, judge, depth=2)
    assert ("", False) not in judge.asked
    assert result.text == "a\nb"
    assert ask("\n\n\nx", judge, depth=4).winner == 0


def test_a_full_context_ends_the_line() -> None:
    """Also where it is full just when a step is."""
    for context in range(16, 21):
        result = ask("a" * 99, Judge(lambda line: 0.5), depth=50, step_tokens=4, context=context)
        assert len(result.text) == context - 4  # of the prompt
        assert result.branches[result.winner].finish_reason == "length"


# -- judging and deciding -------------------------------------------------------------------------


def test_level_one_may_spare_the_leaves_but_no_step() -> None:
    judge = Judge(lambda line: 0.5)
    always = ask(TRAP, Judge(lambda line: 0.5), depth=2, options={"exit": ExitConfig(confidence=0.0)})
    assert always.verification.skipped == 0
    result = ask(TRAP, judge, depth=2, options={"exit": ExitConfig(confidence=0.0)}, spared=True)
    assert result.rule == "confidence"
    assert sorted(judge.asked) == [("A", False), ("B", False)]
    assert result.verification.skipped == 2
    assert result.branches[result.winner].verdict.skipped


def test_by_confidence_the_surer_step_wins() -> None:
    answers = {"A\nxx": 6, "B\nx": 1, "B\ny": 1, "B\nz": 1}
    result = ask(answers, evaluator="confidence", breadth=1, depth=2)
    assert (result.text, result.rule) == ("A\nxx", "confidence")
    assert result.verification.verifier is None


@pytest.mark.parametrize(
    ("confidence", "threshold"),
    [("mean-log-probability", -50.0), ("group-minimum", 0.0), ("self-certainty", 0.0)],
)
def test_any_measure_of_confidence_can_judge(confidence: str, threshold: float) -> None:
    settings = {"confidence": confidence, "threshold": threshold, "final": "vote"}
    result = ask(["x\n4", "y\n4"], evaluator="confidence", depth=2, **settings)
    assert (result.answer, result.rule) == ("4", "majority")
    assert sum(vote.weight for vote in result.votes) == pytest.approx(1.0)


def test_the_model_names_the_best_of_each_parents_thoughts(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[list[str]] = []

    async def name_last(self: Problem, texts: Sequence[str]) -> int:
        shown.append(sorted(text.strip() for text in texts))
        return max(range(len(texts)), key=lambda i: texts[i])

    monkeypatch.setattr(Problem, "name_best", name_last)
    result = ask(["A\na", "B\nb", "B\nc"], evaluator="vote", breadth=2, depth=2)
    assert (result.text, result.rule) == ("B\nc", "vote")
    assert shown == [["A", "B"], ["A\na", "B\nb", "B\nc"]]


def test_thoughts_that_do_not_fit_are_judged_by_confidence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def name_none(self: Problem, texts: Sequence[str]) -> None:
        return None

    monkeypatch.setattr(Problem, "name_best", name_none)
    with pytest.warns(UserWarning, match="judged by their confidence") as caught:
        result = ask({"A\nx\ny": 6, "B\nx\ny": 1, "B\nx\nz": 1}, evaluator="vote", breadth=2, depth=3)
    assert len(caught) == 1
    assert (result.text, result.rule) == ("A\nx\ny", "confidence")


@pytest.mark.parametrize(("final", "answer", "rule"), [("best", "7", "verifier"), ("vote", "5", "majority")])
def test_leaves_vote_with_their_scores(final: str, answer: str, rule: str) -> None:
    lines = ["a\nIt is 5.", "b\nSo it is 5.", "c\nIt is 7."]
    judge = Judge(lambda line: 0.9 if line.endswith("7.") else 0.5)
    result = ask(lines, judge, final=final, depth=2)
    assert (result.answer, result.rule) == (answer, rule)
    if final == "vote":
        assert [(vote.answer, vote.weight) for vote in result.votes] == [("5", 1.0), ("7", 0.9)]


def test_settings_are_checked() -> None:
    assert STRATEGIES["tree-of-thought"] is TreeOfThought
    for wrong in (
        {"threshold": 1.5},
        {"evaluator": "confidence", "confidence": "mean-log-probability"},
        {"budget": 9},
        {"search": "widest"},
        {"delimiter": ""},
        {"proposals": 0},
        {"steps": 3},
    ):
        with pytest.raises(ConfigError):
            TreeOfThought(**wrong)
    assert TreeOfThought(threshold=1.0, search="dfs", budget=9).budget == 9


# -- a small KV budget ----------------------------------------------------------------------------


def tiny_reasoner(kv_limit: int) -> RKSCReasoner:
    """A random model that writes bytes."""
    tokenizer, settings = scripted_tokenizer(), EngineConfig(fast_linears=False)
    model = tiny_model("Llama", vocab_size=len(tokenizer))
    return RKSCReasoner(
        lambda budget: make_runner(model, budget, settings),
        TextCodec(tokenizer),
        name="tiny",
        context=256,
        kv_limit=kv_limit,
        engine=settings,
        exit="off",
        model_hash="tiny",
        sampling=Sampling(temperature=1.0, max_tokens=8, ignore_eos=True, seed=1),
    )


@pytest.mark.parametrize(("search", "share"), [("best-first", 4), ("bfs", 2)])
def test_a_deep_tree_under_a_small_budget_finds_the_same(
    search: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breadth first gives up so much so soon that its best line alone is more than a quarter of its peak."""
    worth = Judge(lambda line: 0.5 * noise(line) + 0.5 * min(1.0, len(line) / 150) ** 0.1 * (search == "bfs"))
    strategy = TreeOfThought(
        depth=12,
        search=search,
        delimiter="\x00",
        step_tokens=8,
        verifier=CallableVerifier(worth, "noise"),
        **({} if search == "bfs" else {"budget": 320, "breadth": 4}),
    )
    with tiny_reasoner(10**9) as reasoner:
        free = reasoner.reason("Why?", strategy=strategy)
        peak = reasoner._engine.budget.peak
    assert free.kv.evicted == free.kv.recomputed == 0

    hold = Budget.hold

    def checked(budget: Budget, nbytes: int) -> None:
        hold(budget, nbytes)
        assert budget.held <= budget.limit

    monkeypatch.setattr(Budget, "hold", checked)
    with tiny_reasoner(peak // share) as reasoner:
        tight = reasoner.reason("Why?", strategy=strategy)
        assert 0 < reasoner._engine.budget.peak <= peak // share
        reasoner.clear_cache()
        assert reasoner.kv_bytes == 0
    assert free.branches[free.winner].depth == 11
    assert (tight.text, tight.winner) == (free.text, free.winner)
    assert [b.tokens for b in tight.branches] == [b.tokens for b in free.branches]
    assert tight.kv.evicted > 0
    assert tight.kv.recomputed > 0
