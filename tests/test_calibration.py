"""Exact statistics against known values, decisions of settings, and the promise of the calibration."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rksc_agents.errors import ConfigError
from rksc_agents.verify.calibration import certify, learn_then_test, path, problems_needed
from rksc_agents.verify.decisions import (
    OFF,
    Observed,
    Result,
    Setting,
    best_of_n,
    early_log_odds,
    lead,
    outcome,
    weighted_vote,
)
from rksc_agents.verify.intervals import auc, average_ranks, binomial_cdf, clopper_pearson, spearman

# --- intervals


@given(st.integers(0, 60), st.data())
def test_the_binomial_is_the_sum_of_its_terms(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(-1, n + 1))
    p = data.draw(st.fractions(0, 1, max_denominator=50))
    exact = sum((math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(min(k, n) + 1)), Fraction(0))
    assert binomial_cdf(k, n, float(p)) == pytest.approx(float(exact), rel=1e-9, abs=1e-14)


def test_the_binomial_stays_right_for_many_trials() -> None:
    assert binomial_cdf(0, 100_000, 0.001) == pytest.approx(math.exp(100_000 * math.log1p(-0.001)), rel=1e-12)
    assert binomial_cdf(90_000, 100_000, 0.001) == 1.0
    n, half = 100_000, 50_000  # symmetric: half of the middle term above one half
    middle = math.comb(n, half) / 2**n
    assert binomial_cdf(half, n, 0.5) == pytest.approx(0.5 + middle / 2, rel=1e-9)
    small = sum(Fraction(math.comb(1000, j), 10**1000) * 9 ** (1000 - j) for j in range(41))
    assert binomial_cdf(40, 1000, 0.1) == pytest.approx(float(small), rel=1e-10)


def test_clopper_pearson_gives_published_values() -> None:
    assert clopper_pearson(0, 100) == pytest.approx((0.0, 1 - 0.025 ** (1 / 100)))
    assert clopper_pearson(10, 10) == pytest.approx((0.025 ** (1 / 10), 1.0))
    assert clopper_pearson(5, 10) == pytest.approx((0.18709, 0.81291), abs=1e-5)
    assert clopper_pearson(1, 10, 0.90) == pytest.approx((0.005116, 0.394163), abs=1e-6)


def test_auc_counts_pairs_and_ties_half() -> None:
    assert auc([0.1, 0.4, 0.35, 0.8], [False, False, True, True]) == 0.75
    assert auc([1.0, 1.0, 2.0], [False, True, True]) == 0.75
    with pytest.raises(ConfigError, match="class"):
        auc([0.1, 0.2], [True, True])
    with pytest.raises(ConfigError, match="NaN"):
        auc([0.1, math.nan], [True, False])


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_auc_is_the_share_of_pairs(rows: list[tuple[int, bool]]) -> None:
    yes, no = [s for s, label in rows if label], [s for s, label in rows if not label]
    if yes and no:
        pairs = sum((a > b) + 0.5 * (a == b) for a in yes for b in no) / (len(yes) * len(no))
        assert auc([float(s) for s, _ in rows], [label for _, label in rows]) == pytest.approx(pairs)


def test_rank_correlation() -> None:
    assert average_ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert spearman([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # the textbook example of IQ against hours of television
    iq, hours = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110], [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert spearman(iq, hours) == pytest.approx(-29 / 165)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(math.sqrt(0.9))
    with pytest.raises(ConfigError, match="different"):
        spearman([1, 1], [1, 2])


def test_statistics_refuse_what_has_no_answer() -> None:
    for bad in (lambda: binomial_cdf(1, 2, 1.5), lambda: clopper_pearson(3, 2), lambda: clopper_pearson(0, 0)):
        with pytest.raises(ConfigError):
            bad()


# --- learn then test


def test_the_walk_stops_at_the_first_failure_even_if_a_later_one_would_pass() -> None:
    def row(errors: int) -> list[bool]:
        return [index < errors for index in range(100)]

    tested = learn_then_test([row(0), row(2), row(30), row(0)], alpha=0.1, delta=0.05)
    assert tested.accepted == 1
    assert (tested.n, tested.errors) == (100, 2)
    assert tested.p_value == binomial_cdf(2, 100, 0.1)
    assert [errors for errors, _ in tested.records] == [0, 2, 30]
    none = learn_then_test([row(30), row(0)], alpha=0.1, delta=0.05)
    assert none.accepted is None
    assert none.errors == 30
    assert len(none.records) == 1


def test_problems_needed_is_the_smallest_number() -> None:
    assert problems_needed(0.01, 0.05) == 299
    assert problems_needed(0.05, 0.05) == 59
    assert problems_needed(0.05, 0.05, errors=1) == 93  # from published tables of attribute sampling
    for errors in (0, 1, 7):
        n = problems_needed(0.02, 0.1, errors)
        assert binomial_cdf(errors, n, 0.02) <= 0.1 < binomial_cdf(errors, n - 1, 0.02)


def test_levels_outside_their_range_are_refused() -> None:
    for alpha, delta in ((0.0, 0.05), (0.05, 1.0)):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            problems_needed(alpha, delta)
    with pytest.raises(ConfigError):
        learn_then_test([], 0.1, 0.1)
    with pytest.raises(ConfigError):
        learn_then_test([[True], [True, False]], 0.1, 0.1)


def test_the_promise_holds_over_many_calibrations() -> None:
    alpha, delta, n, rounds = 0.05, 0.1, 150, 300
    risks = [0.005 * step for step in range(24)]  # true risks from 0 to 0.115: the loose half is unsafe
    rng = random.Random(7)
    broken = chosen = 0
    for _ in range(rounds):
        # a problem goes wrong under all settings looser than its own limit, so losses are nested as in practice
        limits = sorted(rng.random() for _ in range(n))
        wrong = [bisect_right(limits, risk) for risk in risks]
        losses = [[index < count for index in range(n)] for count in wrong]
        accepted = learn_then_test(losses, alpha, delta).accepted
        assert accepted is not None  # 150 problems are enough for the first
        broken += risks[accepted] > alpha
        chosen += accepted
    assert broken / rounds <= delta + 3 * math.sqrt(delta * (1 - delta) / rounds)
    assert broken > 0  # the promise is used up, not held by refusing everything
    assert chosen / rounds > 3


# --- decisions


def observed(
    confidences: list[float],
    keys: list[int],
    log_odds: list[float] | None = None,
    predicted: list[tuple[float, ...]] | None = None,
) -> Observed:
    count = len(keys)
    return Observed(
        confidences=tuple(confidences),
        answers=tuple(None if key < 0 else str(key) for key in keys),
        keys=tuple(keys),
        log_odds=tuple(log_odds or [0.0] * count),
        predicted=tuple(predicted or [()] * count),
    )


def test_the_lead_is_over_the_next_different_answer() -> None:
    assert lead([0.9, 0.88, 0.5], [1, 1, 2]) == (0, 0.9, pytest.approx(0.4))
    assert lead([0.5, 0.8, 0.8], [1, 2, 3]) == (1, 0.8, 0.0)
    assert lead([0.5, 0.7], [4, 4]) == (1, 0.7, 0.7)  # nobody disagrees
    assert lead([0.9, 0.6], [-1, -1]) == (0, 0.9, pytest.approx(0.3))  # abstentions do not agree with each other
    assert lead([0.9, 0.6, 0.2], [1, -1, 2]) == (0, 0.9, pytest.approx(0.3))


def test_a_branch_settles_at_the_first_layer_beyond_the_margin() -> None:
    problem = observed([0.5] * 3, [1, 2, 3], [5.0, 6.0, 7.0], [(1.0, -3.0), (2.0, 9.0), (1.9, 0.9)])
    scores, layers = early_log_odds(problem, (10, 20), (1.0, 0.5), 2.0)
    assert scores == (-3.0, 2.0, 7.0)
    assert layers == (20, 10, None)
    assert early_log_odds(problem, (10, 20), (1.0, 0.5), None) == ((5.0, 6.0, 7.0), (None, None, None))
    with pytest.raises(ConfigError, match="per layer"):
        early_log_odds(problem, (10,), (1.0,), 2.0)


def test_the_rules_that_decide() -> None:
    assert best_of_n([0.1, 0.2, 0.3], [5, 6, 7], [0.4, 0.9, 0.9]) == 6
    assert weighted_vote([], [5, 6, 5], [0.4, 0.7, 0.4]) == 5
    assert weighted_vote([], [6, 5], [0.5, 0.5]) == 6
    assert weighted_vote([], [-1, 5], [0.9, 0.1]) == 5
    assert weighted_vote([], [-1, -2], [0.1, 0.9]) == -2


def test_level_1_takes_the_top_answer_and_verifies_nothing() -> None:
    problem = observed([0.9, 0.7], [1, 2], [-4.0, 4.0])
    assert outcome(problem, OFF, (), (), best_of_n) == Result(2, False, (None, None))
    assert outcome(problem, Setting(0.9, 0.15), (), (), best_of_n) == Result(1, True, (0, 0))
    assert not outcome(problem, Setting(0.91, 0.0), (), (), best_of_n).skipped
    assert not outcome(problem, Setting(0.5, 0.25), (), (), best_of_n).skipped


def test_level_2_decides_by_the_lens_and_runs_until_the_last_branch_settles() -> None:
    problem = observed([0.9, 0.7], [1, 2], [-4.0, 4.0], [(3.0, 3.0), (0.5, -3.0)])
    early = Setting(margin=2.0)
    assert outcome(problem, early, (10, 20), (1.0, 1.0), best_of_n) == Result(1, False, (20, 20))
    undecided = observed([0.9, 0.7], [1, 2], [-4.0, 4.0], [(3.0, 3.0), (0.5, 0.5)])
    assert outcome(undecided, early, (10, 20), (1.0, 1.0), best_of_n) == Result(2, False, (None, None))


def test_abstaining_branches_are_different_decisions() -> None:
    problem = observed([0.9, 0.7], [-1, -1], [-4.0, 4.0])
    full, skip = outcome(problem, OFF, (), (), best_of_n), outcome(problem, Setting(0.5), (), (), best_of_n)
    assert full.decision == -2
    assert skip.decision == -1


def test_extreme_log_odds_do_not_overflow() -> None:
    assert outcome(observed([0.5, 0.5], [1, 2], [-2000.0, 2000.0]), OFF, (), (), weighted_vote).decision == 2


def test_a_problem_is_checked() -> None:
    for fields in ({"keys": (1,)}, {"log_odds": (0.0, math.nan)}, {"correct": (True,)}):
        with pytest.raises(ConfigError):
            Observed(
                **(
                    {
                        "confidences": (0.5, 0.5),
                        "answers": (None, None),
                        "keys": (1, 2),
                        "log_odds": (0.0, 0.0),
                        "predicted": ((), ()),
                    }
                    | fields
                )
            )


# --- certify


def skipping(count: int, rng: random.Random, rate: float) -> list[Observed]:
    """Two branches; the verifier overrules the top one with a probability of rate * (1 - its confidence)."""
    problems = []
    for _ in range(count):
        top = rng.random()
        verdict = -3.0 if rng.random() < rate * (1 - top) else 3.0
        problems.append(observed([top, 0.0], [1, 2], [verdict, 0.0]))
    return problems


def test_the_promise_of_certify_holds_against_the_true_risk() -> None:
    alpha, delta, rate, rounds = 0.05, 0.2, 0.6, 150
    rng = random.Random(3)
    broken, skipped = 0, 0.0
    for _ in range(rounds):
        fit, test = skipping(25, rng, rate), skipping(100, rng, rate)
        found = certify(fit, test, layers=(), errors=(), total_layers=30, alpha=alpha, delta=delta, decide=best_of_n)
        threshold = 1.0 if found.setting.confidence is None else found.setting.confidence
        broken += rate * (1 - threshold) ** 2 / 2 > alpha  # integral of rate * (1 - c) over the skipped
        skipped += found.skip_rate
    assert 0 < broken / rounds <= delta + 3 * math.sqrt(delta * (1 - delta) / rounds)
    assert skipped / rounds > 0.15  # and it saves something: at the threshold of alpha it would be 0.41


def exiting(count: int, rng: random.Random, noise: float, early_skip: float = 0.0) -> list[Observed]:
    """Four branches with a lens of two layers; with probability early_skip the top branch is one to overrule."""
    problems = []
    for _ in range(count):
        log_odds = [rng.gauss(0, 3) for _ in range(4)]
        best = max(range(4), key=log_odds.__getitem__)
        top = (best + 1) % 4 if rng.random() < early_skip else best
        confidences = [0.9 + 0.1 * rng.random() if b == top else 0.3 * rng.random() for b in range(4)]
        predicted = [(x + rng.gauss(0, 2 * noise), x + rng.gauss(0, noise)) for x in log_odds]
        problems.append(observed(confidences, [0, 1, 2, 3], log_odds, predicted))
    return problems


def test_everything_off_is_first_and_the_path_loosens_step_by_step() -> None:
    fit = exiting(60, random.Random(1), 0.2)
    settings = path(fit, layers=(10, 20), errors=(0.4, 0.2), total_layers=30, decide=best_of_n)
    assert settings[0] == OFF
    assert 20 <= len(settings) <= 24
    assert len(set(settings)) == len(settings)
    for strict, loose in itertools.pairwise(settings):
        assert (strict.margin == loose.margin) != ((strict.confidence, strict.gap) == (loose.confidence, loose.gap))
        assert (loose.confidence or 0.0) <= (strict.confidence or math.inf)
        assert strict.margin != 0.5
        assert loose.confidence is None or strict.confidence is None or loose.gap <= strict.gap
        assert (loose.margin or math.inf) <= (strict.margin or math.inf)
    assert settings[-1].margin == pytest.approx(0.5)
    assert next(s.margin for s in settings if s.margin) == pytest.approx(6.0)
    assert settings[-1].confidence == min(max(problem.confidences) for problem in fit)


def test_gaps_are_never_negative() -> None:
    # of a measure below 0, such as the mean log-probability, the lead of branches that all agree is below 0 too
    fit = [observed([-0.1 * step, -0.5], [1, 1 + step % 2], [3.0, 0.0]) for step in range(1, 20)]
    gaps = [s.gap for s in path(fit, layers=(), errors=(), total_layers=30, decide=best_of_n)]
    assert min(gaps) == 0.0
    assert max(gaps) > 0.0


def test_a_level_that_cannot_be_trusted_does_not_stop_the_other() -> None:
    rng = random.Random(5)
    sure = {"layers": (10, 20), "errors": (0.02, 0.01), "total_layers": 30, "decide": best_of_n}
    found = certify(exiting(60, rng, 0.01, 0.5), exiting(200, rng, 0.01, 0.5), alpha=0.05, delta=0.05, **sure)
    assert found.setting.margin is not None
    assert found.skip_rate < 0.1
    assert found.layers_saved > 0.5
    vague = {"layers": (10, 20), "errors": (0.1, 0.1), "total_layers": 30, "decide": best_of_n}
    found = certify(exiting(60, rng, 30.0), exiting(200, rng, 30.0), alpha=0.05, delta=0.05, **vague)
    assert found.setting.margin is None
    assert found.skip_rate == found.work_saved > 0.9
    assert found.risk_among_skipped == 0.0


def test_the_certificate_counts_what_it_says() -> None:
    rng = random.Random(11)
    layers, errors, test = (10, 20), (0.6, 0.3), exiting(150, rng, 0.3, 0.1)
    found = certify(
        exiting(50, rng, 0.3, 0.1),
        test,
        layers=layers,
        errors=errors,
        total_layers=30,
        alpha=0.08,
        delta=0.1,
        decide=best_of_n,
    )
    results = [outcome(problem, found.setting, layers, errors, best_of_n) for problem in test]
    full = [outcome(problem, OFF, layers, errors, best_of_n) for problem in test]
    wrong = [a.decision != b.decision for a, b in zip(results, full, strict=True)]
    skipped = [result.skipped for result in results]
    run = [[30 if layer is None else layer for layer in result.layers_run] for result in results]
    assert 0 < sum(skipped) < len(test)
    assert sum(wrong) > 0
    assert (found.n, found.errors, found.skipped) == (150, sum(wrong), sum(skipped))
    assert found.p_value == binomial_cdf(found.errors, 150, 0.08) <= 0.1
    assert found.skip_rate == pytest.approx(sum(skipped) / 150)
    among = [w for w, s in zip(wrong, skipped, strict=True) if s]
    assert found.risk_among_skipped == pytest.approx(sum(among) / len(among))
    assert found.work_saved == pytest.approx(1 - sum(map(sum, run)) / (150 * 4 * 30))
    verified = [row for row, s in zip(run, skipped, strict=True) if not s]
    assert found.layers_saved == pytest.approx(1 - sum(map(sum, verified)) / (len(verified) * 4 * 30))
    last = max(index for index, point in enumerate(found.curve) if point.accepted)
    assert [point.accepted for point in found.curve] == [index <= last for index in range(len(found.curve))]
    point = found.curve[last]
    assert Setting(point.confidence, point.gap, point.margin) == found.setting
    assert (point.errors, point.work_saved) == (found.errors, found.work_saved)
    assert point.risk == pytest.approx(found.errors / 150)
    assert found.curve[0].risk == found.curve[0].work_saved == 0.0
    assert found.problems_missing == 0


def test_too_few_problems_switch_everything_off_and_say_how_many_are_missing() -> None:
    rng = random.Random(2)
    found = certify(
        skipping(20, rng, 0.0),
        skipping(100, rng, 0.0),
        layers=(),
        errors=(),
        total_layers=30,
        alpha=0.01,
        delta=0.05,
        decide=weighted_vote,
    )
    assert found.setting == OFF
    assert not any(point.accepted for point in found.curve)
    assert found.problems_missing == 199
    assert found.errors == 0
    assert found.p_value == pytest.approx(0.99**100)
    assert found.skip_rate == found.work_saved == 0.0
    assert found.risk_among_skipped is None


def test_missing_problems_and_wrong_layers_are_refused() -> None:
    one = skipping(1, random.Random(0), 0.5)
    usual = {"errors": (), "total_layers": 30, "alpha": 0.1, "delta": 0.1, "decide": best_of_n}
    with pytest.raises(ConfigError, match="more questions"):
        certify(one, [], layers=(), **usual)
    with pytest.raises(ConfigError, match="1 problem"):
        certify([], one, layers=(), **usual)
    with pytest.raises(ConfigError, match="last layer"):
        certify(one, one, layers=(30,), **usual)
