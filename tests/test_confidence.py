"""Confidence measures: known values, bounds, and what an empty branch has."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rksc_agents.errors import ConfigError
from rksc_agents.verify.confidence import (
    CONFIDENCE,
    LOGPROB_FLOOR,
    Confidence,
    GroupMinimum,
    MeanLogProbability,
    MeanTopProbability,
    SelfCertainty,
    ceiling,
    confidence,
)

PROBABILITIES = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]])
LOGPROBS = PROBABILITIES.log()


def test_the_top_probability_is_the_papers() -> None:
    scores = MeanTopProbability().per_token(LOGPROBS)
    assert scores.tolist() == pytest.approx([0.5, 0.25])
    assert MeanTopProbability().of_branch([0.5, 0.25, 0.9], [-1.0, -2.0, -3.0]) == pytest.approx(0.55)


def test_the_mean_log_probability_reads_the_drawn_tokens() -> None:
    assert MeanLogProbability().of_branch([0.0, 0.0], [-1.0, -2.0]) == pytest.approx(-1.5)
    assert MeanLogProbability().of_branch([0.0, 0.0], [-math.inf, 0.0]) == pytest.approx(LOGPROB_FLOOR / 2)


def test_deepconf_token_confidence_is_minus_the_mean_of_the_top_k() -> None:
    log2 = math.log(2)
    assert GroupMinimum(top_k=2).per_token(LOGPROBS).tolist() == pytest.approx([1.5 * log2, 2 * log2])
    # a vocabulary smaller than top_k is taken whole
    assert GroupMinimum(top_k=20).per_token(LOGPROBS).tolist() == pytest.approx([2.25 * log2, 2 * log2])


def test_the_group_minimum_finds_the_shaky_stretch() -> None:
    scores = [9.0, 9.0, 1.0, 3.0, 9.0, 9.0]
    assert GroupMinimum(window=2).of_branch(scores, []) == pytest.approx(2.0)
    assert GroupMinimum(window=1).of_branch(scores, []) == pytest.approx(1.0)
    assert GroupMinimum(window=50).of_branch(scores, []) == pytest.approx(40 / 6)


@given(
    scores=st.lists(st.floats(0, 100), min_size=1, max_size=40),
    window=st.integers(1, 50),
)
def test_the_group_minimum_equals_the_plain_definition(scores: list[float], window: int) -> None:
    width = min(window, len(scores))
    windows = [scores[i : i + width] for i in range(len(scores) - width + 1)]
    expected = min(math.fsum(w) / width for w in windows)
    assert GroupMinimum(window=window).of_branch(scores, []) == pytest.approx(expected, abs=1e-9)


def test_self_certainty_is_the_divergence_from_the_uniform_distribution() -> None:
    scores = SelfCertainty().per_token(LOGPROBS)
    uniform = torch.full_like(PROBABILITIES, 0.25)
    expected = (uniform * (uniform.log() - LOGPROBS)).sum(-1)
    assert scores.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert scores[1].item() == pytest.approx(0.0, abs=1e-6)
    assert SelfCertainty().of_branch([1.0, 2.0, 6.0], []) == pytest.approx(3.0)


@given(logits=st.lists(st.floats(-30, 30), min_size=2, max_size=50))
def test_a_more_peaked_distribution_is_surer_in_every_measure(logits: list[float]) -> None:
    flat = torch.tensor([logits])
    both = torch.cat([flat, flat * 2]).log_softmax(-1)
    for measure in CONFIDENCE.values():
        low, high = measure.per_token(both).tolist()
        assert high >= low - 1e-4


@pytest.mark.parametrize("measure", CONFIDENCE.values(), ids=lambda m: m.name)
def test_an_empty_branch_and_ruled_out_tokens_have_finite_scores(measure: Confidence) -> None:
    empty = measure.of_branch([], [])
    assert math.isfinite(empty)
    assert empty <= measure.of_branch([0.1, 0.2], [-5.0, -6.0])
    masked = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert measure.per_token(masked).isfinite().all()


def test_empty_branches_have_the_lowest_value() -> None:
    values = {name: measure.of_branch([], []) for name, measure in CONFIDENCE.items()}
    assert values == {
        "mean-top-probability": 0.0,
        "mean-log-probability": LOGPROB_FLOOR,
        "group-minimum": 0.0,
        "self-certainty": 0.0,
    }


def test_ceilings_bound_what_a_measure_can_have() -> None:
    assert [ceiling(m) for m in CONFIDENCE.values()] == [1.0, 0.0, math.inf, math.inf]
    certain = torch.tensor([[0.0, -torch.inf]])
    assert MeanTopProbability().per_token(certain).item() == ceiling(MeanTopProbability())


def test_measures_resolve_by_name_or_pass_through() -> None:
    assert confidence("mean-top-probability") == MeanTopProbability()
    own = GroupMinimum(window=8)
    assert confidence(own) is own
    assert all(confidence(name).name == name for name in CONFIDENCE)


@pytest.mark.parametrize("bad", ["entropy", "", 3, None, MeanTopProbability])
def test_unknown_measures_are_refused_with_the_names(bad: object) -> None:
    with pytest.raises(ConfigError, match="mean-top-probability, mean-log-probability, group-minimum, self-certainty"):
        confidence(bad)


@pytest.mark.parametrize("fields", [{"window": 0}, {"top_k": 0}])
def test_a_group_needs_a_token(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="from 1"):
        GroupMinimum(**fields)


def test_measures_are_frozen() -> None:
    with pytest.raises(AttributeError):
        GroupMinimum().window = 3
    with pytest.raises(TypeError):
        CONFIDENCE["mine"] = MeanTopProbability()
