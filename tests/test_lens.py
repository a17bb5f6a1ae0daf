"""The fitted lens against regressions done the long way, and its file form."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rksc_agents.errors import ConfigError
from rksc_agents.verify.lens import RIDGES, FittedLens, cross_fit, fit_lens


def problem(rows: int, width: int, layers: int = 1, noise: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states with uneven scales and offsets, and log-odds that are a noisy linear function of them."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, layers, width, generator=generator, dtype=torch.float64)
    hidden = hidden * torch.linspace(0.2, 5.0, width) + torch.linspace(-3.0, 3.0, width)
    log_odds = hidden[:, -1] @ torch.randn(width, generator=generator, dtype=torch.float64) / width**0.5
    return hidden, log_odds + noise * torch.randn(rows, generator=generator, dtype=torch.float64) + 1.0


def slow_ridge(z: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Normal equations with an intercept column that is not penalised."""
    ones = torch.cat([z, torch.ones(len(z), 1, dtype=z.dtype)], 1)
    penalty = ridge * torch.eye(z.shape[1] + 1, dtype=z.dtype)
    penalty[-1, -1] = 0.0
    solution = torch.linalg.solve(ones.T @ ones + penalty, ones.T @ y)
    return solution[:-1], solution[-1]


@pytest.mark.parametrize(("rows", "width"), [(60, 9), (40, 40), (40, 120)])
def test_the_closed_form_is_the_normal_equations(rows: int, width: int) -> None:
    hidden, log_odds = problem(rows, width)
    x = hidden[:, 0]
    z = (x - x.mean(0)) / x.std(0, correction=0)
    weights, intercept = slow_ridge(z, log_odds, 10.0)
    lens = fit_lens([4], hidden, log_odds, ridge=10.0)
    assert torch.allclose(lens.predict(4, x).double(), z @ weights + intercept, atol=2e-4)
    assert lens.scale == pytest.approx(float(log_odds.std(correction=0)))
    assert lens.fitted_on == rows


@pytest.mark.parametrize(("rows", "width"), [(50, 7), (35, 80)])
@pytest.mark.parametrize("grouped", [False, True])
def test_held_out_predictions_are_those_of_fits_without_the_row_or_its_problem(
    rows: int, width: int, grouped: bool
) -> None:
    hidden, log_odds = problem(rows, width)
    groups = [row // 4 for row in range(rows)]
    lens, predicted = cross_fit([2], hidden, log_odds, ridge=3.0, groups=groups if grouped else None)
    x = hidden[:, 0]
    z = (x - x.mean(0)) / x.std(0, correction=0)
    slow = torch.empty(rows, dtype=torch.float64)
    for row in range(rows):
        kept = torch.tensor([groups[other] != groups[row] if grouped else other != row for other in range(rows)])
        weights, intercept = slow_ridge(z[kept], log_odds[kept], 3.0)
        slow[row] = z[row] @ weights + intercept
    assert torch.allclose(predicted[:, 0], slow, atol=1e-9)
    assert lens.error[0] == pytest.approx(float((log_odds - slow).square().mean().sqrt()))


def test_the_ridge_with_the_smallest_held_out_error_is_taken() -> None:
    hidden, log_odds = problem(80, 60, noise=2.0)
    errors = {ridge: fit_lens([1], hidden, log_odds, ridge=ridge).error[0] for ridge in RIDGES}
    best = min(errors, key=errors.__getitem__)
    assert best not in {RIDGES[0], RIDGES[-1]}  # so that neither "first" nor "last" would pass
    assert fit_lens([1], hidden, log_odds) == fit_lens([1], hidden, log_odds, ridge=best)


def test_each_layer_has_its_own_readout_and_error() -> None:
    hidden, log_odds = problem(200, 6, layers=2)  # only the second layer knows
    lens = fit_lens([3, 9], hidden, log_odds)
    assert lens.error[0] > 2 * lens.error[1]
    assert lens.error[1] == pytest.approx(0.5, rel=0.2)  # the noise is all that is left
    fresh, truth = problem(200, 6, layers=2)
    assert float((lens.predict(9, fresh[:, 1]) - truth).square().mean().sqrt()) < 0.6
    assert not torch.allclose(lens.predict(3, fresh[:, 0]), lens.predict(9, fresh[:, 0]))


def test_dimensions_that_do_not_vary_are_left_out() -> None:
    hidden, log_odds = problem(50, 5)
    hidden[:, 0, 2] = 7.0
    hidden[:, 0, 3] = 1000.0 + 1e-5 * torch.randn(50, generator=torch.Generator().manual_seed(1))
    lens = fit_lens([1], hidden, log_odds)
    assert lens.weights[0, 2:4].tolist() == [0.0, 0.0]
    assert lens.weights.isfinite().all()
    assert lens.weights[0, :2].abs().min() > 0


def test_lenses_are_equal_by_content() -> None:
    hidden, log_odds = problem(40, 5)
    one, two = fit_lens([1], hidden, log_odds, ridge=3.0), fit_lens([1], hidden, log_odds, ridge=3.0)
    other = fit_lens([1], hidden, log_odds, ridge=10.0)
    assert one is not two
    assert one == two
    assert hash(one) == hash(two)
    assert one != other
    assert len({one, two, other}) == 2
    assert one != one.digest


def test_a_lens_keeps_its_own_numbers() -> None:
    weights = torch.ones(1, 2)
    lens = FittedLens((1,), weights, torch.zeros(1), (0.5,), 1.0, 30)
    weights.zero_()
    assert lens.predict(1, torch.tensor([[1.0, 2.0]])).tolist() == [3.0]
    assert lens.predict(1, torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)).dtype == torch.float32


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 1000))
def test_json_gives_the_same_lens(layers: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lens = FittedLens(
        layers=tuple(range(2, 2 + layers)),
        weights=torch.randn(layers, width, generator=generator),
        bias=torch.randn(layers, generator=generator),
        error=tuple(torch.rand(layers, generator=generator).tolist()),
        scale=1.25,
        fitted_on=31,
    )
    again = FittedLens.from_json(json.loads(json.dumps(lens.to_json())))
    assert again == lens
    assert torch.equal(again.weights, lens.weights)
    assert torch.equal(again.bias, lens.bias)
    assert (again.layers, again.error, again.scale, again.fitted_on) == (lens.layers, lens.error, 1.25, 31)


def test_the_weights_are_little_endian_float32() -> None:
    lens = FittedLens((1,), torch.tensor([[1.0, -2.0]]), torch.zeros(1), (0.5,), 1.0, 30)
    assert lens.to_json()["weights"] == "AACAPwAAAMA="


@pytest.mark.parametrize(
    "change", [{"width": 3}, {"weights": "AACA"}, {"weights": "?"}, {"scale": None}, {"layers": [0]}, {"more": 1}]
)
def test_a_broken_record_is_refused(change: dict[str, object]) -> None:
    record = FittedLens((1,), torch.tensor([[1.0, -2.0]]), torch.zeros(1), (0.5,), 1.0, 30).to_json()
    with pytest.raises(ConfigError):
        FittedLens.from_json(record | change)


def test_a_record_without_a_field_is_refused() -> None:
    record = FittedLens((1,), torch.tensor([[1.0, -2.0]]), torch.zeros(1), (0.5,), 1.0, 30).to_json()
    del record["bias"]
    with pytest.raises(ConfigError, match="bias"):
        FittedLens.from_json(record)


def test_too_few_rows_and_constant_log_odds_are_refused() -> None:
    hidden, log_odds = problem(30, 4)
    fit_lens([1], hidden, log_odds)
    with pytest.raises(ConfigError, match="29 verdicts are too few"):
        fit_lens([1], hidden[:29], log_odds[:29])
    with pytest.raises(ConfigError, match="equal"):
        fit_lens([1], hidden, torch.full((30,), -3.7))


def test_bad_arguments_are_refused() -> None:
    hidden, log_odds = problem(30, 4, layers=2)
    for layers in ([], [0, 1], [2, 2], [3, 1]):
        with pytest.raises(ConfigError, match="ascending"):
            fit_lens(layers, hidden, log_odds)
    with pytest.raises(ConfigError, match="ridge"):
        fit_lens([1, 2], hidden, log_odds, ridge=0.0)
    with pytest.raises(ConfigError, match=r"for 3 layers"):
        fit_lens([1, 2, 3], hidden, log_odds)
    with pytest.raises(ConfigError, match="groups"):
        fit_lens([1, 2], hidden, log_odds, groups=[5] * 30)
    with pytest.raises(ConfigError, match="NaN"):
        fit_lens([1, 2], hidden, torch.cat([log_odds[:-1], torch.tensor([math.inf])]))


def test_a_lens_reads_its_own_layers_and_width_only() -> None:
    lens = FittedLens((2, 5), torch.ones(2, 3), torch.zeros(2), (0.5, 0.5), 1.0, 30)
    with pytest.raises(ConfigError, match="2, 5"):
        lens.predict(3, torch.ones(1, 3))
    with pytest.raises(ConfigError, match="3 wide"):
        lens.predict(2, torch.ones(1, 4))
    with pytest.raises(ConfigError, match="per layer"):
        FittedLens((2, 5), torch.ones(2, 3), torch.zeros(2), (0.5,), 1.0, 30)
    with pytest.raises(ConfigError, match="finite"):
        FittedLens((2,), torch.full((1, 3), math.nan), torch.zeros(1), (0.5,), 1.0, 30)
