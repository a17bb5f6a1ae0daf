"""Random prefill / fork / decode / release / evict / cancel sequences against a brute-force model.

The scripted runner stores token ids as keys and values and computes the next token from what it
reads back, so a wrong split, copy or eviction shows up as a wrong token.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import GREEDY, NumberCodec, TinyEngine

from rksc_agents.config import EngineConfig
from rksc_agents.engine.cursor import Cursor
from rksc_agents.engine.session import Session
from rksc_agents.errors import KVBudgetError
from rksc_agents.testing import ScriptedRunner

VOCABULARY = 5
CONTEXT = 64


def following(tokens: tuple[int, ...]) -> int:
    """The next token: depends on every token before it and on their order."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1009
    return state % VOCABULARY


def logits(tokens: tuple[int, ...]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(following(tokens)), VOCABULARY).float() * 20


def continued(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Brute force: what greedy decoding must give."""
    out: list[int] = []
    while len(out) < count and len(tokens) + len(out) < CONTEXT:
        out.append(following(tokens + tuple(out)))
    return tuple(out)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), PROMPTS, st.booleans()),
        st.tuples(st.just("decode"), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 7)),
        st.tuples(st.just("fork"), st.integers(0, 9), st.integers(1, 3)),
        st.tuples(st.just("release"), st.integers(0, 9), st.none()),
        st.tuples(st.just("evict"), st.integers(1, 200), st.none()),
        st.tuples(st.just("stop early"), st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(1, 7)),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.integers(1, 30)),
    ),
    min_size=1,
    max_size=14,
)


async def act(session: Session, actions: list[tuple[str, Any, Any]]) -> None:
    held: list[Cursor] = [await session.prefill((0, 1))]
    for verb, first, second in actions:
        if verb == "prefill":
            cursor = await session.prefill(first, keep=second)
            assert cursor.tokens == first
            held.append(cursor)
        elif verb in ("decode", "stop early"):
            cursors = [held[i % len(held)] for i in first]
            cursors = [cursor for cursor in cursors if len(cursor.tokens) < CONTEXT - 1] or held[:1]
            run = session.decoding(cursors, GREEDY.replace(max_tokens=second))
            async with run:
                async for _ in run:
                    if verb == "stop early":
                        break
            for cursor, done in zip(cursors, run.completions, strict=True):
                expected = continued(cursor.tokens, second)
                if done.finish_reason == "cancelled":
                    assert done.tokens == expected[: len(done.tokens)]
                else:
                    assert done.tokens == expected
                    assert done.cursor is not None
                    held.append(done.cursor)
        elif verb == "fork":
            held.extend(session.fork(held[first % len(held)], second))
        elif verb == "release" and len(held) > 1:
            session.release(held.pop(first % (len(held) - 1) + 1))
        elif verb == "evict":
            session._work.scheduler.tree.evict(first)
        elif verb == "cancel":
            cursor = held[first % len(held)]
            if len(cursor.tokens) < CONTEXT - 1:
                task = asyncio.create_task(session.decode([cursor] * 2, GREEDY.replace(max_tokens=40)))
                for _ in range(second):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        budget = session._work.scheduler.budget
        assert budget.held <= budget.limit


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=st.lists(ACTIONS, min_size=1, max_size=3), limit=st.sampled_from([8 * 400, 8 * 1000, 8 * 10**5]))
def test_any_sequence_of_verbs(requests: list[list[tuple[str, Any, Any]]], limit: int) -> None:
    config = EngineConfig(prefill_chunk=5)
    engine = TinyEngine(
        lambda budget: ScriptedRunner(logits, VOCABULARY, budget),
        NumberCodec(),  # type: ignore[arg-type]
        context=CONTEXT,
        kv_limit=limit,
        config=config,
    )
    try:
        futures = [engine.submit(lambda s, a=actions: act(s, a)) for actions in requests]
        for future in futures:
            error = future.exception(timeout=60)
            assert error is None or (isinstance(error, KVBudgetError) and error.needed > limit), error
        engine.check_books()
        assert engine.budget.peak <= limit
        engine.inspect(lambda scheduler: scheduler.tree.clear())
        assert engine.held() == 0
    finally:
        engine.close()
