"""Packed linear layers: the same results, and the model as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from rksc_agents.config import EngineConfig
from rksc_agents.model import linear
from rksc_agents.model.linear import compiled_blocks, fast_linears, packing_available


class Small(nn.Module):
    """Two layers of one shape, one with a bias, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(24, 16)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.second(self.first(self.embed(ids)).relu()))
        return out


@pytest.fixture
def model() -> Small:
    return Small()


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 4)])
def test_packed_gives_the_same(model: Small, shape: tuple[int, int]) -> None:
    assert packing_available()
    ids = torch.arange(shape[0] * shape[1]).view(shape) % 24
    with torch.no_grad():
        expected = model(ids)
        with fast_linears(model, mode=True) as packed:
            assert packed == {"first", "second", "head"}
            assert (model(ids) - expected).abs().max() < 1e-4
            assert model.first.weight.numel() == 0  # no second copy
            assert model.embed.weight.numel() == 24 * 16  # but the embedding is still there


def test_the_model_is_as_before(model: Small) -> None:
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), fast_linears(model, mode=True):
        raise ZeroDivisionError
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.head.weight is model.embed.weight
    assert not any("forward" in vars(module) for module in model.modules())


def test_off_and_foreign_layers_are_left_alone(model: Small) -> None:
    with fast_linears(model, mode=False) as packed:
        assert packed == frozenset()
    vars(model.first)["forward"] = model.first.forward  # as a dispatch hook does
    model.second.to(torch.bfloat16)
    with fast_linears(model, mode=True) as packed:
        assert packed == {"head"}
    assert "forward" in vars(model.first)


@pytest.mark.parametrize(("times", "expected"), [([0.5, 0.5, 0.5, 0.5], True), ([0.5, 0.95, 0.95, 0.5], False)])
def test_auto_packs_what_is_quicker(
    model: Small, monkeypatch: pytest.MonkeyPatch, times: list[float], expected: bool
) -> None:
    """Half of the plain time is quicker and 95 % is not worth it."""
    relative = dict(zip(linear.ROWS, times, strict=True))
    monkeypatch.setattr(linear, "_relative_time", lambda plain, packed, rows: relative[rows])
    with fast_linears(model, mode="auto") as packed:
        assert packed == ({"first", "second", "head"} if expected else frozenset())


def test_auto_packs_nothing_that_makes_one_row_slow(model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    relative = dict(zip(linear.ROWS, [1.5, 0.5, 0.5, 1.0], strict=True))
    monkeypatch.setattr(linear, "_relative_time", lambda plain, packed, rows: relative[rows])
    with fast_linears(model, mode="auto") as packed:
        assert packed == {"head"}  # its plain weight is there anyway and serves single rows


def test_without_the_ops_everything_stays_plain(model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packing_available", lambda: False)
    with fast_linears(model, mode=True) as packed:
        assert packed == frozenset()


def test_wrong_ops_are_not_used(model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packed_linear", lambda x, weight, bias: torch.zeros(1))
    with fast_linears(model, mode=True) as packed:
        assert packed == frozenset()


def test_compiled_blocks_are_the_feed_forward_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: compiled.append(forward) or forward)
    model = tiny_model("Llama")
    with compiled_blocks(model, enabled=False):
        assert not compiled
    with compiled_blocks(model, enabled=EngineConfig(compile=True).compile):
        assert len(compiled) == 3
        assert all("forward" in vars(layer.mlp) for layer in model.model.layers)
    assert not any("forward" in vars(module) for module in model.modules())
