"""RSBCM: what is evicted first, what never, and that nothing grows."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support import GREEDY, random_tokens, tiny_engine
from tiny_models import tiny_model

from rksc_agents import ConfigError, RKSCReasoner, SelfConsistency
from rksc_agents.cache.store import Segment
from rksc_agents.config import Sampling
from rksc_agents.engine.cursor import Cursor
from rksc_agents.engine.session import Session
from rksc_agents.testing import scripted_reasoner

PROMPT = random_tokens(24)


async def _branches(session: Session, count: int) -> list[Cursor]:
    root = await session.prefill(PROMPT, keep=False)
    sampling = Sampling(temperature=1.0, max_tokens=9)
    done = await session.decode(session.fork(root, count), sampling)
    session.release(root)
    return [completion.cursor for completion in done if completion.cursor is not None]


def test_low_scores_go_first() -> None:
    with tiny_engine(tiny_model("Llama")) as engine:

        async def solve(session: Session) -> list[int]:
            cursors = await _branches(session, 4)
            for cursor, score in zip(cursors, (0.4, 0.1, 0.9, 0.2), strict=True):
                session.score(cursor, score)
            tree, order = engine.scheduler.tree, []
            for _ in cursors:
                tree.evict(1)
                order += [i for i, cursor in enumerate(cursors) if not cursor.node.alive and i not in order]
            return order

        assert engine.run(solve) == [1, 3, 0, 2]


def test_deep_branches_go_before_shallow_ones_of_the_same_score() -> None:
    with tiny_engine(tiny_model("Llama")) as engine:

        async def solve(session: Session) -> tuple[bool, bool]:
            shallow, other = await _branches(session, 2)
            (step,) = await session.decode([other], Sampling(temperature=1.0, max_tokens=9))
            deep = step.cursor
            assert deep is not None
            assert deep.depth == 2
            for cursor in (shallow, deep):
                session.score(cursor, 0.5)
            session.release(other)
            engine.scheduler.tree.evict(1)
            return shallow.node.alive, deep.node.alive

        assert engine.run(solve) == (True, False)


def test_a_new_branch_counts_as_much_as_the_one_it_goes_on_from() -> None:
    with tiny_engine(tiny_model("Llama")) as engine:

        async def solve(session: Session) -> float:
            (cursor,) = await _branches(session, 1)
            session.score(cursor, 0.25)
            (step,) = await session.decode([cursor], Sampling(temperature=1.0, max_tokens=5))
            assert step.cursor is not None
            return step.cursor.node.score

        assert engine.run(solve) == 0.25


def test_a_score_outlives_eviction() -> None:
    with tiny_engine(tiny_model("Llama")) as engine:

        async def solve(session: Session) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
            (cursor,) = await _branches(session, 1)
            session.score(cursor, 0.25)
            (before,) = await session.decode(session.fork(cursor, 1), GREEDY.replace(max_tokens=6))
            engine.scheduler.tree.evict(10**9)
            assert not cursor.node.alive
            await session.ready(cursor)
            (after,) = await session.decode(session.fork(cursor, 1), GREEDY.replace(max_tokens=6))
            return cursor.node.score, before.tokens, after.tokens

        score, before, after = engine.run(solve)
        assert score == 0.25
        assert before == after


@pytest.mark.parametrize("score", [-0.1, 1.1, float("nan")])
def test_a_score_is_a_share(score: float) -> None:
    with tiny_engine(tiny_model("Llama")) as engine:

        async def solve(session: Session) -> None:
            (cursor,) = await _branches(session, 1)
            session.score(cursor, score)

        with pytest.raises(ConfigError, match="from 0 to 1"):
            engine.run(solve)


def test_eviction_gives_the_tensors_back() -> None:
    with tiny_engine(tiny_model("Llama")) as engine:

        async def solve(session: Session) -> tuple[list[weakref.ref[torch.Tensor]], int]:
            (cursor,) = await _branches(session, 1)
            payload = cursor.node.payload
            assert isinstance(payload, Segment)
            alive = [weakref.ref(tensor) for pair in payload.kv.values() for tensor in pair]
            before, nbytes = engine.budget.held, payload.nbytes
            del payload
            engine.scheduler.tree.evict(1)
            return alive, before - nbytes - engine.budget.held

        alive, difference = engine.run(solve)
        gc.collect()
        assert difference == 0
        assert [reference() for reference in alive] == [None] * len(alive)


def test_running_branches_are_never_evicted() -> None:
    with tiny_engine(tiny_model("Llama")) as engine:

        async def solve(session: Session) -> list[bool]:
            root = await session.prefill(PROMPT, keep=False)
            alive = []

            def evict(index: int, token: int, text: str) -> None:
                engine.scheduler.tree.evict(10**9)
                alive.append(root.node.alive)

            forks = session.fork(root, 2)
            await session.decode(forks, Sampling(temperature=1.0, max_tokens=6), on_token=evict)
            return alive

        assert engine.run(solve) == [True] * 12


def test_500_requests_leave_nothing_behind() -> None:
    questions = {f"Question {i}?": {f"It is {i}.": 2.0, f"It is {i + 1}.": 1.0} for i in range(50)}
    with scripted_reasoner(questions, kv_budget=2**16) as reasoner:
        assert isinstance(reasoner, RKSCReasoner)
        held, nodes, tensors = [], [], []
        for number in range(500):
            strategy = SelfConsistency(branches=3) if number % 2 else "best-of-n"
            reasoner.reason(f"Question {number * 7 % 50}?", strategy=strategy, max_tokens=40, seed=number)
            if number % 50 == 49:
                held.append(reasoner.kv_bytes)
                nodes.append(reasoner._engine.inspect(lambda scheduler: len(list(scheduler.tree.nodes()))))
                gc.collect()
                tensors.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))
        assert max(held) <= 2**16
        assert max(nodes[5:]) <= max(nodes[:5]) * 1.5
        assert max(tensors[5:]) <= max(tensors[:5]) * 1.5
        reasoner.clear_cache()
        assert reasoner.kv_bytes == 0
