"""Which tokens may be drawn, with which weight, and drawing one: the arithmetic under the sampler.

Every step works on each row alone, in an order of operations that the other rows of the batch cannot change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rksc_agents.config import Sampling

_SHORTLIST = 256  # likeliest tokens looked at for top_p before the whole vocabulary is sorted
_BLOCK = 256  # tokens summed together before the cumulative sum
_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny


class Candidates(NamedTuple):
    """Tokens that may be drawn and their weights.

    `ids` [rows, n] ascend; None is the whole vocabulary. `weights` [rows, n], fp32, are relative to the likeliest
    token's 1; a token with weight 0 was filtered out.
    """

    ids: Tensor | None
    weights: Tensor


def penalized(logits: Tensor, penalty: float, histories: Sequence[Tensor]) -> Tensor:
    """Return `logits` [rows, vocabulary] after the repetition penalty on each row's distinct tokens."""
    token = torch.cat(list(histories)).to(logits.device)
    lengths = torch.tensor([len(history) for history in histories])
    row = torch.arange(len(lengths)).repeat_interleave(lengths).to(logits.device)
    known = token < logits.shape[-1]  # an embedding may be larger than the head
    row, token = row[known], token[known]
    score = logits[row, token]
    return logits.index_put((row, token), torch.where(score < 0, score * penalty, score / penalty))


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Return one token per row of `logits` [rows, vocabulary], by inverse CDF at `uniform` [rows] in [0, 1)."""
    short, settled = shortlist(logits, sampling)
    if short is None or not settled.any():
        return _pick(whole(logits, sampling), uniform)
    if settled.all():
        return _pick(short, uniform)
    assert short.ids is not None
    open_ = ~settled
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    tokens[settled] = _pick(Candidates(short.ids[settled], short.weights[settled]), uniform[settled])
    tokens[open_] = _pick(whole(logits[open_], sampling), uniform[open_])
    return tokens


def shortlist(logits: Tensor, sampling: Sampling) -> tuple[Candidates | None, Tensor]:
    """Return the few candidates that top_k or top_p leave, and for which rows they are all of them, [rows] bool.

    None where the settings call for the whole vocabulary.
    """
    k, size = sampling.top_k, logits.shape[-1]
    if 0 < k < size:
        value, ids = logits.topk(k + 1, dim=-1)
        # tokens equal to the last one kept are kept too, as in transformers, and there may be more of them
        settled = value[:, k] < value[:, k - 1]
        value, ids = value[:, :k], ids[:, :k]
        weights = _weights(value, value[:, :1], sampling)
        total = weights.sum(-1, keepdim=True)
    elif sampling.top_p < 1.0 and size > _SHORTLIST:
        value, ids = logits.topk(_SHORTLIST, dim=-1)
        weights = _weights(value, value[:, :1], sampling)
        total = row_sum(_weights(logits, value[:, :1], sampling))
        wide = wide_dtype(logits)
        settled = weights.to(wide).cumsum(-1)[:, -1] >= sampling.top_p * total.to(wide).squeeze(-1)
    else:
        return None, torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    weights = _floor(_nucleus(weights, total, sampling.top_p), sampling.min_p)
    ids, order = ids.sort(dim=-1)
    return Candidates(ids, weights.gather(-1, order)), settled


def whole(logits: Tensor, sampling: Sampling) -> Candidates:
    """Return the weights of the whole vocabulary after temperature, top_k, top_p and min_p."""
    top = logits.amax(-1, keepdim=True)
    if 0 < sampling.top_k < logits.shape[-1]:
        last = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < last, -torch.inf)
    if sampling.top_p < 1.0:
        value, order = logits.sort(dim=-1, descending=True, stable=True)
        weights = _weights(value, top, sampling)
        total = row_sum(_weights(logits, top, sampling))
        weights = torch.zeros_like(weights).scatter(-1, order, _nucleus(weights, total, sampling.top_p))
    else:
        weights = _weights(logits, top, sampling)
    return Candidates(None, _floor(weights, sampling.min_p))


def row_sum(values: Tensor) -> Tensor:
    """Sum [rows, n] to [rows, 1], the same for one row as for many (a plain sum of one row is cut up by threads)."""
    return _block_sums(values).sum(-1, keepdim=True)


def wide_dtype(like: Tensor) -> torch.dtype:
    """Return float64, in which no token falls between two neighbouring numbers; MPS has none."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def _weights(logits: Tensor, top: Tensor, sampling: Sampling) -> Tensor:
    # the maximum is taken off first, so that a small temperature cannot overflow
    return ((logits - top) / max(sampling.temperature, _SMALLEST_TEMPERATURE)).exp_()


def _nucleus(weights: Tensor, total: Tensor, p: float) -> Tensor:
    """Zero those of the descending `weights` that have at least the share `p` of `total` before them."""
    if p >= 1.0:
        return weights
    wide = weights.to(wide_dtype(weights))
    before = wide.cumsum(-1) - wide
    return weights.masked_fill(before >= p * total.to(wide.dtype), 0.0)


def _floor(weights: Tensor, min_p: float) -> Tensor:
    return weights if min_p == 0.0 else weights.masked_fill(weights < min_p, 0.0)


def _pick(found: Candidates, uniform: Tensor) -> Tensor:
    ids, weights = found
    size = weights.shape[-1]
    if size > 2 * _BLOCK:  # a cumulative sum of the vocabulary is slow: sum blocks, then look into one block
        block, rest = _invert(_block_sums(weights), uniform)
        inside = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
        content = weights.gather(-1, inside.clamp(max=size - 1)).masked_fill(inside >= size, 0.0)
        offset, _ = _invert(content, rest)
        index = block * _BLOCK + offset
    else:
        index, _ = _invert(weights, uniform)
    return index if ids is None else ids.gather(-1, index[:, None]).squeeze(-1)


def _block_sums(values: Tensor) -> Tensor:
    full = values.shape[-1] // _BLOCK * _BLOCK
    sums = values[:, :full].view(len(values), full // _BLOCK, _BLOCK).sum(-1)
    if full == values.shape[-1]:
        return sums
    return torch.cat([sums, values[:, full:].sum(-1, keepdim=True)], dim=-1)


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index in `weights` at each `uniform`, and how far into that index it reaches, in [0, 1]."""
    ends = weights.to(uniform.dtype).cumsum(-1)
    total = ends[:, -1:].contiguous()
    target = uniform[:, None] * total
    # rounding may push the target to the very end: the last token with weight is where the total is first reached
    index = torch.minimum(torch.searchsorted(ends, target, right=True), torch.searchsorted(ends, total))
    weight = weights.gather(-1, index).to(uniform.dtype)
    reach = (target - ends.gather(-1, index) + weight) / weight
    return index.squeeze(-1), reach.clamp(0.0, 1.0).squeeze(-1)
