"""Weights in 8-bit integers: what they compute, what is told of the loss, what is given back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import generate
from tiny_models import tiny_model
from torch import nn

from rksc_agents import ConfigError, EngineConfig, RKSCReasoner, Sampling
from rksc_agents.model import int8
from rksc_agents.model.int8 import int8_available, int8_linears
from rksc_agents.model.text import TextCodec
from rksc_agents.testing import scripted_tokenizer

needs_ops = pytest.mark.skipif(not int8_available(), reason="this torch has no 8-bit products")
SAMPLE = list(range(5, 40))


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight as 8 bits hold it."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


@needs_ops
@given(
    rows=st.integers(0, 9) | st.integers(int8.FEW - 1, int8.FEW + 2),
    width=st.integers(1, 70) | st.sampled_from([32, 64, 96]),
    outputs=st.integers(1, 40),
    spread=st.floats(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_only_the_weights_are_rounded(rows: int, width: int, outputs: int, spread: float, seed: int) -> None:
    """Against the plain product of rounded weights; activations and sums lose what bfloat16 does, in few rows only."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, width, generator=generator)
    x = torch.randn(1, rows, width, generator=generator) * torch.logspace(-spread, spread, rows)[:, None]
    bias = torch.randn(outputs, generator=generator)
    got = int8._product(weight, bias)(x)
    expected = nn.functional.linear(x, rounded(weight), bias)
    terms = nn.functional.linear(x.abs(), rounded(weight).abs(), bias.abs())
    loss = 2**-7 if rows <= int8.FEW and width % 32 == 0 else 1e-5
    assert got.shape == expected.shape
    assert bool(((got - expected).abs() <= loss * terms + 1e-6).all())


@needs_ops
def test_many_rows_lose_nothing_of_their_activations() -> None:
    """What the other test allows for few rows is really lost there, and not for one row more."""
    weight, x = torch.randn(24, 64), torch.randn(int8.FEW + 1, 64)
    product, expected = int8._product(weight, None), nn.functional.linear(x, rounded(weight))
    many, few = (product(x) - expected).abs().max(), (product(x[:-1]) - expected[:-1]).abs().max()
    assert many < 1e-4 < few


@needs_ops
def test_a_row_depends_on_no_other_row() -> None:
    weight, x = torch.randn(24, 64), torch.randn(7, 64) * torch.logspace(-4, 4, 7)[:, None]
    product = int8._product(weight, None)
    assert torch.equal(product(x), torch.cat([product(row[None]) for row in x]))


@needs_ops
def test_a_row_of_zeros_stays_zero() -> None:
    assert not int8._product(torch.randn(8, 32), None)(torch.zeros(3, 32)).any()
    assert not int8._product(torch.zeros(8, 32), None)(torch.ones(3, 32)).any()


@needs_ops
def test_the_loss_is_measured_and_undone() -> None:
    model = tiny_model("Llama")
    ids = torch.tensor([SAMPLE])
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        plain = before[0].log_softmax(-1)
        with int8_linears(model, SAMPLE) as told:
            inside = model(input_ids=ids).logits[0].log_softmax(-1)
        after = model(input_ids=ids).logits
    assert told.layers == sum(isinstance(module, nn.Linear) for module in model.modules())
    divergence = nn.functional.kl_div(inside, plain, log_target=True, reduction="sum") / len(SAMPLE)
    assert told.divergence == pytest.approx(float(divergence), rel=1e-3)
    assert told.divergence > 0
    assert told.agreement == float((inside.argmax(-1) == plain.argmax(-1)).float().mean())
    assert torch.equal(before, after)


@needs_ops
def test_branches_are_those_of_the_rounded_model() -> None:
    """Greedy, on the tree, as `generate` writes with the same rounded weights; and told with the result."""
    tokenizer = scripted_tokenizer()
    model = tiny_model("Llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    prompt = TextCodec(tokenizer).encode("What?", ())
    with int8_linears(model, SAMPLE):
        expected = generate(model, prompt, 16)
    greedy = Sampling(temperature=0, max_tokens=16, ignore_eos=True)
    config = EngineConfig(kv_budget=2**24, int8=True)
    with RKSCReasoner.from_model(model, tokenizer, sampling=greedy, engine=config) as reasoner:
        result = reasoner.reason("What?", strategy="self-consistency")
        assert {branch.tokens for branch in result.branches} == {expected}
        assert result.quantization is not None
        assert result.evidence()["quantization"] == result.quantization.model_dump()
        assert reasoner.model_hash.endswith("-int8")
    with RKSCReasoner.from_model(model, tokenizer, sampling=greedy, engine=EngineConfig(kv_budget=2**24)) as reasoner:
        plain = reasoner.reason("What?", strategy="direct")
        assert plain.quantization is None
        assert plain.evidence()["quantization"] is None
        assert plain.branches[0].tokens == generate(model, prompt, 16)
        assert not reasoner.model_hash.endswith("-int8")


@pytest.mark.parametrize("available", [True, False])
def test_what_cannot_be_quantized_is_refused_and_given_back(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    monkeypatch.setattr(int8, "int8_available", lambda: available)
    model = tiny_model("Llama")
    if available:
        model.to(torch.bfloat16)
    config = EngineConfig(kv_budget=2**24, int8=True)
    for _ in range(2):  # the model is free again after the refusal
        with pytest.raises(ConfigError, match="no float32 linear layers" if available else "does not multiply"):
            RKSCReasoner.from_model(model, scripted_tokenizer(), engine=config)


def test_wrong_products_are_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the op is missing, refuses or computes something else, it is not used."""
    if not int8_available():
        pytest.skip("no op to spoil")
    real = torch._weight_int8pack_mm

    def refusing(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not here")

    for spoilt in (lambda *arguments: real(*arguments).clamp(max=5), refusing):
        monkeypatch.setattr(torch, "_weight_int8pack_mm", spoilt)
        assert not int8_available()
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    assert not int8_available()
