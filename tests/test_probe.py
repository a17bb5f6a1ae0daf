"""Probes: their logits are the model's own, they compute what they must and nothing else, and leave nothing behind."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support import GREEDY, TinyEngine, random_tokens, tiny_engine
from tiny_models import CONFIGS, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from rksc_agents import ConfigError, EngineError, KVBudgetError, PerBranchWarning, PromptTooLongError
from rksc_agents.cache.budget import Budget
from rksc_agents.engine.cursor import Cursor
from rksc_agents.engine.probe import Reading
from rksc_agents.engine.session import Session
from rksc_agents.model.runner import TreeRunner
from rksc_agents.verify.early_exit import Record

PROMPT = random_tokens(20)
GROUPS = ((5, 9), (7,), (11, 12, 13))
EXTENSIONS = [random_tokens(count, seed=seed) for seed, count in enumerate((3, 7, 3, 1))]
LENGTHS = (1, 4, 9, 2)  # tokens of the branches
BYTES = 2 * 2 * 8 * 4 * 3  # of a token of the tiny Llama: keys and values, 2 heads of 8, float32, 3 layers


@pytest.fixture(autouse=True)
def _per_branch_is_said() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerBranchWarning)
        yield


@torch.inference_mode()
def full(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """The oracle: logits [tokens, vocabulary] of the whole sequence, alone and without a cache."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


def of_groups(logits: Tensor, groups: Sequence[Sequence[int]] = GROUPS) -> list[float]:
    return [logits[list(group)].logsumexp(0).item() for group in groups]


async def grown(session: Session, lengths: Sequence[int] = LENGTHS, prompt: Sequence[int] = PROMPT) -> list[Cursor]:
    """Branches of different lengths, whose last token has no KV yet."""
    root = await session.prefill(prompt)
    ended = [
        (await session.decode(session.fork(root, 1), GREEDY.replace(max_tokens=length)))[0].cursor for length in lengths
    ]
    session.release(root)
    return [cursor for cursor in ended if cursor is not None]


def state(engine: TinyEngine) -> tuple[Any, ...]:
    """What the tree and the budget hold."""

    def look(scheduler: Any) -> tuple[Any, ...]:
        nodes = sorted((node.start, node.tokens, node.pins, node.refs, node.cached) for node in scheduler.tree.nodes())
        return nodes, scheduler.budget.held, scheduler.budget.promised, scheduler.tree.root.pins

    return engine.inspect(look)


# --- the model's own logits


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_probes_are_the_models_own_logits(name: str) -> None:
    """Also for rows of other lengths beside them: verification once read the wrong position of padded rows."""
    model = tiny_model(name)

    async def solve(session: Session) -> tuple[list[Reading], list[Cursor], int]:
        cursors = await grown(session)
        before = session._work.scheduler.runner.tokens_computed
        readings = await session.probe(cursors, EXTENSIONS, GROUPS)
        return readings, cursors, session._work.scheduler.runner.tokens_computed - before

    with tiny_engine(model) as engine:
        readings, cursors, computed = engine.run(solve)
        engine.check_books()
    for reading, cursor, extension in zip(readings, cursors, EXTENSIONS, strict=True):
        expected = of_groups(full(model, [*cursor.tokens, *extension])[-1])
        assert reading.values == pytest.approx(expected, abs=1e-4)
        assert reading.tokens == len(extension) + 1  # a branch's last token has no KV yet
        assert reading.exit_layer is None
        assert reading.layers == model.config.get_text_config().num_hidden_layers
    # Nothing is prefilled again: 4 branches of 20 tokens and more were there.
    assert computed == sum(map(len, EXTENSIONS)) + len(EXTENSIONS)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_along_a_text_are_those_of_the_whole(name: str) -> None:
    model = tiny_model(name)
    texts = [random_tokens(6, seed=1), random_tokens(3, seed=2)]

    async def solve(session: Session) -> list[Tensor]:
        branch = (await grown(session, [4]))[0]
        prompt = await session.prefill(PROMPT)
        along = [await session.logits_along(branch, texts[0]), await session.logits_along(prompt, texts[1])]
        return [*along, torch.tensor(branch.tokens)]

    with tiny_engine(model) as engine:
        of_branch, of_prompt, tokens = engine.run(solve)
        engine.check_books()
    sequence = [*tokens.tolist(), *texts[0]]
    torch.testing.assert_close(of_branch, full(model, sequence)[-6:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(of_prompt, full(model, [*PROMPT, *texts[1]])[-3:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "LFM2 (hybrid)", "Mamba"])
def test_rows_of_a_pass_may_want_the_logits_of_different_places(name: str) -> None:
    model = tiny_model(name)
    texts = [random_tokens(5, seed=1), random_tokens(5, seed=2)]

    async def solve(session: Session) -> tuple[list[Reading], Tensor]:
        root = await session.prefill(PROMPT)
        return await asyncio.gather(session.probe([root], [texts[0]], GROUPS), session.logits_along(root, texts[1]))

    with tiny_engine(model) as engine:
        (reading,), along = engine.run(solve)
    assert reading.values == pytest.approx(of_groups(full(model, [*PROMPT, *texts[0]])[-1]), abs=1e-4)
    torch.testing.assert_close(along, full(model, [*PROMPT, *texts[1]])[-5:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "LFM2 (hybrid)", "Mamba"])
def test_a_sequence_may_have_no_kv_at_all(name: str) -> None:
    """From the root, alone and beside a row that has a past."""
    model = tiny_model(name)
    texts = [random_tokens(12, seed=3), random_tokens(12, seed=4)]

    async def solve(session: Session) -> list[Reading]:
        nothing, root = session.cached(PROMPT, 0), await session.prefill(PROMPT)
        assert nothing.tokens == ()
        return await session.probe([nothing, root], texts, GROUPS)

    with tiny_engine(model) as engine:
        alone, after = engine.run(solve)
        engine.check_books()
    assert alone.values == pytest.approx(of_groups(full(model, texts[0])[-1]), abs=1e-4)
    assert after.values == pytest.approx(of_groups(full(model, [*PROMPT, *texts[1]])[-1]), abs=1e-4)


def test_a_prefix_that_is_there_is_not_computed() -> None:
    model = tiny_model("Llama")

    async def solve(session: Session) -> tuple[Cursor, Reading]:
        await session.prefill(PROMPT)
        part = session.cached([*PROMPT[:15], 4, 4, 4, 4], 17)
        return part, (await session.probe([part], [[8, 9]], GROUPS))[0]

    with tiny_engine(model) as engine:
        part, reading = engine.run(solve)
    assert part.tokens == PROMPT[:15]
    assert reading.tokens == 2
    assert reading.values == pytest.approx(of_groups(full(model, [*PROMPT[:15], 8, 9])[-1]), abs=1e-4)


# --- nothing stays


@pytest.mark.parametrize("name", ["Llama", "Qwen3.5 (hybrid)", "Falcon-H1 (parallel hybrid)"])
def test_a_probe_leaves_the_tree_and_the_budget_as_they_were(name: str) -> None:
    async def solve(session: Session) -> tuple[Any, Any, int]:
        cursors = await grown(session)
        engine.scheduler.budget.peak = 0
        before = [(c.node, c.node.refs, c.node.pins, c.tokens) for c in cursors]
        nodes, held = list(engine.scheduler.tree.nodes()), engine.budget.held
        await session.probe(cursors, EXTENSIONS, GROUPS)
        await session.logits_along(cursors[0], [4, 5])
        assert list(engine.scheduler.tree.nodes()) == nodes
        assert (engine.budget.held, engine.budget.promised) == (held, 0)
        assert engine.budget.peak > held  # while it ran it did count
        return before, [(c.node, c.node.refs, c.node.pins, c.tokens) for c in cursors], session.ledger.probe_tokens

    with tiny_engine(tiny_model(name)) as engine:
        before, after, computed = engine.run(solve)
        engine.check_books()
    assert before == after
    assert computed == sum(map(len, EXTENSIONS)) + 4 + 3


def test_a_decode_goes_on_after_a_probe_as_if_there_had_been_none() -> None:
    async def solve(session: Session, probe: bool) -> tuple[int, ...]:
        cursors = await grown(session, [3, 3])
        if probe:
            await session.probe(cursors, EXTENSIONS[:2], GROUPS)
        return (await session.decode([cursors[0]], GREEDY.replace(max_tokens=6)))[0].tokens

    with tiny_engine(tiny_model("Llama")) as engine:
        assert engine.run(lambda s: solve(s, True)) == engine.run(lambda s: solve(s, False))


@pytest.mark.parametrize("name", ["Llama", "LFM2 (hybrid)", "Mamba"])
def test_an_evicted_sequence_is_computed_again_with_the_same_reading(name: str) -> None:
    async def solve(session: Session) -> tuple[list[Reading], list[Reading], int]:
        cursors = await grown(session, [5, 5, 3])
        forks = [session.fork(cursor, 1)[0] for cursor in cursors]
        before = await session.probe(forks, EXTENSIONS[:3], GROUPS)
        assert session.ledger.recomputed == 0
        engine.scheduler.tree.evict(10**9)
        assert not any(cursor.node.alive for cursor in forks)
        return before, await session.probe(forks, EXTENSIONS[:3], GROUPS), session.ledger.recomputed

    with tiny_engine(tiny_model(name)) as engine:
        before, after, recomputed = engine.run(solve)
        engine.check_books()
    for old, new in zip(before, after, strict=True):
        assert new.values == pytest.approx(old.values, abs=1e-4)
    assert [reading.tokens for reading in after] == [3, 7, 3]  # the branch itself counts as recomputed
    if name == "Llama":  # of what begins alike the first is computed whole, of the others the last token
        assert recomputed == 25 + 1 + 1
    else:
        assert recomputed >= 25


def test_many_probes_of_one_evicted_cursor_compute_it_once() -> None:
    async def solve(session: Session) -> int:
        root = await session.prefill(PROMPT)
        engine.scheduler.tree.evict(10**9)
        before = engine.runner.tokens_computed
        await session.probe([root] * 4, EXTENSIONS, GROUPS)
        return engine.runner.tokens_computed - before

    with tiny_engine(tiny_model("Llama")) as engine:
        computed = engine.run(solve)
        engine.check_books()
    # The others wait for the first one's KV, and ask for the logits of its last token alone.
    assert computed <= len(PROMPT) + 3 + sum(map(len, EXTENSIONS))


# --- passes


def counted(engine: TinyEngine, rows: int, chunk_rule: Any = None) -> tuple[int, list[Reading]]:
    async def solve(session: Session) -> tuple[int, list[Reading]]:
        root = await session.prefill(PROMPT)
        before = engine.runner.passes
        texts = [random_tokens(4, seed=seed) for seed in range(rows)]
        readings = await session.probe([root] * rows, texts, GROUPS[:2], exit_rule=chunk_rule)
        return engine.runner.passes - before, readings

    return engine.run(solve)


@pytest.mark.parametrize("rule", [None, Record((1,))])
def test_more_rows_than_a_chunk_holds_take_several_passes(rule: Record | None) -> None:
    model = tiny_model("Llama")
    with tiny_engine(model, prefill_chunk=10) as engine:
        passes, readings = counted(engine, 7, rule)
        engine.check_books()
    with tiny_engine(model) as engine:
        at_once, same = counted(engine, 7, rule)
    assert (passes, at_once) == (4, 1)  # two rows of four tokens fit a chunk of ten
    for one, other in zip(readings, same, strict=True):
        assert one.values == pytest.approx(other.values, abs=1e-4)


def test_a_row_longer_than_a_chunk_is_one_pass() -> None:
    model = tiny_model("Llama")
    text = random_tokens(30, seed=8)

    async def solve(session: Session) -> tuple[Reading, int]:
        root = await session.prefill(PROMPT)
        before = engine.runner.passes
        return (await session.probe([root], [text], GROUPS))[0], engine.runner.passes - before

    with tiny_engine(model, prefill_chunk=4) as engine:
        reading, passes = engine.run(solve)
    assert passes == 1
    assert reading.values == pytest.approx(of_groups(full(model, [*PROMPT, *text])[-1]), abs=1e-4)


@pytest.mark.parametrize(
    ("first", "second", "passes"),
    [(None, None, 1), (Record((1,)), Record((1,)), 1), (Record((1,)), Record((2,)), 2), (None, Record((1,)), 2)],
)
def test_probes_of_two_requests_share_a_pass_where_their_rules_are_equal(
    first: Record | None, second: Record | None, passes: int
) -> None:
    model = tiny_model("Llama")
    ready = asyncio.Event()
    waiting: list[int] = []

    async def solve(session: Session, rule: Record | None, text: Sequence[int]) -> tuple[Reading, int]:
        root = await session.prefill(PROMPT)
        waiting.append(1)
        if len(waiting) == 2:
            ready.set()
        await ready.wait()
        before = engine.runner.passes
        (reading,) = await session.probe([root], [text], GROUPS[:2], exit_rule=rule)
        return reading, engine.runner.passes - before

    with tiny_engine(model) as engine:
        texts = EXTENSIONS[:2]
        futures = [
            engine.submit(lambda s, r=r, t=t: solve(s, r, t)) for r, t in zip((first, second), texts, strict=True)
        ]
        results = [future.result(timeout=30) for future in futures]
        engine.check_books()
    assert max(count for _, count in results) == passes
    for (reading, _), text in zip(results, texts, strict=True):
        expected = of_groups(full(model, [*PROMPT, *text])[-1], GROUPS[:2])
        assert reading.values == pytest.approx(expected, abs=1e-4)


# --- limits, failures, cancellation


def test_what_does_not_fit_the_context_is_refused() -> None:
    async def solve(session: Session, count: int) -> Reading:
        root = await session.prefill(PROMPT)
        return (await session.probe([root], [random_tokens(count)], GROUPS))[0]

    with tiny_engine(tiny_model("Llama"), context=32) as engine:
        assert engine.run(lambda s: solve(s, 12)).tokens == 12  # filled to the last token
        with pytest.raises(PromptTooLongError, match="33"):
            engine.run(lambda s: solve(s, 13))
        engine.check_books()


def test_one_sequence_too_many_takes_the_others_back() -> None:
    async def solve(session: Session) -> None:
        root = await session.prefill(PROMPT)
        await session.probe([root, root], [[4], random_tokens(30)], GROUPS)

    with tiny_engine(tiny_model("Llama"), context=32) as engine:
        with pytest.raises(PromptTooLongError):
            engine.run(solve)
        engine.check_books()


def test_a_probe_that_can_never_fit_the_budget_says_so() -> None:
    async def solve(session: Session, count: int) -> Reading:
        root = await session.prefill(PROMPT)
        return (await session.probe([root], [random_tokens(count)], GROUPS))[0]

    with tiny_engine(tiny_model("Llama"), kv_limit=30 * BYTES) as engine:
        with pytest.raises(KVBudgetError, match=f"{30 * BYTES:,}"):
            engine.run(lambda s: solve(s, 11))
        assert engine.run(lambda s: solve(s, 10)).tokens == 10
        engine.check_books()
        assert engine.budget.peak <= 30 * BYTES


def test_probes_wait_for_room_and_all_come_to_an_end() -> None:
    model = tiny_model("Llama")
    texts = [random_tokens(8, seed=seed) for seed in range(6)]

    async def solve(session: Session) -> list[Reading]:
        root = await session.prefill(PROMPT)
        return await session.probe([root] * 6, texts, GROUPS)

    with tiny_engine(model, kv_limit=40 * BYTES) as engine:  # room for two at a time
        readings = engine.run(solve)
        engine.check_books()
        assert engine.budget.peak <= 40 * BYTES
    for reading, text in zip(readings, texts, strict=True):
        assert reading.values == pytest.approx(of_groups(full(model, [*PROMPT, *text])[-1]), abs=1e-4)


def test_a_probe_makes_room_by_evicting_what_nobody_uses() -> None:
    async def solve(session: Session) -> int:
        await session.prefill(random_tokens(20, seed=9))
        root = await session.prefill(PROMPT)
        session.release(await session.prefill(random_tokens(10, seed=10)))
        await session.probe([root], [random_tokens(15)], GROUPS)
        return session.evicted()

    with tiny_engine(tiny_model("Llama"), kv_limit=52 * BYTES) as engine:
        assert engine.run(solve) >= 1
        engine.check_books()
        assert engine.budget.peak <= 52 * BYTES


@pytest.mark.parametrize("name", ["Llama", "LFM2 (hybrid)", "Mamba"])
def test_a_cancelled_probe_frees_what_it_was_promised(name: str) -> None:
    """While it waits, and after it was admitted."""

    async def solve(session: Session) -> None:
        cursors = await grown(session, [3, 3])
        for turns in range(4):
            task = asyncio.ensure_future(session.probe(cursors, EXTENSIONS[:2], GROUPS))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not engine.scheduler.waiting
            assert engine.budget.promised == 0
        reading = (await session.probe(cursors, EXTENSIONS[:2], GROUPS))[0]
        assert reading.tokens == 4

    with tiny_engine(tiny_model(name)) as engine:
        engine.run(solve)
        engine.check_books()


def test_a_probe_cancelled_between_admission_and_pass_gives_everything_back() -> None:
    async def solve(session: Session) -> None:
        scheduler = engine.scheduler
        root = await session.prefill(PROMPT)
        task = asyncio.ensure_future(session.probe([root], [[4, 5]], GROUPS))
        while not scheduler.waiting:
            await asyncio.sleep(0)
        scheduler._admit()
        assert (len(scheduler.probes.jobs), engine.budget.promised, root.node.pins) == (1, 2 * BYTES, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (len(scheduler.probes.jobs), engine.budget.promised, root.node.pins) == (0, 0, 0)

    with tiny_engine(tiny_model("Llama")) as engine:
        engine.run(solve)
        engine.check_books()


@pytest.mark.parametrize("rule", [None, Record((1,))])
def test_rows_of_a_pass_that_failed_are_tried_one_by_one(rule: Record | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one at fault gets the error; the budget never gives out more than there is."""
    model = tiny_model("Llama")
    forward = TreeRunner.forward

    def failing(self: TreeRunner, runs: Sequence[Any]) -> Tensor:
        if any(tokens[-1] == 3 for run in runs for tokens in run.tokens):
            raise RuntimeError("broken")
        return forward(self, runs)

    held_at_promise: list[int] = []
    hold = Budget.hold

    def watched_hold(self: Budget, nbytes: int) -> None:
        hold(self, nbytes)
        held_at_promise.append(self.held + self.promised)

    async def solve(session: Session) -> list[Reading | BaseException]:
        root = await session.prefill(PROMPT)
        texts = [[4, 5], [9, 3], [6, 7, 8]]
        probes = [session.probe([root], [text], GROUPS[:2], exit_rule=rule) for text in texts]
        return [
            each if isinstance(each, BaseException) else each[0]
            for each in await asyncio.gather(*probes, return_exceptions=True)
        ]

    with tiny_engine(model, kv_limit=27 * BYTES) as engine:
        monkeypatch.setattr(TreeRunner, "forward", failing)
        monkeypatch.setattr(Budget, "hold", watched_hold)
        first, second, third = engine.run(solve)
        engine.check_books()
        assert engine.budget.peak <= 27 * BYTES
        assert max(held_at_promise) <= 27 * BYTES
    assert isinstance(second, EngineError)
    assert isinstance(second.__cause__, RuntimeError)
    for reading, text in ((first, [4, 5]), (third, [6, 7, 8])):
        assert isinstance(reading, Reading)
        expected = of_groups(full(model, [*PROMPT, *text])[-1], GROUPS[:2])
        assert reading.values == pytest.approx(expected, abs=1e-4)


def test_wrong_use_is_said_at_once() -> None:
    async def released(session: Session) -> None:
        root = await session.prefill(PROMPT)
        session.release(root)
        await session.probe([root], [[4]], GROUPS)

    async def along_released(session: Session) -> None:
        root = await session.prefill(PROMPT)
        session.release(root)
        await session.logits_along(root, [4])

    async def nothing(session: Session) -> None:
        root = await session.prefill(PROMPT)
        await session.probe([root], [[]], GROUPS)

    async def nothing_along(session: Session) -> None:
        root = await session.prefill(PROMPT)
        await session.logits_along(root, [])

    with tiny_engine(tiny_model("Llama")) as engine:
        for wrong in (released, along_released):
            with pytest.raises(ConfigError, match="released"):
                engine.run(wrong)
        for wrong in (nothing, nothing_along):
            with pytest.raises(ConfigError, match="at least one token"):
                engine.run(wrong)
        engine.check_books()


@pytest.mark.parametrize("score", [-0.1, 1.1, float("nan")])
def test_a_branch_is_scored_from_0_to_1(score: float) -> None:
    async def solve(session: Session) -> float:
        root = await session.prefill(PROMPT)
        session.score(root, 0.25)
        session.score(root, score)
        return 0.0

    async def good(session: Session) -> tuple[float, float | None]:
        root = await session.prefill(PROMPT)
        session.score(root, 0.25)
        engine.scheduler.tree.evict(10**9)
        await session.probe([root], [[4]], GROUPS)
        return root.node.score, root.score

    with tiny_engine(tiny_model("Llama")) as engine:
        with pytest.raises(ConfigError, match="0 to 1"):
            engine.run(solve)
        assert engine.run(good) == (0.25, 0.25)  # also after it was computed again
