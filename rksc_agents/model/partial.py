"""Attention to one run of keys, with the log-sum-exp that merging needs."""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -1e30  # finite, so that a fully masked query merges with weight 0 instead of becoming NaN

HAS_FLASH = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
"""Whether this torch has the fused CPU kernel that also returns the log-sum-exp."""

FEW = 64  # queries per key head up to which folding heads, and cutting the keys in two, pays; measured
LONG = 256  # keys from which cutting them in two pays


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
    fits = HAS_FLASH and softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]
    if not fits:
        return plain_attention(q, k, v, scale=scale, causal=causal, mask=mask, softcap=softcap)
    if causal or mask is not None or q.shape[1] * q.shape[2] > FEW * k.shape[1]:
        extra = None if mask is None else mask.to(q.dtype)[None, None]
        out, lse = _flash(q.transpose(1, 2), k, v, scale, causal=causal, mask=extra)
        return out.transpose(1, 2).to(lse.dtype), lse.transpose(1, 2)
    return _few_queries(q, k, v, scale)


def _few_queries(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, queries, heads, width = q.shape
    kv_heads = k.shape[1]
    split = (batch, queries, kv_heads, heads // kv_heads)
    # Query heads that share a key head read it together, as if they were more queries of one head.
    folded = q.view(*split, width).permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, width)
    # Work is dealt out by head; where that leaves a thread idle, both halves of the keys are heads of their own.
    uneven = batch == 1 and k.shape[2] >= LONG and kv_heads % torch.get_num_threads() != 0
    out, lse = (_flash_in_halves if uneven else _flash)(folded, k, v, scale)
    out = out.view(batch, kv_heads, queries, -1, width).permute(0, 2, 1, 3, 4).reshape(q.shape)
    lse = lse.view(batch, kv_heads, queries, -1).permute(0, 2, 1, 3).reshape(batch, queries, heads)
    return out.to(lse.dtype), lse


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )


def _flash_in_halves(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same, with the two halves of the keys as a batch of two; a middle key counts in the first alone."""
    keys = k.shape[2]
    half = (keys + 1) // 2
    mask = None
    if keys % 2:
        mask = q.new_zeros(2, 1, 1, half)
        mask[1, :, :, 0] = MASKED
    out, lse = _flash(q.expand(2, *q.shape[1:]), _halved(k, half), _halved(v, half), scale, mask=mask)
    first, second = lse[:1], lse[1:]
    out = out[:1].lerp(out[1:], torch.sigmoid(second - first)[..., None].to(out.dtype))
    return out, torch.logaddexp(first, second)


def _halved(x: Tensor, half: int) -> Tensor:
    """[1, heads, keys, width] to its first and its last `half` keys, [2, heads, half, width], without a copy."""
    _, heads, keys, width = x.shape
    _, of_head, of_key, of_width = x.stride()
    shape, strides = (2, heads, half, width), ((keys - half) * of_key, of_head, of_key, of_width)
    return x.as_strided(shape, strides, x.storage_offset())


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
