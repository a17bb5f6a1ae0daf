"""ASKS: what branches with prompts of their own take from the first prompt's KV, in three modes.

"exact" shares equal beginnings and loses nothing. "aligned" also takes equal runs from other positions. "semantic" is
the paper's gate: a branch whose hidden states are similar enough to the first prompt's goes on from that prompt
instead of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rksc_agents.cache.alignment import Alignment, align
from rksc_agents.config import Sharing
from rksc_agents.engine.cursor import Cursor
from rksc_agents.engine.session import Session
from rksc_agents.errors import UnsupportedModelError
from rksc_agents.model.exits import Glimpse, Trace
from rksc_agents.types import SharingRecord

EARLY = 4
"""The gate "early-sigma" looks at the first 1 / EARLY of the layers."""

AUDITED = 24
"""Tokens of a branch over which an audit compares."""


@dataclass(frozen=True, slots=True)
class Root:
    """Where the branches of a prompt start: the prompt, its end, and what it took from elsewhere."""

    prompt: tuple[int, ...]
    cursor: Cursor
    record: SharingRecord


async def roots(
    session: Session,
    prompts: Sequence[tuple[int, ...]],
    sharing: Sharing,
    so_far: Sequence[Root] = (),
    like: Sequence[tuple[int, ...]] = (),
) -> list[Root]:
    """Put each prompt's KV into the tree, taking from the first prompt what `sharing` allows.

    `so_far` are the roots of the first prompts, where they have been made already; `like` are earlier prompts, from
    one of which the first prompt takes what is still cached.
    """
    found = list(so_far)
    made = {root.prompt: root for root in found}
    for prompt in prompts[len(found) :]:
        if prompt not in made:
            first = found[0] if found else None
            made[prompt] = await (
                _first(session, prompt, sharing, like) if first is None else _shared(session, first, prompt, sharing)
            )
        found.append(made[prompt])
    return found


async def _first(session: Session, prompt: tuple[int, ...], sharing: Sharing, like: Sequence[tuple[int, ...]]) -> Root:
    """The first prompt: exact, or with KV of that earlier prompt which has most for it."""
    sources = [session.cached(tokens, len(tokens)) for tokens in like]
    found = [_alignment(session, source.tokens, prompt, sharing) for source in sources]
    most = max(range(len(found)), key=lambda i: (len(found[i].taken), -i), default=None)
    try:
        if most is None or not found[most].taken:
            return await _exact(session, prompt, sigma=1.0)
        return await _transplanted(session, sources[most], prompt, found[most])
    finally:
        for source in sources:
            session.release(source)


async def _shared(session: Session, first: Root, prompt: tuple[int, ...], sharing: Sharing) -> Root:
    match sharing.mode:
        case "exact":
            return await _exact(session, prompt)
        case "aligned":
            return await _aligned(session, first, prompt, sharing)
        case "semantic":
            return await _semantic(session, first, prompt, sharing)


async def _exact(session: Session, prompt: tuple[int, ...], sigma: float | None = None) -> Root:
    before = session.ledger.prompt_tokens_reused
    cursor = await session.prefill(prompt)
    reused = session.ledger.prompt_tokens_reused - before
    return Root(prompt, cursor, SharingRecord(sigma=sigma, reused=reused, recomputed=len(prompt) - reused))


async def _aligned(session: Session, first: Root, prompt: tuple[int, ...], sharing: Sharing) -> Root:
    found = _alignment(session, first.prompt, prompt, sharing)
    if found.taken:
        return await _transplanted(session, first.cursor, prompt, found)
    root = await _exact(session, prompt)
    return replace(root, record=root.record.model_copy(update={"mode": "aligned"}))


def _alignment(session: Session, source: Sequence[int], prompt: Sequence[int], sharing: Sharing) -> Alignment:
    never = session.codec.number_tokens
    return align(source, prompt, first=sharing.first, shortest=sharing.shortest, never=never)


async def _transplanted(session: Session, source: Cursor, prompt: tuple[int, ...], found: Alignment) -> Root:
    before = session.ledger.prompt_tokens_reused
    cursor = await session.transplant(source, prompt, found.taken)
    reused = session.ledger.prompt_tokens_reused - before
    return Root(prompt, cursor, SharingRecord(mode="aligned", reused=reused, recomputed=len(prompt) - reused))


async def _semantic(session: Session, first: Root, prompt: tuple[int, ...], sharing: Sharing) -> Root:
    similar = await similarity(session, first.cursor, prompt, sharing)
    if similar >= sharing.tau:
        (cursor,) = session.fork(first.cursor, 1)
        return Root(prompt, cursor, SharingRecord(mode="semantic", sigma=similar, reused=len(first.prompt)))
    root = await _exact(session, prompt)
    return replace(root, record=root.record.model_copy(update={"mode": "semantic", "sigma": similar}))


async def similarity(session: Session, first: Cursor, prompt: tuple[int, ...], sharing: Sharing) -> float:
    """How much alike two prompts are, under the gate that `sharing` names; 1 for equal tokens.

    "sigma" and "early-sigma" compute the prompt in a throw-away pass, over all layers or the first quarter of them.
    """
    if sharing.gate == "tokens":
        if first.tokens == prompt:
            return 1.0
        found = align(first.tokens, prompt, first=0, shortest=sharing.shortest, last=1)
        # a prompt that repeats the first one has no more in common with it than that has tokens
        return 2.0 * min(found.prefix + found.matched, len(first.tokens)) / (len(first.tokens) + len(prompt))
    depth = session.depth if sharing.gate == "sigma" else max(1, session.depth // EARLY)
    mine, theirs = await states_of(session, [prompt, first.tokens], depth)
    return sigma(mine, theirs, sharing.alpha)


def sigma(mine: Mapping[int, Tensor], theirs: Mapping[int, Tensor], alpha: float) -> float:
    """Weighted cosine similarity of hidden states by layer, w_l = exp(alpha l / L) normalised (RKSC, ASKS).

    Parameters
    ----------
    mine, theirs : mapping of int to Tensor
        By layer, from 1, the hidden state [width] of the last token.
    alpha : float
        How much more later layers count.
    """
    depth = max(mine)
    weights = {layer: math.exp(alpha * layer / depth) for layer in mine}
    cosines = {
        layer: torch.cosine_similarity(mine[layer].double(), theirs[layer].double(), dim=0).item() for layer in mine
    }
    return math.fsum(weights[layer] * cosines[layer] for layer in mine) / math.fsum(weights.values())


async def states_of(session: Session, prompts: Sequence[tuple[int, ...]], depth: int) -> list[dict[int, Tensor]]:
    """Hidden states after each prompt's last token, of the first `depth` layers, which alone are computed."""
    if not session.readable:
        raise UnsupportedModelError(
            "the model's passes show no hidden states, so prompts cannot be compared by them: set gate='tokens', or "
            "use mode exact"
        )
    bases = [session.cached(prompt, len(prompt) - 1) for prompt in prompts]
    extensions = [prompt[len(base.tokens) :] for prompt, base in zip(prompts, bases, strict=True)]
    readings = await session.probe(bases, extensions, ((0,),), exit_rule=States(depth))
    for base in bases:
        session.release(base)
    return [reading.trace.states for reading in readings]


@dataclass(frozen=True, slots=True)
class States:
    """A rule that keeps the hidden states of the first `depth` layers and ends the pass there."""

    depth: int

    def about(self, zero: float) -> States:
        """The rule itself: it takes no sides."""
        return self

    def watch(self, rows: int, groups: tuple[tuple[int, ...], ...]) -> _Keeping:
        return _Keeping(self.depth, rows)


class _Keeping:
    def __init__(self, depth: int, rows: int) -> None:
        self.layers = range(1, depth + 1)
        self.traces = [Trace() for _ in range(rows)]

    def look(self, layer: int, glimpse: Glimpse) -> bool:
        there = layer == self.layers[-1]
        for trace, state in zip(self.traces, glimpse.raw, strict=True):
            trace.states[layer] = state.cpu()
            if there:
                trace.settled, trace.log_odds[layer] = layer, 0.0
        return there


async def audit(session: Session, root: Root, tokens: Sequence[int]) -> tuple[float, float]:
    """How far a branch's next-token distributions are from those after its own prompt, computed exactly.

    Parameters
    ----------
    root : Root
        Where the branch started.
    tokens : sequence of int
        What it wrote; its first tokens are looked at, at least one.

    Returns
    -------
    kl : float
        Mean KL divergence of the shared distributions from the exact ones, in nats.
    agreement : float
        Share of places with the same likeliest token.
    """
    exact = await session.prefill(root.prompt, keep=False, counted=False)
    room = session.context - max(len(root.prompt), len(root.cursor.tokens))  # the prompts may differ in length
    written = tokens[: min(AUDITED, room + 1)]
    right, got = [await along(session, cursor, written[:-1]) for cursor in (exact, root.cursor)]
    session.release(exact)
    return distance(right, got)


async def along(session: Session, cursor: Cursor, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities [1 + len(tokens), vocabulary], float64, after the cursor and after each of `tokens`."""
    if cursor.logits is None:
        await session.ready(cursor)
    assert cursor.logits is not None
    rows = [cursor.logits[None].double()]
    if tokens:
        rows.append((await session.logits_along(cursor, tokens)).double())
    return torch.cat(rows).log_softmax(-1)


def distance(right: Tensor, got: Tensor) -> tuple[float, float]:
    """Mean KL divergence of `got` from `right`, in nats, and the share of rows with the same likeliest token."""
    kl = (right.exp() * (right - got)).sum(-1).mean().item()
    return max(0.0, kl), (right.argmax(-1) == got.argmax(-1)).double().mean().item()
