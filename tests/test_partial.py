"""Partial attentions against the textbook formula, and their merging against attention to everything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rksc_agents.model.partial import partial_attention, plain_attention


def tensors(batch: int, queries: int, heads: int, kv_heads: int, keys: int, width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(keys * 31 + queries)
    return [
        torch.randn(batch, queries, heads, width, generator=generator),
        torch.randn(batch, kv_heads, keys, width, generator=generator),
        torch.randn(batch, kv_heads, keys, width, generator=generator),
    ]


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """One query and head at a time, in double precision."""
    batch, queries, heads, _ = q.shape
    out = torch.empty(batch, queries, heads, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for i in range(queries):
            for h in range(heads):
                kv = h * k.shape[1] // heads
                scores = k[b, kv].double() @ q[b, i, h].double() * 0.3
                if hidden is not None:
                    scores = scores.masked_fill(hidden[i], -torch.inf)
                out[b, i, h] = torch.softmax(scores, 0) @ v[b, kv].double()
    return out


@pytest.mark.parametrize("attend", [partial_attention, plain_attention])
@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    queries=st.sampled_from([1, 2, 7, 40]),
    kv_heads=st.sampled_from([1, 3]),
    groups=st.sampled_from([1, 3]),
    keys=st.sampled_from([1, 2, 9, 130]),
)
def test_equals_the_textbook(  # type: ignore[no-untyped-def]
    attend, batch: int, queries: int, kv_heads: int, groups: int, keys: int
) -> None:
    q, k, v = tensors(batch, queries, kv_heads * groups, kv_heads, keys)
    out, lse = attend(q, k, v, scale=0.3)
    assert (out - textbook(q, k, v)).abs().max() < 1e-5
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]


@pytest.mark.parametrize("attend", [partial_attention, plain_attention])
def test_causal_and_masked(attend) -> None:  # type: ignore[no-untyped-def]
    q, k, v = tensors(2, 9, 4, 2, 9)
    causal = torch.ones(9, 9, dtype=torch.bool).triu(1)
    out, _ = attend(q, k, v, scale=0.3, causal=True)
    assert (out - textbook(q, k, v, causal)).abs().max() < 1e-5
    window = causal | torch.ones(9, 9, dtype=torch.bool).tril(-3)
    out, _ = attend(q, k, v, scale=0.3, mask=torch.zeros(9, 9).masked_fill(window, -1e30))
    assert (out - textbook(q, k, v, window)).abs().max() < 1e-5


@pytest.mark.parametrize("attend", [partial_attention, plain_attention])
def test_parts_merge_to_the_whole(attend) -> None:  # type: ignore[no-untyped-def]
    """o = o1 + sigmoid(l2 - l1) (o2 - o1), also where a query sees nothing of a part."""
    from rksc_agents.model.attention import _merge_

    q, k, v = tensors(1, 5, 4, 2, 20)
    hidden = torch.zeros(5, 8, dtype=torch.bool)
    hidden[2] = True
    mask = torch.zeros(5, 8).masked_fill(hidden, -1e30)
    out, lse = attend(q, k[:, :, 8:], v[:, :, 8:], scale=0.3)
    _merge_(out, lse, attend(q, k[:, :, :8], v[:, :, :8], scale=0.3, mask=mask))
    everything = torch.cat([hidden, torch.zeros(5, 12, dtype=torch.bool)], 1)
    assert (out - textbook(q, k, v, everything)).abs().max() < 1e-5
    whole = torch.einsum("bqhd,bhkd->bqhk", q, k.repeat_interleave(2, 1)) * 0.3
    whole = whole.masked_fill(everything[None, :, None], -torch.inf).logsumexp(-1)
    assert (lse - whole).abs().max() < 1e-5


def test_values_of_another_width_and_capped_scores() -> None:
    q, k, _ = tensors(1, 3, 4, 2, 7)
    v = torch.randn(1, 2, 7, 5, generator=torch.Generator().manual_seed(1))
    out, _ = partial_attention(q, k, v, scale=0.3)
    assert (out - textbook(q, k, v)).abs().max() < 1e-5
    capped, _ = partial_attention(q, k, v, scale=0.3, softcap=0.5)
    scores = torch.einsum("bqhd,bhkd->bqhk", q, k.repeat_interleave(2, 1)) * 0.3
    weights = (0.5 * torch.tanh(scores / 0.5)).softmax(-1)
    assert (capped - torch.einsum("bqhk,bhkd->bqhd", weights, v.repeat_interleave(2, 1))).abs().max() < 1e-5


def test_half_precision_is_merged_in_float32() -> None:
    q, k, v = (t.bfloat16() for t in tensors(1, 3, 4, 2, 7))
    out, lse = partial_attention(q, k, v, scale=0.3)
    assert out.dtype == lse.dtype == torch.float32
