"""Attention to one run of keys, with the log-sum-exp that merging needs."""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -1e30  # finite, so that a fully masked query merges with weight 0 instead of becoming NaN

HAS_FLASH = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
"""Whether this torch has the fused CPU kernel that also returns the log-sum-exp."""


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of `q` to `k` and `v` with the log-sum-exp of its scores.

    Parameters
    ----------
    q : Tensor [batch, queries, heads, width]
    k, v : Tensor [batch, kv_heads, keys, width] and [..., value_width]
        `heads` is a multiple of `kv_heads`.
    scale : float
        Multiplies the scores.
    causal : bool
        Query i sees keys 0 to i.
    mask : Tensor [queries, keys] or None
        Added to the scores; not together with `causal`.
    softcap : float or None
        Scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).

    Returns
    -------
    out : Tensor [batch, queries, heads, value_width], float32 at least
    lse : Tensor [batch, queries, heads], float32 at least
    """
    if mask is not None:  # a layer may be on another device; the least number of 16 bits stands for MASKED
        mask = mask.clamp_min(torch.finfo(q.dtype).min / 2).to(q.device, q.dtype)
    fits = HAS_FLASH and softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]
    if not fits:
        return plain_attention(q, k, v, scale=scale, causal=causal, mask=mask, softcap=softcap)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2),
        k,
        v,
        0.0,
        causal,
        attn_mask=None if mask is None else mask.to(q.dtype)[None, None],
        scale=scale,
    )
    return out.transpose(1, 2).to(lse.dtype), lse.transpose(1, 2)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as :func:`partial_attention` by matrix products, on any device and for any widths."""
    batch, queries, heads, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    split = q.reshape(batch, queries, kv_heads, heads // kv_heads, width)
    scores = torch.einsum("bqhgd,bhkd->bhgqk", split.float(), k.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, MASKED)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhgqk,bhkd->bqhgd", (scores - lse[..., None]).exp(), v.float())
    return out.reshape(batch, queries, heads, -1), lse.permute(0, 3, 1, 2).reshape(batch, queries, heads)
