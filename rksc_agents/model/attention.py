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
from rksc_agents.model.partial import partial_attention
from rksc_agents.model.plan import OwnRead, Plan

Part = tuple[Tensor, Tensor]
"""Output [1, tokens, heads, width] and log-sum-exp [1, tokens, heads]."""


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
    q : Tensor [1, tokens, heads, width]
        Queries, flat.
    window : int or None
        Sliding window in tokens, the query's own included.
    sinks : Tensor [heads] or None
        Scores of attention sinks, which take weight and give no value (gpt-oss).

    Returns
    -------
    Tensor [1, tokens, heads, value_width]
    """
    attend = partial(partial_attention, scale=scale, softcap=softcap)
    parts = [_own_tail(own, layer, q, attend) for own in plan.own(window)]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(part, 1) for part in zip(*parts, strict=True))
    reads = plan.reads(window)
    for number, read in enumerate(reads, 1):
        k, v = (t[None] if read.skip == 0 else t[None, :, read.skip :] for t in read.segment.kv[layer])
        if read.rows is None:
            last = number == len(reads) and sinks is None
            _merge_(out, lse, attend(q, k, v, mask=read.mask), last=last)
            continue
        rows = read.rows if isinstance(read.rows, slice) else read.rows.to(q.device)  # a layer may be elsewhere
        some, some_lse = out[:, rows], lse[:, rows]
        _merge_(some, some_lse, attend(q[:, rows], k, v, mask=read.mask))
        if not isinstance(rows, slice):  # a slice is a view, an index a copy
            out[:, rows], lse[:, rows] = some, some_lse
    if sinks is not None:
        out *= torch.sigmoid(lse - sinks.to(lse.dtype))[..., None]
    return out.to(q.dtype)


def _own_tail(own: OwnRead, layer: int, q: Tensor, attend: Callable[..., Part]) -> Part:
    """Attention of a run's rows to their own tails and to each other's new tokens of the same row."""
    tail, width = own.run.tail, own.run.width
    assert isinstance(tail, Tail)
    k, v = tail.kv[layer]
    n, rows = tail.length, len(own.run.tokens)
    mine = q if q.shape[1] == rows * width else q[:, own.rows]
    queries = mine.reshape(rows, width, *q.shape[2:])
    if width == 1:  # one new token sees its whole tail and itself
        out, lse = attend(queries, k[:, :, own.skip : n + 1], v[:, :, own.skip : n + 1])
    else:
        new_k, new_v = k[:, :, n : n + width], v[:, :, n : n + width]
        out, lse = attend(queries, new_k, new_v, causal=own.new_mask is None, mask=own.new_mask)
        if own.skip < n:
            past_k, past_v = k[:, :, own.skip : n], v[:, :, own.skip : n]
            _merge_(out, lse, attend(queries, past_k, past_v, mask=own.past_mask))
    return out.reshape(1, rows * width, *out.shape[2:]), lse.reshape(1, rows * width, -1)


def _merge_(out: Tensor, lse: Tensor, part: Part, *, last: bool = False) -> None:
    """Merge another partial attention into `out` and `lse`, in place; after the `last` one nobody reads `lse`."""
    more, more_lse = part
    out.lerp_(more, torch.sigmoid(more_lse - lse)[..., None])
    if not last:
        torch.logaddexp(lse, more_lse, out=lse)
