"""What ASKS saves and what it costs: questions in several phrasings, shared with the first one in each mode.

For each phrasing the exact computation is the measure: its greedy answer is compared with the one after shared KV, and
the next-token distributions along it, and the model's verdict on it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from rksc_agents.cache.alignment import align
from rksc_agents.config import EngineConfig, Sampling, Sharing
from rksc_agents.engine.asks import AUDITED, EARLY, along, distance, sigma, states_of
from rksc_agents.engine.cursor import Completion, Cursor
from rksc_agents.engine.session import Session
from rksc_agents.questions import Question
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.strategy import Outcome, Strategy
from rksc_agents.reasoning.voting import answer_keys
from rksc_agents.verify.intervals import spearman
from rksc_agents.verify.self_verifier import SelfVerifier
from rksc_agents.verify.words import verdict_tokens

ALPHA = Sharing().alpha
SHORTEST = Sharing().shortest


@dataclass(slots=True)
class Pair:
    """One phrasing under one mode: what was reused, and how far it is from exact."""

    mode: str
    length: int
    prefix: int
    reused: int
    kl: float
    agreement: float
    same_answer: bool
    same_verdict: bool
    predictors: dict[str, float] = field(default_factory=dict)


class _Compare(Strategy):
    """Computes every phrasing exactly and in each lossy mode."""

    name: ClassVar[str] = "compare-sharing"

    firsts: tuple[int, ...]
    tokens: int
    sink: Callable[[Pair], None]

    async def solve(self, problem: Problem) -> Outcome:
        session = problem.session
        sampling = Sampling(temperature=0, max_tokens=self.tokens)
        root = await session.prefill(problem.prompts[0])
        async with asyncio.TaskGroup() as group:
            for prompt in problem.prompts[1:]:
                group.create_task(self._compare(problem, root, prompt, sampling))
        async with problem.branching(await problem.start(1), sampling=sampling.replace(max_tokens=1)) as ended:
            async for _ in ended:
                pass
        return Outcome(0, None)

    async def _compare(self, problem: Problem, root: Cursor, prompt: tuple[int, ...], sampling: Sampling) -> None:
        session = problem.session
        prefix = align(root.tokens, prompt).prefix
        cursors = {"semantic": session.fork(root, 1)[0]}
        reused = {"semantic": len(prompt)}
        for first in self.firsts:
            found = align(root.tokens, prompt, first=first, shortest=SHORTEST, never=session.codec.number_tokens)
            mode = f"aligned, first {first}"
            cursors[mode] = await session.transplant(root, prompt, found.taken)
            reused[mode] = prefix + len(found.taken)
        # last, and gone afterwards: what the tree has exactly is not taken from elsewhere
        exact = await session.prefill(prompt, keep=False)
        cursors = {"exact": exact, **cursors}
        done = await session.decode(list(cursors.values()), sampling)
        texts = [completion.text for completion in done]
        answers = [(await session.call(problem.settings.reader.read, text)).answer for text in texts]
        keys = await session.call(answer_keys, answers)
        written = done[0].tokens[: AUDITED - 1]
        right = await along(session, exact, written)
        verdicts = await self._verdicts(problem, list(cursors.values()), done[0])
        predictors = await _predictors(session, root, exact)
        for at, (mode, cursor) in enumerate(cursors.items()):
            if mode == "exact":
                continue
            kl, agreement = distance(right, await along(session, cursor, written))
            self.sink(
                Pair(
                    mode=mode,
                    length=len(prompt),
                    prefix=prefix,
                    reused=reused[mode],
                    kl=kl,
                    agreement=agreement,
                    same_answer=keys[at] == keys[0] if keys[0] >= 0 else texts[at] == texts[0],
                    same_verdict=(verdicts[at] > 0) == (verdicts[0] > 0),
                    predictors=predictors if mode == "semantic" else {},
                )
            )
        for completion in done:
            if completion.cursor is not None:
                session.release(completion.cursor)
        for cursor in cursors.values():
            session.release(cursor)

    async def _verdicts(self, problem: Problem, cursors: Sequence[Cursor], exact: Completion) -> list[float]:
        """Log-odds of YES about the exact answer, on the KV of each cursor."""
        codec = problem.session.codec
        request = SelfVerifier().request
        extension = (*exact.tokens, *codec.follow_up(problem.question, request, exact.tokens))
        groups = verdict_tokens(codec)
        readings = await problem.session.probe(cursors, [extension] * len(cursors), groups)
        return [reading.values[0] - reading.values[1] for reading in readings]


async def _predictors(session: Session, root: Cursor, own: Cursor) -> dict[str, float]:
    """What might tell, before anything is shared, how much harm it does; larger is more alike."""
    depth = session.depth
    early = max(1, depth // EARLY)
    mine, theirs = await states_of(session, [own.tokens, root.tokens], depth)
    part = {layer: state for layer, state in mine.items() if layer <= early}
    found = align(root.tokens, own.tokens, first=0, shortest=SHORTEST, last=1)
    deviation = {
        layer: -((mine[layer] - theirs[layer]).norm() / theirs[layer].norm()).item() for layer in (early, depth)
    }
    return {
        "sigma": sigma(mine, theirs, ALPHA),
        "early-sigma": sigma(part, theirs, ALPHA),
        "tokens": 2.0 * min(found.prefix + found.matched, len(root.tokens)) / (len(root.tokens) + len(own.tokens)),
        "last hidden state, cosine": torch.cosine_similarity(mine[depth], theirs[depth], dim=0).item(),
        "hidden deviation, early layer": deviation[early],
        "hidden deviation, last layer": deviation[depth],
        "value deviation, early layer": -_value_deviation(root, own, early - 1),
        "value deviation, last layer": -_value_deviation(root, own, depth - 1),
        "length": -abs(math.log(len(own.tokens) / len(root.tokens))),
    }


def _value_deviation(root: Cursor, own: Cursor, layer: int, tokens: int = 4) -> float:
    """How far the values of the last tokens, which all prompts end with, are from the first prompt's."""
    mine, theirs = (_values(cursor, layer)[:, -tokens:] for cursor in (own, root))
    return float((mine - theirs).norm() / theirs.norm())


def _values(cursor: Cursor, layer: int) -> Tensor:
    pieces = [node.payload.kv[layer][1] for node in cursor.node.path()]  # type: ignore[union-attr]
    return torch.cat(pieces, 1).float()


def bench_sharing(
    model: str,
    questions: Sequence[Question],
    *,
    firsts: Sequence[int] = (0, 4, 8, 16, 20),
    tokens: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Compare each mode with exact computation over the phrasings of `questions`.

    Parameters
    ----------
    model : str
        As for `rksc ask`.
    questions : sequence of Question
        Each with two or more `prompts`, of which the first is shared from.
    firsts : sequence of int, default 0, 4, 8, 16, 20
        Tokens recomputed at the beginning of each run in mode "aligned".
    tokens : int, default 64
        Tokens of each greedy answer.

    Returns
    -------
    dict
        model, pairs; rows, each with mode, reused, over_exact (percentage points), kl_mean, kl_p95, agreement,
        same_answer, same_verdict; predictors, each with its rank correlation with the KL of "semantic" (negative is
        right: more alike, less harm).
    """
    pairs: list[Pair] = []
    engine = EngineConfig()
    with RKSCReasoner.from_pretrained(model, dtype=torch.float32, engine=engine) as reasoner:
        strategy = _Compare(firsts=tuple(firsts), tokens=tokens, sink=pairs.append)
        for number, question in enumerate(questions, 1):
            reasoner.reason(question.prompts[0], phrasings=question.prompts[1:], strategy=strategy, exit="off")
            reasoner.clear_cache()
            if progress is not None:
                progress(number, len(questions))
        name = reasoner.name
    modes = dict.fromkeys(pair.mode for pair in pairs)
    rows = [_row(mode, [pair for pair in pairs if pair.mode == mode]) for mode in modes]
    semantic = [pair for pair in pairs if pair.mode == "semantic"]
    harm = [pair.kl for pair in semantic]
    predictors = {name: spearman([pair.predictors[name] for pair in semantic], harm) for name in semantic[0].predictors}
    spread = sorted(pair.predictors["sigma"] for pair in semantic)
    return {
        "model": name,
        "pairs": len(semantic),
        "rows": rows,
        "predictors": predictors,
        "sigma_range": [spread[0], spread[-1]],
    }


def _row(mode: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    total = sum(pair.length for pair in pairs)
    kls = sorted(pair.kl for pair in pairs)
    return {
        "mode": mode,
        "reused": sum(pair.reused for pair in pairs) / total,
        "over_exact": 100 * sum(pair.reused - pair.prefix for pair in pairs) / total,
        "kl_mean": fmean(kls),
        "kl_p95": kls[min(len(kls) - 1, int(0.95 * len(kls)))],
        "agreement": fmean(pair.agreement for pair in pairs),
        "same_answer": fmean(pair.same_answer for pair in pairs),
        "same_verdict": fmean(pair.same_verdict for pair in pairs),
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the result as a Markdown table."""
    yield f"{found['model']}, {found['pairs']} pairs of phrasings"
    yield ""
    yield "| mode | reused | over exact | KL mean | KL 95 % | top-1 | answer | verdict |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in found["rows"]:
        yield (
            f"| {row['mode']} | {row['reused']:.1%} | {row['over_exact']:+.1f} pp | {row['kl_mean']:.4f} | "
            f"{row['kl_p95']:.4f} | {row['agreement']:.3f} | {row['same_answer']:.3f} | {row['same_verdict']:.3f} |"
        )
    yield ""
    low, high = found["sigma_range"]
    yield f"sigma from {low:.3f} to {high:.3f}; rank correlation with the KL of semantic:"
    yield ""
    for name, value in sorted(found["predictors"].items(), key=lambda item: item[1]):
        yield f"- {name}: {value:+.2f}"
