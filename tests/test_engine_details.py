"""Details of the engine: order of work, shares of a step, claims, memory, counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from support import GREEDY, NumberCodec, TinyEngine, generate, random_tokens, tiny_engine
from tiny_models import tiny_model

from rksc_agents import BestOfN, BranchToken, EngineError, KVBudgetError, Outcome, Problem, SelfConsistency, Strategy
from rksc_agents.cache.budget import Budget
from rksc_agents.cache.store import LayerShape, Layout, Segment, Tail
from rksc_agents.cache.tree import Node, Tree
from rksc_agents.config import EngineConfig
from rksc_agents.engine.jobs import PrefillJob
from rksc_agents.engine.ledger import Ledger
from rksc_agents.engine.scheduler import Scheduler
from rksc_agents.engine.session import Session
from rksc_agents.model.linear import compiled_blocks
from rksc_agents.model.partial import MASKED, partial_attention
from rksc_agents.testing import Script, ScriptedRunner, scripted_reasoner

VOCABULARY = 16
NUMBERS = tuple(range(12))
LAYOUT = Layout({0: LayerShape(1, 1, 1, torch.float32, torch.device("cpu"))})  # 8 bytes a token


def _next(tokens: tuple[int, ...]) -> torch.Tensor:
    """Counts on from the last token."""
    return torch.nn.functional.one_hot(torch.tensor((tokens[-1] + 1) % VOCABULARY), VOCABULARY).float() * 20


@contextmanager
def counting_engine(
    logits: Callable[[tuple[int, ...]], torch.Tensor] = _next, *, context: int = 256, limit: int = 10**6, **config: int
) -> Iterator[TinyEngine]:
    engine = TinyEngine(
        lambda budget: ScriptedRunner(logits, VOCABULARY, budget),
        NumberCodec(),  # type: ignore[arg-type]
        context=context,
        kv_limit=limit,
        config=EngineConfig(**config),
    )
    try:
        yield engine
    finally:
        engine.close()
    assert engine.budget.held == engine.budget.promised == 0


# -- the scheduler ------------------------------------------------------------------------------


def test_rows_beyond_the_limit_wait_and_are_not_overtaken() -> None:
    seen: list[str] = []

    async def solve(session: Session) -> None:
        root = await session.prefill(NUMBERS)

        async def group(name: str, rows: int, tokens: int) -> None:
            await session.decode(
                session.fork(root, rows),
                GREEDY.replace(max_tokens=tokens),
                on_token=lambda index, token, text: seen.append(name),
            )

        await asyncio.gather(group("a", 3, 20), group("b", 2, 5), group("c", 1, 5))

    with counting_engine(max_rows=4) as engine:
        engine.run(solve)
    assert list(dict.fromkeys(seen)) == ["a", "b", "c"]
    assert seen.index("b") == 3 * 20


def test_one_job_may_have_more_rows_than_run_at_once() -> None:
    async def solve(session: Session) -> int:
        root = await session.prefill(NUMBERS)
        return len(await session.decode(session.fork(root, 5), GREEDY.replace(max_tokens=3)))

    with counting_engine(max_rows=2) as engine:
        assert engine.run(solve) == 5


def test_the_older_request_comes_first() -> None:
    def look(scheduler: Scheduler) -> list[float]:
        loop = asyncio.get_running_loop()
        jobs = [PrefillJob(Ledger(submitted=at), NUMBERS, loop.create_future()) for at in (2.0, 1.0, 3.0)]
        for job in jobs:
            scheduler.add(job)
        order = [job.ledger.submitted for job in scheduler.waiting]
        for job in jobs:
            scheduler.cancel(job)
        return order

    with counting_engine() as engine:
        assert engine.inspect(look) == [1.0, 2.0, 3.0]


def test_running_rows_take_nothing_of_the_prompts_piece() -> None:
    ended: list[str] = []

    async def solve(session: Session) -> None:
        root = await session.prefill(NUMBERS)

        async def row() -> None:
            await session.decode(session.fork(root, 1), GREEDY.replace(max_tokens=60))
            ended.append("row")

        async def prompt() -> None:
            await session.prefill(tuple(i % 7 for i in range(40)))
            ended.append("prompt")

        await asyncio.gather(*(row() for _ in range(4)), prompt())

    with counting_engine(prefill_chunk=4) as engine:
        engine.run(solve)
    assert ended[0] == "prompt"


def test_prompts_share_the_piece_of_a_step() -> None:
    widths: list[int] = []

    async def solve(session: Session) -> None:
        await asyncio.gather(*(session.prefill((first, *NUMBERS)) for first in range(3)))

    with counting_engine(prefill_chunk=4) as engine:
        forward = engine.runner.forward

        def watched(runs):  # type: ignore[no-untyped-def]
            widths.append(sum(run.width for run in runs))
            return forward(runs)

        engine.runner.forward = watched  # type: ignore[method-assign]
        engine.run(solve)
    assert sum(widths) == 3 * 13
    assert max(widths) == 4


def test_a_job_evicted_while_it_waits_is_computed_again() -> None:
    async def solve(session: Session) -> tuple[tuple[int, ...], int]:
        root, other = await session.prefill(NUMBERS), await session.prefill((5, 3), keep=False)
        evicted = False

        def evict(index: int, token: int, text: str) -> None:
            nonlocal evicted
            if not evicted and session._work.scheduler.waiting:
                evicted = bool(session._work.scheduler.tree.evict(10**9))

        busy = session.decode(session.fork(root, 2), GREEDY.replace(max_tokens=20), on_token=evict)
        _, (done,) = await asyncio.gather(busy, session.decode([other], GREEDY.replace(max_tokens=3)))
        assert evicted
        return done.tokens, session.ledger.recomputed

    with counting_engine(max_rows=2) as engine:
        assert engine.run(solve) == ((4, 5, 6), 2)
        engine.check_books()


def test_room_is_made_for_the_row_with_most_left() -> None:
    async def solve(session: Session) -> None:
        roots = [await session.prefill(NUMBERS[:10]), await session.prefill((1,) * 60)]
        await session.decode(roots, GREEDY.replace(max_tokens=100))

    with counting_engine(context=64, limit=8 * 100) as engine, pytest.raises(KVBudgetError) as caught:
        engine.run(solve)
    assert caught.value.needed == 8 * (70 + 2 * 53)


# -- what a request counts and claims -----------------------------------------------------------


def test_a_prompt_that_is_not_kept_goes_with_its_request() -> None:
    async def solve(session: Session) -> None:
        await session.prefill(NUMBERS, keep=False)

    with counting_engine() as engine:
        engine.run(solve)
        assert engine.held() == 0


def test_depth_grows_with_every_continuation() -> None:
    async def solve(session: Session) -> list[int]:
        cursor, depths = await session.prefill(NUMBERS), []
        for _ in range(3):
            (done,) = await session.decode([cursor], GREEDY.replace(max_tokens=4))
            depths.append(cursor.node.depth)
            assert done.cursor is not None
            cursor = done.cursor
            depths.append(cursor.node.depth)
        return depths

    with counting_engine() as engine:
        assert engine.run(solve) == [0, 1, 1, 2, 2, 3]


def test_what_goes_on_is_not_recomputed_and_evictions_are_the_requests_own() -> None:
    async def solve(session: Session) -> tuple[int, int, int]:
        root = await session.prefill(NUMBERS)
        (done,) = await session.decode([root], GREEDY.replace(max_tokens=4))
        assert done.cursor is not None
        await session.decode([done.cursor], GREEDY.replace(max_tokens=4))
        before = session.evicted()
        session._work.scheduler.tree.evict(10**9)
        return session.ledger.recomputed, before, session.evicted()

    with counting_engine() as engine:
        recomputed, before, after = engine.run(solve)
        assert (recomputed, before) == (0, 0)
        assert after > 0
        assert engine.run(solve)[1] == 0


def test_timings_are_there() -> None:
    with scripted_reasoner({"Say hello": "Hello there!"}) as reasoner:
        timings = reasoner.reason("Say hello", strategy="direct").timings
    assert timings.prefill_s > 0
    assert timings.decode_s > 0
    assert timings.prefill_s + timings.decode_s <= timings.total_s


# -- sampling -----------------------------------------------------------------------------------


def test_ignore_eos_goes_on() -> None:
    prompt, model = random_tokens(10), tiny_model("Llama")

    async def solve(session: Session) -> tuple[int, str]:
        root = await session.prefill(prompt)
        (done,) = await session.decode([root], GREEDY.replace(max_tokens=8, ignore_eos=True))
        return len(done.tokens), done.finish_reason

    with tiny_engine(model, eos=[generate(model, prompt, 8)[2]]) as engine:
        assert engine.run(solve) == (8, "length")


def test_the_repetition_penalty_counts_the_prompt() -> None:
    def logits(tokens: tuple[int, ...]) -> torch.Tensor:
        out = torch.zeros(VOCABULARY)
        out[1], out[2] = 2.0, 1.9
        return out

    async def solve(session: Session) -> tuple[int, ...]:
        root = await session.prefill((0, 1))
        (done,) = await session.decode([root], GREEDY.replace(max_tokens=2, repetition_penalty=1.5))
        return done.tokens

    with counting_engine(logits) as engine:
        assert engine.run(solve) == (2, 1)


# -- strategies ---------------------------------------------------------------------------------

LONG = "y" * 300
SCRIPT: Script = {"Go": {"short": 3, LONG: 1}, "Rank": {"Ha": 3, "Hb": 1, "x": 3}, "Say hello": "Hello there!"}


def _same(text: str) -> str:
    return "42"


def test_a_decided_vote_stops_the_branches_that_run() -> None:
    with scripted_reasoner(SCRIPT) as reasoner:
        result = reasoner.reason("Go", strategy=SelfConsistency(branches=12, extract=_same), seed=1, stop="yz")
    cut = [branch for branch in result.branches if branch.finish_reason == "cancelled"]
    assert cut
    assert all(branch.answer is None and len(branch.tokens) < 100 for branch in cut)
    assert all(branch.text == "y" * len(branch.tokens) for branch in cut)  # what a stop text held back is there
    assert result.answer == "42"
    assert len(result.branches) == 12


def test_a_vote_weighed_at_the_end_leaves_out_what_was_cut_short() -> None:
    strategy = SelfConsistency(branches=12, vote="confidence", confidence="self-certainty", stop=0.9, extract=_same)
    with scripted_reasoner(SCRIPT) as reasoner:
        result = reasoner.reason("Go", strategy=strategy, seed=1)
    assert any(branch.finish_reason == "cancelled" for branch in result.branches)
    assert sum(vote.weight for vote in result.votes) == pytest.approx(1.0)


class FirstEnd(Strategy):
    """Waits for one end while the others go on, and takes the surest."""

    name = "first-end"

    async def solve(self, problem: Problem) -> Outcome:
        async with problem.branching(await problem.start(12)) as ended:
            async for _ in ended:
                await problem.session.call(time.sleep, 0.02)
                break
        return Outcome(problem.surest(), None)


def test_the_surest_branch_is_one_that_ended() -> None:
    with scripted_reasoner(SCRIPT) as reasoner:
        result = reasoner.reason("Go", strategy=FirstEnd(), seed=1)
    surest = max(result.branches, key=lambda branch: branch.confidence)
    assert surest.finish_reason == "cancelled"
    assert result.text == "short"


def test_the_earliest_of_equals_wins() -> None:
    with scripted_reasoner(SCRIPT) as reasoner:
        assert reasoner.reason("Go", strategy=BestOfN(branches=4, score=lambda _: 1.0)).winner == 0
        assert reasoner.reason("Say hello", strategy=BestOfN(branches=4)).winner == 0


def test_answers_that_start_alike_add_their_weights() -> None:
    with scripted_reasoner(SCRIPT) as reasoner:
        (branch,) = reasoner.reason("Rank", strategy="direct", temperature=0).branches
    assert branch.text == "Ha"
    assert branch.logprobs[0] == pytest.approx(torch.tensor(4 / 7).log().item(), abs=1e-4)
    assert branch.logprobs[1] == pytest.approx(torch.tensor(3 / 4).log().item(), abs=1e-4)


def test_text_held_back_for_a_stop_comes_at_the_end() -> None:
    with scripted_reasoner(SCRIPT) as reasoner:
        events = list(reasoner.stream("Say hello", strategy="direct", stop="lo!", max_tokens=5))
    assert "".join(event.text for event in events if isinstance(event, BranchToken)) == "Hello"


# -- the tree and its memory --------------------------------------------------------------------


class Run(tuple[int, ...]):
    """A payload of one byte per token."""

    @property
    def nbytes(self) -> int:
        return len(self)

    def split(self, at: int) -> tuple[Run, Run]:
        return Run(self[:at]), Run(self[at:])


def _kept(tree: Tree, *tokens: int) -> Node:
    base = tree.match(tokens).node
    rest = tokens[base.end :]
    tree.budget.hold(len(rest))
    node = tree.insert(base, rest, Run(rest))
    tree.keep(node)
    return node


def test_a_kept_prefix_is_kept_up_to_the_root() -> None:
    tree = Tree(Budget(100))
    base = tree.root
    for tokens in ((0, 1), (2, 3)):
        tree.budget.hold(2)
        base = tree.insert(base, tokens, Run(tokens))
    tree.keep(base)
    tree.evict(1)
    assert tree.match((0, 1, 2, 3)).node.end == 2


@pytest.mark.parametrize("use", ["match", "pin", "insert"])
def test_what_was_used_last_is_evicted_last(use: str) -> None:
    tree = Tree(Budget(100))
    old, new = _kept(tree, 0, 0), _kept(tree, 1, 1)
    if use == "match":
        tree.match((0, 0))
    elif use == "pin":
        tree.pin(old)
        tree.unpin(old)
    else:
        tree.budget.hold(2)
        assert tree.insert(tree.root, (0, 0), Run((0, 0))) is old
    tree.evict(1)
    assert (old.alive, new.alive) == (True, False)


def _owns_its_memory(segment: Segment) -> bool:
    return all(t.untyped_storage().nbytes() == t.nbytes for pair in segment.kv.values() for t in pair)


def test_parts_of_a_segment_own_their_memory() -> None:
    kv = torch.arange(12.0).view(1, 12, 1)
    head, tail = Segment({0: (kv, kv.clone())}).split(5)
    assert _owns_its_memory(head)
    assert _owns_its_memory(tail)
    assert (head.nbytes, tail.nbytes) == (5 * 8, 7 * 8)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_sealed_row_owns_its_memory(rows: int) -> None:
    tail = Tail(LAYOUT, Budget(10**6), rows, 40)
    tail.grow(5)
    tail.write(0, torch.ones(rows, 1, 5, 1), torch.ones(rows, 1, 5, 1))
    tail.length = 5
    (segment,) = tail.part([0], [])
    assert segment.nbytes == 5 * 8
    assert _owns_its_memory(segment)


def test_a_row_that_ends_takes_its_promise_with_it() -> None:
    budget = Budget(10**6)
    budget.promise(4 * 40 * 8)
    tail = Tail(LAYOUT, budget, 4, 40, promised=4 * 40 * 8)
    tail.grow(1)
    tail.part([], [2])
    assert budget.held + budget.promised == 40 * 8
    tail.close()
    assert budget.held == budget.promised == 0


@pytest.mark.parametrize("name", ["LFM2 (hybrid)", "Mamba"])
@pytest.mark.filterwarnings("ignore::rksc_agents.PerBranchWarning")
def test_a_cached_prompt_of_a_recurrent_model_computes_one_token(name: str) -> None:
    async def solve(session: Session) -> int:
        before = session._work.scheduler.runner.tokens_computed
        root = await session.prefill(NUMBERS)
        await session.decode([root], GREEDY.replace(max_tokens=1))
        return session._work.scheduler.runner.tokens_computed - before

    with tiny_engine(tiny_model(name)) as engine:
        assert engine.run(solve) == len(NUMBERS)
        assert engine.run(solve) == 1


# -- models -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::rksc_agents.PerBranchWarning")
def test_a_pass_that_failed_with_private_caches_leaves_no_wrong_tokens() -> None:
    """A row's cache may have grown before another row failed, so the pass must not be made again."""
    model = tiny_model("Mamba")
    prompt = random_tokens(20)
    expected = generate(model, prompt, 12)

    async def solve(session: Session) -> list[object]:
        root = await session.prefill(prompt)
        good = session.decode([root], GREEDY.replace(max_tokens=12))

        return list(await asyncio.gather(good, session.prefill((5, 6, 7)), return_exceptions=True))

    with tiny_engine(model) as engine:
        call = engine.runner._call  # type: ignore[attr-defined]

        def broken(tokens: list[int], *rest: object) -> torch.Tensor:
            if tokens[:2] == [5, 6]:
                raise ZeroDivisionError("a kernel failed")
            out: torch.Tensor = call(tokens, *rest)
            return out

        engine.runner._call = broken  # type: ignore[attr-defined]
        good, bad = engine.run(solve)
        assert isinstance(bad, EngineError)
        assert isinstance(good, EngineError) or (isinstance(good, list) and good[0].tokens == expected)
        engine.check_books()


@pytest.mark.filterwarnings("ignore::rksc_agents.PerBranchWarning")
def test_private_caches_grow_within_the_budget() -> None:
    model = tiny_model("BLOOM (ALiBi)")
    old, new = random_tokens(40, seed=1), random_tokens(40, seed=2)
    with tiny_engine(model) as engine:
        a_token = engine.inspect(lambda scheduler: scheduler.runner.token_bytes)

    async def solve_new(session: Session) -> tuple[int, ...]:
        (done,) = await session.decode([await session.prefill(new)], GREEDY.replace(max_tokens=20))
        return done.tokens

    async def cached(session: Session) -> None:
        await session.prefill(old)

    limit = 165 * a_token  # two nodes of the new prompt, its copy, one node of the old prompt, and a few tokens
    with tiny_engine(model, kv_limit=limit) as engine:
        engine.run(cached)
        assert engine.run(solve_new) == generate(model, new, 20)
        assert engine.budget.peak <= limit


def test_a_query_that_sees_nothing_merges_with_no_weight_in_16_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 2, 2, 8, generator=generator).half()
    k, v = (torch.randn(1, 2, 3, 8, generator=generator).half() for _ in range(2))
    mask = torch.tensor([[0.0, 0.0, MASKED], [MASKED, MASKED, MASKED]])
    out, lse = partial_attention(q, k, v, scale=0.5, mask=mask)
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(lse).all())
    assert float(lse[:, 1].max()) < -1e4


def test_a_compiled_block_gets_its_hook_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: partial(forward))
    model = tiny_model("Llama")
    block = model.model.layers[0].mlp
    hook = block.forward
    vars(block)["forward"] = hook
    with compiled_blocks(model, enabled=True):
        assert vars(block)["forward"] is not hook
    assert vars(block)["forward"] is hook


@pytest.mark.parametrize("name", ["LFM2 (hybrid)", "Qwen3.5 (hybrid)"])
def test_states_are_as_before_when_a_pass_is_made_again(name: str) -> None:
    model = tiny_model(name)
    prompt = random_tokens(20)
    expected = generate(model, prompt, 12)

    async def solve(session: Session) -> list[object]:
        root = await session.prefill(prompt)
        good = session.decode([root], GREEDY.replace(max_tokens=12))
        return list(await asyncio.gather(good, session.prefill((5, 6, 7)), return_exceptions=True))

    with tiny_engine(model) as engine:
        call = engine.runner._call  # type: ignore[attr-defined]

        def broken(ids: torch.Tensor, *rest: object) -> torch.Tensor:
            out: torch.Tensor = call(ids, *rest)
            if ids.flatten().tolist()[:2] == [5, 6]:
                raise ZeroDivisionError("a kernel failed")
            return out

        engine.runner._call = broken  # type: ignore[attr-defined]
        good, bad = engine.run(solve)
        assert isinstance(bad, EngineError)
        assert isinstance(good, list)
        assert good[0].tokens == expected
