"""Linear layers in panels: the same results, and the model as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from rksc_agents.model import panels
from rksc_agents.model.panels import panelled_linear, panelled_linears


@pytest.mark.parametrize("rows", [1, 2, 8, 12, 13])
@pytest.mark.parametrize("bias", [True, False])
def test_panels_give_the_same(rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: batches.append(a.shape[0]) or bmm(a, b))
    layer = nn.Linear(24, 40, bias=bias)
    x = torch.randn(1, rows, 24, generator=torch.Generator().manual_seed(rows))
    with torch.no_grad():
        got = panelled_linear(x, layer.weight, layer.bias)
        assert (got - layer(x)).abs().max() < 1e-5
        assert got.shape == (1, rows, 40)
    assert batches == ([8] if 2 <= rows <= 12 else [])


@pytest.mark.parametrize(
    ("mode", "pays", "expected"), [("auto", True, True), ("auto", False, False), (True, True, False)]
)
def test_they_are_used_where_they_pay(mode: bool, pays: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "_pays", lambda layers: pays)
    model = tiny_model("Llama")
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        plain = model(ids).logits
        with panelled_linears(model, mode) as names:  # type: ignore[arg-type]
            assert ("model.layers.0.mlp.down_proj" in names) == expected
            assert (model(ids).logits - plain).abs().max() < 1e-5
        with pytest.raises(ZeroDivisionError), panelled_linears(model, "auto"):
            raise ZeroDivisionError
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_fits_a_cache_stays_plain() -> None:
    with panelled_linears(tiny_model("Llama"), "auto") as names:
        assert names == frozenset()


def test_a_pass_over_the_weights_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(32, 32, bias=False) for _ in range(6)]
    monkeypatch.setattr(panels, "ENOUGH", 4 * 32 * 32 * 4)  # four of them are enough
    clock = iter(range(10**6))
    slow = {"panelled_linear": 1, "linear": 3}
    now = [0.0]
    for module, name in ((panels, "panelled_linear"), (nn.functional, "linear")):
        cost = slow[name]
        monkeypatch.setattr(module, name, lambda *_, cost=cost: now.__setitem__(0, now[0] + cost) or next(clock))
    monkeypatch.setattr(panels.time, "perf_counter", lambda: now[0])
    assert panels._pays(layers)
    assert next(clock) == 2 * 8 * 4
    slow["panelled_linear"] = 3
    monkeypatch.setattr(panels, "panelled_linear", lambda *_: now.__setitem__(0, now[0] + 3))
    assert not panels._pays(layers)
