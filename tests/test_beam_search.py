"""Beam search over steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from rksc_agents import BeamSearch, ConfigError, ReasoningResult
from rksc_agents.reasoning import STRATEGIES
from rksc_agents.testing import scripted_reasoner
from rksc_agents.verify.callable_verifier import CallableVerifier
from rksc_agents.verify.gates import ExitConfig
from rksc_agents.verify.verifier import Claim


def ask(answers: Any, score: Callable[[str], float], *, exit: Any = "off", **settings: Any) -> ReasoningResult:
    """Ask a scripted model whose lines are scored; afterwards nothing is claimed."""

    def check(claim: Claim) -> float:
        return score(claim.text.strip())

    with scripted_reasoner({"Q": answers}) as reasoner:
        strategy = BeamSearch(**{"expansions": 12, "verifier": CallableVerifier(check), **settings})
        result = reasoner.reason("Q", strategy=strategy, exit=exit, seed=3)
        reasoner.clear_cache()
        assert reasoner.kv_bytes == 0
    return result


STEPS = {"A": 0.9, "A\nx": 0.2, "A\nx\n1": 0.7, "B": 0.5, "B\ny": 0.5, "B\ny\n2": 0.6}
LINES = ["A\nx\n1", "B\ny\n2"]


@pytest.mark.parametrize(
    ("aggregate", "text"), [("mean", LINES[0]), ("product", LINES[1]), ("min", LINES[1]), ("last", LINES[0])]
)
def test_a_lines_score_is_made_of_its_steps(aggregate: str, text: str) -> None:
    result = ask(LINES, STEPS.__getitem__, aggregate=aggregate)
    assert (result.text, result.rule, result.strategy) == (text, "verifier", "beam-search")


@pytest.mark.parametrize(("beams", "text"), [(1, LINES[0]), (2, LINES[1])])
def test_a_narrow_beam_loses_what_begins_worse(beams: int, text: str) -> None:
    result = ask(LINES, STEPS.__getitem__, aggregate="product", beams=beams)
    assert result.text == text
    assert len(result.branches) == 12 * (1 + 2 * beams)


@pytest.mark.parametrize("aggregate", ["mean", "product", "min", "last"])
@pytest.mark.parametrize("salt", [1, 2, 3])
def test_a_beam_that_keeps_all_finds_the_best_line(aggregate: str, salt: int) -> None:
    """The oracle is a look at every line."""
    lines = ["\n".join(steps) for steps in product("ab", "cd", "ef")]
    combine: Callable[[list[float]], float] = {
        "mean": lambda s: math.fsum(s) / len(s),
        "product": math.prod,
        "min": min,
        "last": lambda s: s[-1],
    }[aggregate]

    def score(line: str) -> float:
        return (sum(map(ord, line)) * (len(line) + 7) * salt * 7919 % 101) / 101

    def whole(line: str) -> float:
        return combine([score(line[:end]) for end in (1, 3, 5)])

    result = ask(lines, score, aggregate=aggregate, beams=99, expansions=24)
    assert whole(result.text) == pytest.approx(max(map(whole, lines)))


def test_a_finished_line_stays_and_the_search_ends_when_all_are_finished() -> None:
    scores = {"short": 0.8, "long": 0.9, "long\nx": 0.3, "long\nx\ny": 0.3}
    result = ask(["short", "long\nx\ny"], scores.__getitem__, beams=2)
    assert result.text == "short"
    assert max(branch.depth for branch in result.branches) == 2
    assert ask(["short", "long\nx\ny"], scores.__getitem__, beams=1).text == "long\nx\ny"


def test_better_finished_lines_push_growing_ones_out() -> None:
    scores = {"one": 0.8, "two": 0.7, "long": 0.6}
    result = ask(["one", "two", "long\nx"], scores.__getitem__, beams=2)
    assert (result.text, len(result.branches)) == ("one", 12)


def test_the_depth_ends_lines_and_the_last_step_holds_the_rest() -> None:
    result = ask("a\nb\nc\nd", lambda line: 0.5, depth=2)
    assert result.text == "a\nb\nc\nd"
    assert [b.depth for b in result.branches].count(1) == 12


def test_every_step_is_verified_however_sure_the_model_is() -> None:
    result = ask(LINES, STEPS.__getitem__, exit=ExitConfig(confidence=0.0), aggregate="product")
    assert (result.text, result.verification.skipped, result.verification.verified) == (LINES[1], 0, 6)


def test_equal_steps_take_one_place() -> None:
    answers = {"a\nx": 9, "b\ny": 1}
    worth = {"a": 0.9, "b": 0.5, "a\nx": 0.0, "b\ny": 1.0}
    assert ask(answers, worth.__getitem__, beams=2).text == "b\ny"
    assert ask(answers, worth.__getitem__, beams=2, dedupe=False).text == "a\nx"


def test_blank_steps_are_given_up() -> None:
    assert ask("\n\nx", lambda line: 0.5).winner == 0
    assert ask({"\n\nx": 1, "a\nb": 1}, lambda line: 0.5).text == "a\nb"


def test_settings_are_checked() -> None:
    assert STRATEGIES["beam-search"] is BeamSearch
    for wrong in ({"aggregate": "sum"}, {"beams": 0}, {"delimiter": ""}, {"proposals": 3}):
        with pytest.raises(ConfigError):
            BeamSearch(**wrong)
