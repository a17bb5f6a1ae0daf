"""Counts, budgets, failures and cancellation of the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from support import GREEDY, TinyEngine, generate, random_tokens, tiny_engine
from tiny_models import tiny_model
from transformers import PreTrainedModel

from rksc_agents.engine.cursor import Completion
from rksc_agents.engine.session import Session
from rksc_agents.errors import EngineClosedError, EngineError, KVBudgetError, PromptTooLongError

PROMPT = random_tokens(40)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("Llama", max_position_embeddings=2048)


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[TinyEngine]:
    with tiny_engine(model, context=2048) as made:
        yield made


def computed(engine: TinyEngine) -> int:
    return engine.inspect(lambda scheduler: scheduler.runner.tokens_computed)


async def ask(session: Session, prompt: tuple[int, ...], branches: int, tokens: int) -> list[Completion]:
    root = await session.prefill(prompt)
    return await session.decode(session.fork(root, branches), GREEDY.replace(max_tokens=tokens))


def test_branches_compute_the_prompt_once(engine: TinyEngine) -> None:
    before = computed(engine)
    engine.run(lambda s: ask(s, PROMPT, 8, 5))
    assert computed(engine) - before == len(PROMPT) + 8 * 4  # a branch's last token is never fed


def test_a_cached_prompt_computes_one_token(engine: TinyEngine) -> None:
    engine.run(lambda s: ask(s, PROMPT, 1, 1))
    before = computed(engine)
    engine.run(lambda s: ask(s, PROMPT, 3, 1))
    assert computed(engine) - before == 1


def test_a_second_turn_computes_its_new_tokens(engine: TinyEngine) -> None:
    async def first(session: Session) -> tuple[int, ...]:
        done = await ask(session, PROMPT, 4, 6)
        assert done[2].cursor is not None
        session.keep(done[2].cursor)
        return done[2].cursor.tokens

    said = engine.run(first)
    turn = said + random_tokens(7, seed=5)
    before = computed(engine)
    engine.run(lambda s: ask(s, turn, 2, 1))
    assert computed(engine) - before == 7 + 1  # and the answer's last token, whose KV nobody had needed


def test_requests_share_a_prefix_that_arrives_at_once(engine: TinyEngine) -> None:
    prompts = [PROMPT + random_tokens(5, seed=i) for i in range(6)]
    before = computed(engine)
    futures = [engine.submit(lambda s, p=p: ask(s, p, 1, 1)) for p in prompts]
    for future in futures:
        future.result(timeout=60)
    heads = {p[: len(PROMPT) + n] for p in prompts for n in range(1, 6)}
    assert computed(engine) - before == len(PROMPT) + len(heads)


def test_branches_hold_little_more_than_their_tokens(model: PreTrainedModel) -> None:
    """8 branches of 64 tokens on a 1,024-token prefix hold at most 1.1 times their tokens' KV."""
    prompt = random_tokens(1024)

    async def solve(session: Session) -> int:
        await ask(session, prompt, 8, 64)
        return session.ledger.kv.peak_bytes

    with tiny_engine(model, context=2048) as engine:
        peak = engine.run(solve)
        per_token = engine.inspect(lambda s: s.runner.token_bytes)
        assert engine.budget.peak <= 1.1 * (1024 + 8 * 64) * per_token
        assert peak <= engine.budget.peak


def test_kv_report_counts_shared_runs_once(engine: TinyEngine) -> None:
    async def solve(session: Session) -> tuple[int, int, int]:
        await ask(session, PROMPT, 8, 33)
        kv = session.ledger.kv
        return kv.peak_bytes, kv.bytes_if_copied, kv.tokens_shared

    peak, copied, shared = engine.run(solve)
    per_token = engine.inspect(lambda s: s.runner.token_bytes)
    assert peak == (40 + 8 * 32) * per_token
    assert copied == 8 * (40 + 32) * per_token
    assert shared == 7 * 40


def test_rows_leave_the_batch_when_they_finish(model: PreTrainedModel) -> None:
    """A row that ends early is not computed any further."""
    short, long = PROMPT, random_tokens(40, seed=3)
    end = generate(model, short, 8)[3]
    with tiny_engine(model, eos=[end], context=2048) as engine:

        async def solve(session: Session) -> list[Completion]:
            roots = [await session.prefill(short), await session.prefill(long)]
            return await session.decode(roots, GREEDY.replace(max_tokens=30))

        before = computed(engine)
        first, second = engine.run(solve)
        assert first.finish_reason == "eos"
        assert first.tokens == generate(model, short, 8)[: len(first.tokens)]
        assert computed(engine) - before == 80 + len(first.tokens) - 1 + len(second.tokens) - 1


def test_each_row_stops_for_itself(engine: TinyEngine, model: PreTrainedModel) -> None:
    long = random_tokens(40, seed=3)
    stop = str(generate(model, PROMPT, 6)[2])

    async def solve(session: Session) -> list[Completion]:
        roots = [await session.prefill(PROMPT), await session.prefill(long)]
        return await session.decode(roots, GREEDY.replace(max_tokens=6, stop=(stop,)))

    first, second = engine.run(solve)
    assert first.finish_reason == "stop"
    assert stop not in first.text.split()
    expected = generate(model, long, 6)
    assert second.tokens == expected[: len(second.tokens)]


def test_a_long_prompt_does_not_stall_running_rows(model: PreTrainedModel) -> None:
    """While a long prompt is prefilled piece by piece, a running row gets a token in every step."""
    tokens_seen: list[int] = []
    started = threading.Event()

    def on_token(index: int, token: int, text: str) -> None:
        tokens_seen.append(token)
        started.set()

    async def short(session: Session) -> None:
        root = await session.prefill(PROMPT)
        await session.decode([root], GREEDY.replace(max_tokens=200), on_token=on_token)

    async def long(session: Session) -> tuple[int, int]:
        before, passes = len(tokens_seen), session._work.scheduler.runner.passes
        await session.prefill(random_tokens(900, seed=8))
        return len(tokens_seen) - before, session._work.scheduler.runner.passes - passes

    with tiny_engine(model, context=2048, prefill_chunk=16) as engine:
        running = engine.submit(short)
        assert started.wait(60)
        grown, passes = engine.run(long)
        running.result(timeout=60)
    assert passes >= 900 // 16
    assert abs(grown - passes) <= 2


def test_idle_level_after_a_request_a_cancellation_and_an_exception(engine: TinyEngine) -> None:
    engine.run(lambda s: ask(s, PROMPT, 4, 8))
    idle = engine.held()

    engine.run(lambda s: ask(s, PROMPT, 4, 8))
    assert engine.held() == idle
    engine.check_books()

    began = threading.Event()

    async def endless(session: Session) -> None:
        root = await session.prefill(PROMPT)
        on = lambda index, token, text: began.set()  # noqa: E731
        await session.decode(session.fork(root, 4), GREEDY.replace(max_tokens=1500), on_token=on)

    future = engine.submit(endless)
    assert began.wait(60)
    future.cancel()
    _settle(engine)
    assert engine.held() == idle
    engine.check_books()

    async def failing(session: Session) -> None:
        await ask(session, PROMPT, 4, 3)
        raise RuntimeError("the strategy's own fault")

    with pytest.raises(RuntimeError, match="own fault"):
        engine.run(failing)
    assert engine.held() == idle
    engine.check_books()


def _settle(engine: TinyEngine) -> None:
    deadline = time.monotonic() + 30
    while engine.inspect(lambda scheduler: scheduler.busy):
        assert time.monotonic() < deadline


def test_leaving_the_block_cancels_what_runs(engine: TinyEngine) -> None:
    async def solve(session: Session) -> list[Completion]:
        root = await session.prefill(PROMPT)
        short = await session.prefill(random_tokens(2040, seed=4))  # has room for 8 tokens
        run = session.decoding([*session.fork(root, 2), short], GREEDY.replace(max_tokens=100))
        async with run:
            async for done in run:
                assert done.index == 2
                break
        assert not session._work.scheduler.busy
        return run.completions

    completions = engine.run(solve)
    assert [done.finish_reason for done in completions] == ["cancelled", "cancelled", "length"]
    assert len(completions[0].tokens) in (8, 9)
    engine.check_books()


def test_an_exception_in_a_pass_reaches_its_request_alone(model: PreTrainedModel) -> None:
    bad = random_tokens(40, seed=9)

    with tiny_engine(model, context=2048) as engine:
        forward = engine.runner.forward

        def broken(runs):  # type: ignore[no-untyped-def]
            if any(run.bases[0].path()[:1] and run.bases[0].path()[0].tokens[:40] == bad for run in runs):
                raise ZeroDivisionError("a kernel failed")
            return forward(runs)

        engine.runner.forward = broken  # type: ignore[method-assign]
        expected = generate(model, PROMPT, 20)
        good = engine.submit(lambda s: ask(s, PROMPT, 3, 20))
        failing = engine.submit(lambda s: ask(s, bad, 3, 20))
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            failing.result(timeout=60)
        assert good.result(timeout=60)[0].tokens == expected
        assert engine.run(lambda s: ask(s, PROMPT, 1, 4))[0].tokens == expected[:4]
        engine.check_books()


def test_the_model_cannot_be_used_beside_a_running_engine(model: PreTrainedModel) -> None:
    """Two users of one model at once would read each other's KV: the second is told so."""
    with tiny_engine(model, context=2048) as engine:
        future = engine.submit(lambda s: ask(s, PROMPT, 2, 1900))
        while not engine.inspect(lambda scheduler: bool(scheduler.decodes.jobs)):
            pass
        with pytest.raises(EngineError, match="while an engine runs on it"):
            generate(model, PROMPT, 5)
        future.cancel()
        _settle(engine)
    assert len(generate(model, PROMPT, 5)) == 5


def test_nan_logits_are_an_error(model: PreTrainedModel) -> None:
    with tiny_engine(model, context=2048) as engine:
        forward = engine.runner.forward
        engine.runner.forward = lambda runs: forward(runs) * float("nan")  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            engine.run(lambda s: ask(s, PROMPT, 2, 3))
        engine.check_books()


def test_too_long_a_prompt(engine: TinyEngine) -> None:
    with pytest.raises(PromptTooLongError, match=r"2048 tokens .* context is 2048"):
        engine.run(lambda s: ask(s, random_tokens(2048), 1, 1))


def test_a_branch_ends_where_the_context_ends(engine: TinyEngine) -> None:
    (done,) = engine.run(lambda s: ask(s, random_tokens(2040), 1, 100))
    assert (len(done.tokens), done.finish_reason) == (8, "length")


def test_a_request_that_can_never_fit_is_refused(model: PreTrainedModel) -> None:
    with tiny_engine(model, context=2048, kv_limit=384 * 100) as engine:
        with pytest.raises(KVBudgetError) as caught:
            engine.run(lambda s: ask(s, PROMPT, 8, 50))
        assert caught.value.limit == 38400
        assert caught.value.needed == 384 * (40 + 8 * 49)
        assert str(caught.value.needed) in str(caught.value).replace(",", "")
        assert engine.run(lambda s: ask(s, PROMPT, 1, 50))[0].tokens == generate(model, PROMPT, 50)


def test_the_budget_is_kept_and_work_waits_its_turn(model: PreTrainedModel) -> None:
    """Six requests that fit one at a time all finish, with the right tokens, and never exceed the budget."""
    limit = 384 * (40 + 3 * 32 + 8)
    prompts = [random_tokens(40, seed=i) for i in range(6)]
    expected = [generate(model, prompt, 30) for prompt in prompts]
    with tiny_engine(model, context=2048, kv_limit=limit) as engine:
        futures = [engine.submit(lambda s, p=p: ask(s, p, 3, 30)) for p in prompts]
        for tokens, future in zip(expected, futures, strict=True):
            assert {done.tokens for done in future.result(timeout=60)} == {tokens}
        assert engine.budget.peak <= limit
        assert engine.inspect(lambda s: s.tree.evicted) >= 5


def test_evicted_branches_are_computed_again_with_the_same_result(model: PreTrainedModel) -> None:
    async def solve(session: Session) -> tuple[list[Completion], int]:
        root = await session.prefill(PROMPT)
        first = await session.decode(session.fork(root, 2), GREEDY.replace(max_tokens=6))
        session._work.scheduler.tree.evict(10**9)
        cursors = [done.cursor for done in first if done.cursor is not None]
        assert not any(cursor.node.alive for cursor in cursors)
        return await session.decode(cursors, GREEDY.replace(max_tokens=5)), session.ledger.recomputed

    with tiny_engine(model, context=2048) as engine:
        second, recomputed = engine.run(solve)
    assert {done.tokens for done in second} == {generate(model, PROMPT, 11)[6:]}
    assert recomputed == 46


def test_closing_ends_what_runs() -> None:
    model = tiny_model("Llama", max_position_embeddings=2048)
    with tiny_engine(model, context=2048) as engine:
        future = engine.submit(lambda s: ask(s, PROMPT, 2, 1900))
        while not engine.inspect(lambda scheduler: bool(scheduler.decodes.jobs)):
            pass
        engine.close()
        with pytest.raises(EngineClosedError):
            future.result(timeout=60)
        with pytest.raises(EngineClosedError):
            engine.submit(lambda s: ask(s, PROMPT, 1, 1))


def test_threads_and_tasks_at_once(engine: TinyEngine, model: PreTrainedModel) -> None:
    """8 threads and 50 tasks get what each would get alone, and the loop is never blocked."""
    prompts = [random_tokens(10 + i % 7, seed=i) for i in range(58)]
    expected = [generate(model, prompt, 12) for prompt in prompts]
    from_threads: dict[int, tuple[int, ...]] = {}

    def in_thread(i: int) -> None:
        from_threads[i] = engine.run(lambda s: ask(s, prompts[i], 2, 12))[1].tokens

    threads = [threading.Thread(target=in_thread, args=(i,)) for i in range(50, 58)]

    async def in_task(i: int) -> tuple[int, ...]:
        future = asyncio.wrap_future(engine.submit(lambda s: ask(s, prompts[i], 2, 12)))
        if i % 10 == 0:
            await asyncio.sleep(0)
            future.cancel()
        return (await future)[0].tokens

    async def main() -> tuple[list[tuple[int, ...]], int, int]:
        ticks = 0
        ended = False

        async def heart() -> None:
            nonlocal ticks
            while not ended:
                ticks += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(heart())
        before = engine.runner.passes
        tasks = [asyncio.create_task(in_task(i)) for i in range(50)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        steps = engine.runner.passes - before
        ended = True
        await beating
        return results, ticks, steps  # type: ignore[return-value]

    for thread in threads:
        thread.start()
    results, ticks, steps = asyncio.run(main())
    for thread in threads:
        thread.join()
    for i, result in enumerate(results):
        if i % 10 == 0:
            assert isinstance(result, asyncio.CancelledError), (i, result)
        else:
            assert result == expected[i]
    assert from_threads == {i: expected[i] for i in range(50, 58)}
    assert ticks >= steps > 0
    _settle(engine)
    engine.check_books()


def test_global_random_state_is_untouched(engine: TinyEngine) -> None:
    from rksc_agents.config import Sampling

    before = torch.get_rng_state()

    async def solve(session: Session) -> list[Completion]:
        root = await session.prefill(PROMPT)
        return await session.decode(session.fork(root, 4), Sampling(temperature=1.0, max_tokens=10))

    tokens = [done.tokens for done in engine.run(solve)]
    assert len(set(tokens)) > 1
    assert torch.equal(before, torch.get_rng_state())
