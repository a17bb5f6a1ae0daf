"""Attention over the KV tree: one partial attention per shared segment, merged by log-sum-exp.

A partial attention returns its output and the log-sum-exp of its scores; two of them merge exactly:
``o = (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2)`` (Hydragen, arXiv 2402.05099; cascade inference; DeFT). So
a prefix that many rows share is read from memory once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rksc_agents.cache.store import Tail
from rksc_agents.model.plan import MASKED, Plan


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
    q : Tensor [batch, heads, queries, width]
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
    out : Tensor [batch, heads, queries, value_width]
    lse : Tensor [batch, heads, queries], float32 at least
    """
    if _flash_for_cpu_fits(q, k, v, softcap):
        extra = None if mask is None else mask.to(q.dtype)[None, None]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=extra, scale=scale
        )
        return out, lse
    return plain_attention(q, k, v, scale=scale, causal=causal, mask=mask, softcap=softcap)


def _flash_for_cpu_fits(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> bool:
    return (
        flash_for_cpu_available()
        and softcap is None
        and q.device.type == "cpu"
        and q.shape[-1] == v.shape[-1]
        and q.dtype == k.dtype
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    )


def flash_for_cpu_available() -> bool:
    """Whether this torch has the fused CPU kernel that also returns the log-sum-exp."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


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
    batch, heads, queries, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    # Fold the query heads that share a key head into one block of queries.
    folded = q.reshape(batch, kv_heads, heads // kv_heads, queries, width)
    scores = torch.einsum("bhgqd,bhkd->bhgqk", folded.float(), k.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, MASKED)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhgqk,bhkd->bhgqd", (scores - lse[..., None]).exp(), v.float())
    return out.to(q.dtype).reshape(batch, heads, queries, v.shape[-1]), lse.reshape(batch, heads, queries)


def tree_attention(
    plan: Plan,
    layer: int,
    q: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a pass's tokens to everything on their paths.

    Parameters
    ----------
    plan : Plan
        Who reads what. The new tokens' KV of this layer has been written to the tails.
    layer : int
        The layer whose KV is read.
    q : Tensor [tokens, heads, width]
        Queries, flat.
    window : int or None
        Sliding window in tokens, the query's own included.
    sinks : Tensor [heads] or None
        Scores of attention sinks, which take weight and give no value (gpt-oss).

    Returns
    -------
    Tensor [tokens, heads, value_width]
    """
    attend = partial(partial_attention, scale=scale, softcap=softcap)
    out, lse = _own_tails(plan, layer, q, window, attend)
    for read in plan.reads(window):
        k, v = read.segment.kv[layer]
        queries = q[read.rows].transpose(0, 1)[None]
        part, part_lse = _flat(attend(queries, k[None, :, read.skip :], v[None, :, read.skip :], mask=read.mask))
        if isinstance(read.rows, slice):
            _merge_(out[read.rows], lse[read.rows], part, part_lse)
        else:
            some, some_lse = out[read.rows], lse[read.rows]
            _merge_(some, some_lse, part, part_lse)
            out[read.rows], lse[read.rows] = some, some_lse
    if sinks is not None:
        out *= torch.sigmoid(lse - sinks.to(lse.dtype))[..., None]
    return out.to(q.dtype)


def _own_tails(
    plan: Plan, layer: int, q: Tensor, window: int | None, attend: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for own in plan.own(window):
        tail, width = own.run.tail, own.run.width
        assert isinstance(tail, Tail)
        k, v = tail.kv[layer]
        n, rows = tail.length, len(own.run.tokens)
        queries = q[own.rows].view(rows, width, *q.shape[1:]).transpose(1, 2)
        if width == 1:  # one new token sees its whole tail and itself
            stop = n + 1
            out, lse = _flat(attend(queries, k[:, :, own.skip : stop], v[:, :, own.skip : stop]))
        else:
            new_k, new_v = k[:, :, n : n + width], v[:, :, n : n + width]
            out, lse = _flat(attend(queries, new_k, new_v, causal=own.new_mask is None, mask=own.new_mask))
            if own.skip < n:
                past_k, past_v = k[:, :, own.skip : n], v[:, :, own.skip : n]
                _merge_(out, lse, *_flat(attend(queries, past_k, past_v, mask=own.past_mask)))
        outs.append(out)
        lses.append(lse)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))


def _flat(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """[batch, heads, queries, ...] to [batch * queries, heads, ...] in the precision that merging needs."""
    out, lse = part
    return out.transpose(1, 2).flatten(0, 1).to(lse.dtype), lse.transpose(1, 2).flatten(0, 1)


def _merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge another partial attention into `out` and `lse`, in place."""
    weight = torch.sigmoid(other_lse - lse)
    out.lerp_(other, weight[..., None])
    torch.logaddexp(lse, other_lse, out=lse)
