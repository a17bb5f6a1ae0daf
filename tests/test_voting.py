"""Votes: groups, order, when a vote is settled (against all completions), posterior, weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from operator import eq

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rksc_agents.errors import ConfigError
from rksc_agents.reasoning.equivalence import equivalent
from rksc_agents.reasoning.voting import Ballot, bounded_weight, softmax_weights


def ballot_of(
    answers: dict[int, str | None],
    weights: dict[int, float] | None = None,
    same: Callable[[str, str], bool] = equivalent,
) -> Ballot:
    ballot = Ballot(same)
    for branch, answer in answers.items():
        ballot.add(branch, answer, (weights or {}).get(branch, 1.0))
    return ballot


def winner(ballot: Ballot) -> str | None:
    standing = ballot.standing()
    return standing[0].answer if standing else None


def test_equivalent_answers_count_together_under_the_first_spelling() -> None:
    ballot = ballot_of({0: "19", 1: "18", 2: "$18.00", 3: None, 4: "18 dollars"})
    votes = ballot.standing()
    assert [(v.answer, v.weight, v.branches) for v in votes] == [("18", 3.0, (1, 2, 4)), ("19", 1.0, (0,))]
    assert ballot.cast == 5


def test_ties_go_to_the_earliest_branch_whatever_the_order_of_arrival() -> None:
    for order in itertools.permutations(range(4)):
        answers = {0: "7", 1: "8", 2: "8", 3: "7"}
        votes = ballot_of({branch: answers[branch] for branch in order}).standing()
        assert [(v.answer, v.branches) for v in votes] == [("7", (0, 3)), ("8", (1, 2))]


def test_weights_are_summed() -> None:
    ballot = ballot_of({0: "1", 1: "2", 2: "2"}, {0: 0.9, 1: 0.25, 2: 0.5})
    assert [(v.answer, v.weight) for v in ballot.standing()] == [("1", 0.9), ("2", 0.75)]


def test_an_empty_ballot_has_no_winner_and_is_not_decided() -> None:
    ballot = ballot_of({0: None})
    assert ballot.standing() == ()
    assert not ballot.decided(0)
    assert not ballot.decided(3)
    assert ballot.posterior() == 0.5


@pytest.mark.parametrize("branch", [0, -1])
def test_a_branch_votes_once(branch: int) -> None:
    ballot = ballot_of({0: "1"})
    with pytest.raises(ConfigError, match=f"branch {branch}"):
        ballot.add(branch, "2")
    assert ballot.cast == 1


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_weights_are_finite_and_not_negative(weight: float) -> None:
    ballot = Ballot()
    with pytest.raises(ConfigError, match="weight"):
        ballot.add(0, "1", weight)
    assert ballot.cast == 0


def test_a_failing_comparison_leaves_the_ballot_as_it_was() -> None:
    def fails(a: str, b: str) -> bool:
        raise RuntimeError

    ballot = Ballot(same=fails)
    ballot.add(0, "a")
    with pytest.raises(RuntimeError):
        ballot.add(1, "b")
    assert ballot.cast == 1


def finals(
    answers: dict[int, str | None], weights: dict[int, float], missing: list[int], bounds: list[float]
) -> set[str | None]:
    """The winners over every way in which the missing branches could vote."""
    votes = list(itertools.product(["1", "2", "3", "4", None], bounds))
    found = set()
    for completion in itertools.product(votes, repeat=len(missing)):
        more = dict(zip(missing, completion, strict=True))
        every = answers | {branch: answer for branch, (answer, _) in more.items()}
        found.add(winner(ballot_of(every, weights | {branch: weight for branch, (_, weight) in more.items()}, eq)))
    return found


@given(
    seen=st.dictionaries(st.integers(0, 7), st.sampled_from(["1", "2", "3", None]), max_size=8),
    total=st.integers(0, 8),
)
@settings(max_examples=100, deadline=None)
def test_decided_is_true_exactly_when_no_completion_changes_the_winner(seen: dict[int, str | None], total: int) -> None:
    answers = {branch: answer for branch, answer in seen.items() if branch < total}
    missing = [branch for branch in range(total) if branch not in answers]
    assume(len(missing) <= 4)
    ballot = ballot_of(answers)
    assume(winner(ballot) is not None)
    assert ballot.decided(len(missing)) == (finals(answers, {}, missing, [1.0]) == {winner(ballot)})


@given(
    seen=st.dictionaries(st.integers(0, 5), st.sampled_from(["1", "2", "3"]), min_size=1, max_size=5),
    halves=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    bound=st.sampled_from([0.5, 1.0, 2.0]),
)
@settings(max_examples=40, deadline=None)
def test_decided_bounds_weighted_votes_too(seen: dict[int, str], halves: list[int], bound: float) -> None:
    weights = {branch: halves[branch] / 2 for branch in seen}
    missing = [branch for branch in range(6) if branch not in seen]
    assume(len(missing) <= 3)
    ballot = ballot_of(dict(seen), weights)
    expected = finals(dict(seen), weights, missing, [0.0, bound]) == {winner(ballot)}
    assert ballot.decided(len(missing), max_weight=bound) == expected


def test_where_indices_have_gaps_any_of_them_may_come() -> None:
    ballot = ballot_of({5: "1", 9: "1", 7: "2"})
    assert not ballot.decided(1)  # a tie could be won by an earlier branch
    assert ballot_of({5: "1", 9: "1", 8: "1", 7: "2"}).decided(1)


@pytest.mark.parametrize("arguments", [{"remaining": -1}, {"remaining": 1, "max_weight": math.inf}])
def test_decided_refuses_nonsense(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="decided"):
        ballot_of({0: "1"}).decided(**arguments)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(1, 0, 0.75), (3, 0, 0.9375), (2, 1, 0.6875), (4, 4, 0.5), (5, 1, 0.9375), (10, 0, 1 - 2**-11)],
)
def test_the_posterior_is_the_tail_of_a_beta(first: int, second: int, expected: float) -> None:
    answers = ["1"] * first + ["2"] * second + [None]
    assert ballot_of(dict(enumerate(answers))).posterior() == pytest.approx(expected, abs=1e-15)


@given(first=st.integers(0, 30), second=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_the_posterior_equals_the_integral(first: int, second: int) -> None:
    first, second = max(first, second), min(first, second)
    ballot = ballot_of(dict(enumerate(["1"] * first + ["2"] * second)))
    steps = 4000
    densities = [((i + 0.5) / steps) ** first * (1 - (i + 0.5) / steps) ** second for i in range(steps)]
    assert ballot.posterior() == pytest.approx(math.fsum(densities[steps // 2 :]) / math.fsum(densities), abs=1e-5)


def test_the_posterior_counts_branches_not_weights() -> None:
    heavy = ballot_of({0: "1", 1: "2", 2: "1"}, {0: 0.1, 1: 0.05, 2: 0.1})
    assert heavy.posterior() == ballot_of({0: "1", 1: "2", 2: "1"}).posterior() == 0.6875


def test_softmax_weights_have_known_values() -> None:
    assert softmax_weights([0.0, math.log(3)], 1.0) == pytest.approx((0.25, 0.75))
    assert softmax_weights([0.5, 0.5, 0.5], 0.1) == pytest.approx((1 / 3,) * 3)
    assert softmax_weights([], 1.0) == ()
    assert softmax_weights([0.2, 1.0], 1e-9) == (0.0, 1.0)
    assert softmax_weights([-1e6, 0.0], 100.0) == (0.0, 1.0)


@given(
    confidences=st.lists(st.floats(0, 1), min_size=2, max_size=12),
    temperature=st.floats(0.05, 10),
)
def test_bounded_weights_stand_in_the_proportions_of_the_softmax(confidences: list[float], temperature: float) -> None:
    shares = softmax_weights(confidences, temperature)
    weights = [bounded_weight(c, temperature) for c in confidences]
    assert math.fsum(shares) == pytest.approx(1.0)
    assert all(0.0 <= weight <= 1.0 for weight in weights)
    total = math.fsum(weights)
    assert [weight / total for weight in weights] == pytest.approx(list(shares), rel=1e-9)


def test_bounded_weights_need_a_ceiling() -> None:
    assert bounded_weight(0.0, 0.5, ceiling=0.0) == 1.0
    assert bounded_weight(1.0 + 1e-7) == 1.0
    for confidence, top in ((1.5, 1.0), (3.0, math.inf)):
        with pytest.raises(ConfigError, match="ceiling"):
            bounded_weight(confidence, 1.0, ceiling=top)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_the_temperature_of_a_vote_is_positive(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        softmax_weights([0.5], temperature)
    with pytest.raises(ConfigError, match="temperature"):
        bounded_weight(0.5, temperature)


def test_confidences_must_be_numbers() -> None:
    with pytest.raises(ConfigError, match="nan"):
        softmax_weights([0.5, math.nan])
