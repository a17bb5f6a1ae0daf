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

needs_ops = pytest.mark.skipif(not int8_available(), reason="no exact 8-bit products on this CPU")
SAMPLE = list(range(5, 40))


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight as 8 bits hold it."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


@needs_ops
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 70),
    outputs=st.integers(1, 40),
    spread=st.floats(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_only_the_weights_are_rounded(rows: int, width: int, outputs: int, spread: float, seed: int) -> None:
    """Against the plain product of rounded weights; activations of very different sizes lose next to nothing."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, width, generator=generator)
    x = torch.randn(1, rows, width, generator=generator) * torch.logspace(-spread, spread, rows)[:, None]
    bias = torch.randn(outputs, generator=generator)
    got = int8._product(weight, bias)(x)
    expected = nn.functional.linear(x, rounded(weight), bias)
    unit = x.abs().amax(-1, keepdim=True) * rounded(weight).abs().sum(1).clamp_min(1e-6) / 127 / 254
    assert got.shape == expected.shape
    assert bool(((got - expected).abs() <= 0.6 * unit + 1e-5 * expected.abs() + 1e-5).all())


@needs_ops
def test_a_row_depends_on_no_other_row() -> None:
    weight, x = torch.randn(24, 48), torch.randn(7, 48) * torch.logspace(-4, 4, 7)[:, None]
    product = int8._product(weight, None)
    assert torch.equal(product(x), torch.cat([product(row[None]) for row in x]))


@needs_ops
def test_a_row_of_zeros_stays_zero() -> None:
    assert not int8._product(torch.randn(8, 16), None)(torch.zeros(3, 16)).any()
    assert not int8._product(torch.zeros(8, 16), None)(torch.ones(3, 16)).any()


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
        with pytest.raises(ConfigError, match="no float32 linear layers" if available else "no exact products"):
            RKSCReasoner.from_model(model, scripted_tokenizer(), engine=config)


def test_saturating_products_are_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sums of pairs are cut at 16 bits, as on CPUs without VNNI, the ops are not used."""
    if not int8_available():
        pytest.skip("no ops to spoil")
    real = torch.ops.onednn.qlinear_pointwise

    class Saturating:
        def __getattr__(self, name: str) -> object:
            if name == "qlinear_pointwise":
                return lambda *arguments: real(*arguments).clamp(max=20)
            return getattr(torch.ops.onednn, name)

    monkeypatch.setattr(int8, "_ops", Saturating())
    assert not int8_available()
