"""Prompts that take KV from another prompt at other positions, against models that compute them apart."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import GREEDY, NumberCodec, TinyEngine, random_tokens, tiny_engine
from test_engine_properties import CONTEXT, PROMPTS, continued, logits
from tiny_models import WINDOW, tiny_model
from transformers import DynamicCache, PreTrainedModel

from rksc_agents import (
    ConfigError,
    EngineConfig,
    EngineError,
    KVBudgetError,
    PerBranchWarning,
    PromptTooLongError,
    RKSCReasoner,
    SelfConsistency,
    UnsupportedModelError,
)
from rksc_agents.config import Sharing
from rksc_agents.engine.cursor import Completion, Cursor
from rksc_agents.engine.session import Session
from rksc_agents.testing import ScriptedRunner, scripted_tokenizer

Tokens = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]

SOURCE = random_tokens(40)
NEW = random_tokens(40, seed=1)
AT = len(NEW)


def runs(*found: tuple[int, int, int]) -> Pairs:
    """Pairs of runs: target position, source position, length."""
    return tuple((at + i, source + i) for at, source, length in found for i in range(length))


CASES: dict[str, tuple[Tokens, Pairs]] = {
    "forwards": (SOURCE[:6] + NEW[:7] + SOURCE[6:30] + NEW[7:10], runs((15, 8, 20))),
    "backwards": (SOURCE[:3] + NEW[:1] + SOURCE[18:40] + NEW[1:4], runs((5, 19, 21))),
    "several": (
        SOURCE[:4] + NEW[:3] + SOURCE[4:14] + NEW[3:5] + SOURCE[14:22] + NEW[5:6] + SOURCE[30:38] + NEW[6:8],
        runs((9, 6, 8), (19, 14, 8), (30, 32, 6)),
    ),
    "swapped": (SOURCE[:2] + SOURCE[20:34] + SOURCE[4:19] + NEW[:2], runs((3, 21, 12), (18, 6, 13))),
    "one token": (NEW[:5] + SOURCE[10:14] + NEW[5:9], runs((6, 11, 1))),
    "far apart": (SOURCE[30:36] + NEW[:30] + SOURCE[:8] + NEW[30:33], runs((1, 31, 5), (36, 0, 8))),
}


async def transplanted(session: Session, source: Tokens, target: Tokens, pairs: Pairs) -> Cursor:
    return await session.transplant(await session.prefill(source), target, pairs)


async def read(session: Session, source: Tokens, target: Tokens, pairs: Pairs) -> torch.Tensor:
    cursor = await transplanted(session, source, target, pairs)
    assert cursor.tokens == target
    assert cursor.logits is not None
    return cursor.logits.clone()


async def written(session: Session, cursor: Cursor, count: int, branches: int = 1) -> list[Completion]:
    return await session.decode(session.fork(cursor, branches), GREEDY.replace(max_tokens=count))


@torch.inference_mode()
def plain(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """The model alone, all of it anew."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]


# -- against models whose KV depends on token and position alone -------------------------------------


ONE_LAYER: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {}),
    "Gemma 2": ("Gemma 2", {"layer_types": ["full_attention"]}),
    "Gemma 2, sliding": ("Gemma 2", {"layer_types": ["sliding_attention"]}),
    "Gemma 3": ("Gemma 3", {"layer_types": ["full_attention"]}),
    "Gemma 3, sliding": ("Gemma 3", {"layer_types": ["sliding_attention"]}),
    "Mistral, sliding": ("Mistral, sliding window", {}),
    "Phi-3": ("Phi-3", {}),
    "SmolLM3 without rotation": ("SmolLM3", {"no_rope_layers": [0]}),
    "gpt-oss": ("gpt-oss (sinks)", {"layer_types": ["sliding_attention"]}),
    "DeepSeek": ("DeepSeek-V3 (MLA)", {}),
}


@pytest.mark.parametrize("kind", ONE_LAYER)
def test_of_one_layer_a_transplant_is_exact(kind: str) -> None:
    name, changes = ONE_LAYER[kind]
    changes = {"num_hidden_layers": 1, **changes}
    oracle = tiny_model(name, **changes)
    with tiny_engine(tiny_model(name, **changes)) as engine:
        for case, (target, pairs) in CASES.items():
            got = engine.run(lambda s, t=target, p=pairs: read(s, SOURCE, t, p))
            torch.testing.assert_close(got, plain(oracle, target), rtol=0, atol=1e-4, msg=lambda m, c=case: f"{c}: {m}")
            engine.inspect(lambda scheduler: scheduler.tree.clear())
        engine.check_books()


# -- against the same idea with a cache of transformers and an explicit mask ----------------------------


class Oracle:
    """Takes keys and values from a cache of the source, rotates the keys, and computes the rest under a 4-D mask."""

    def __init__(self, name: str) -> None:
        self.model = tiny_model(name)
        self.model.set_attn_implementation("eager")
        config = self.model.config
        self.types = getattr(config, "layer_types", None)
        self.windowed = getattr(config, "sliding_window", None) is not None

    def _mask(self, queries: torch.Tensor, keys: torch.Tensor) -> Any:
        age = queries[:, None] - keys[None, :]

        def hide(hidden: torch.Tensor) -> torch.Tensor:
            return torch.zeros(hidden.shape).masked_fill(hidden, -1e30)[None, None]

        full, sliding = hide(age < 0), hide((age < 0) | (age >= WINDOW))
        if self.types is not None and len(set(self.types)) > 1:
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding if self.windowed else full

    def _pass(self, tokens: Sequence[int], at: torch.Tensor, seen: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        mask = self._mask(at, torch.cat([seen, at]))
        return self.model(
            input_ids=torch.tensor([list(tokens)]), position_ids=at[None], cache=cache, attention_mask=mask
        ).logits[0, -1]

    def _rotated(self, keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(by.float(), self.model.model.rotary_emb.inv_freq)
        cos, sin = (torch.cat([t, t], -1) for t in (angles.cos(), angles.sin()))
        half = keys.shape[-1] // 2
        return keys * cos + torch.cat([-keys[..., half:], keys[..., :half]], -1) * sin

    @torch.inference_mode()
    def __call__(self, source: Tokens, target: Tokens, pairs: Pairs, more: int) -> tuple[torch.Tensor, Tokens]:
        there = DynamicCache()
        self._pass(source, torch.arange(len(source)), torch.arange(0), there)
        prefix = next(i for i in range(len(target)) if source[i] != target[i])
        taken = [(i, i) for i in range(prefix)] + [pair for pair in pairs if pair[0] >= prefix]
        at, of = torch.tensor(taken).T
        cache = DynamicCache()
        for layer, kept in enumerate(there.layers):
            cache.update(self._rotated(kept.keys[:, :, of], at - of), kept.values[:, :, of], layer)
        rest = torch.tensor([i for i in range(len(target)) if i not in set(at.tolist())])
        out = first = self._pass([target[i] for i in rest], rest, at, cache)
        seen, tokens = torch.cat([at, rest]), []
        while len(tokens) < more:
            tokens.append(int(out.argmax()))
            here = torch.tensor([len(target) + len(tokens) - 1])
            out = self._pass(tokens[-1:], here, seen, cache)
            seen = torch.cat([seen, here])
        return first, tuple(tokens)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma 2", "Mistral, sliding window"])
def test_a_deep_transplant_and_what_follows_it_equal_an_independent_one(name: str) -> None:
    oracle = Oracle(name)

    async def both(session: Session, target: Tokens, pairs: Pairs) -> tuple[torch.Tensor, Tokens]:
        cursor = await transplanted(session, SOURCE, target, pairs)
        (done,) = await written(session, cursor, 8)
        assert cursor.logits is not None
        return cursor.logits, done.tokens

    apart = 0.0
    with tiny_engine(tiny_model(name)) as engine:
        for case in ("forwards", "backwards", "several", "swapped"):
            target, pairs = CASES[case]
            got, tokens = engine.run(lambda s, t=target, p=pairs: both(s, t, p))
            expected, following = oracle(SOURCE, target, pairs, 8)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
            assert tokens == following
            apart = max(apart, (got - plain(oracle.model, target)).abs().max().item())
        engine.check_books()
    assert apart > 0.01  # the model is one in which taking loses something


# -- what the tree has exactly ------------------------------------------------------------------------


def test_nothing_taken_is_exact() -> None:
    model, target = tiny_model("Llama"), CASES["several"][0]
    with tiny_engine(model) as engine:
        got = engine.run(lambda s: read(s, SOURCE, target, ()))
        engine.check_books()
    torch.testing.assert_close(got, plain(tiny_model("Llama"), target), rtol=0, atol=1e-4)


def test_what_the_tree_has_exactly_is_not_taken_from_elsewhere() -> None:
    target, pairs = CASES["several"]

    async def ask(session: Session) -> Cursor:
        source = await session.prefill(SOURCE)
        before = session._work.scheduler.runner.tokens_computed
        cursor = await session.transplant(source, target, pairs)
        assert session._work.scheduler.runner.tokens_computed - before == 1
        (followed,) = await written(session, cursor, 3)
        assert followed.cursor is not None
        assert followed.cursor.graft is None
        return cursor

    with tiny_engine(tiny_model("Llama")) as engine:
        engine.run(lambda s: s.prefill(SOURCE))
        exact = engine.run(lambda s: s.prefill(target))
        cursor = engine.run(ask)
        assert cursor.graft is None
        assert cursor.node is exact.node or cursor.node.parent is exact.node.parent
        engine.check_books()


def test_of_a_prompt_that_the_tree_has_in_part_the_rest_is_taken() -> None:
    target, pairs = CASES["several"]
    oracle = Oracle("Llama")
    with tiny_engine(tiny_model("Llama")) as engine:
        engine.run(lambda s: s.prefill(target[:19]))  # the first run too
        got = engine.run(lambda s: read(s, SOURCE, target, pairs))
        engine.check_books()
    rest = tuple(pair for pair in pairs if pair[0] >= 19)
    torch.testing.assert_close(got, oracle(SOURCE, target, rest, 0)[0], rtol=0, atol=1e-4)
    assert not torch.allclose(got, oracle(SOURCE, target, pairs, 0)[0], atol=1e-3)


def test_later_exact_results_are_those_of_an_engine_that_never_took_anything() -> None:
    target, pairs = CASES["several"]

    async def lossy(session: Session) -> None:
        cursor = await transplanted(session, SOURCE, target, pairs)
        (done,) = await written(session, cursor, 6)
        assert done.cursor is not None
        for each in (cursor, done.cursor):
            session.keep(each)
        exact = await session.prefill(target, keep=False)  # while the private node is there
        assert exact.graft is None
        assert not any(node.private for node in exact.node.path())
        session.release(exact)

    async def exactly(session: Session) -> tuple[torch.Tensor, Tokens]:
        await session.prefill(SOURCE)
        cursor = await session.prefill(target)
        assert cursor.logits is not None
        return cursor.logits.clone(), (await written(session, cursor, 8))[0].tokens

    with tiny_engine(tiny_model("Llama")) as engine:
        engine.run(lossy)
        held = engine.held()
        assert held == engine.runner.token_bytes * len(SOURCE)  # the source, and nothing that was taken from it
        got = engine.run(exactly)
        engine.check_books()
    with tiny_engine(tiny_model("Llama")) as fresh:
        expected = fresh.run(exactly)
    assert torch.equal(got[0], expected[0])
    assert got[1] == expected[1]


def test_the_bytes_of_a_transplant_go_when_it_is_released() -> None:
    target, pairs = CASES["forwards"]

    async def ask(session: Session) -> None:
        budget = session._work.scheduler.budget
        source = await session.prefill(SOURCE)
        before = budget.held
        cursor = await session.transplant(source, target, pairs)
        assert budget.held == before + (len(target) - 6) * session._work.scheduler.runner.token_bytes
        assert budget.promised == 0
        session.release(cursor)
        assert budget.held == before

    with tiny_engine(tiny_model("Llama")) as engine:
        engine.run(ask)


# -- evicted and continued ------------------------------------------------------------------------------


def test_evicted_transplants_and_their_branches_are_computed_again_with_the_same_result() -> None:
    target, pairs = CASES["several"]

    async def ask(session: Session, also_exact: bool) -> tuple[list[Tokens], int]:
        scheduler = session._work.scheduler
        cursor = await transplanted(session, SOURCE, target, pairs)
        branches = [done.cursor for done in await written(session, cursor, 5, branches=3)]
        assert all(branch is not None and branch.graft == cursor.graft for branch in branches)
        scheduler.tree.evict(10**9)
        assert scheduler.budget.held == 0
        if also_exact:  # what is there by now does not change what is taken
            await session.prefill(target)
        again = await session.decode([cursor, *branches], GREEDY.replace(max_tokens=6))
        private = [node for node in scheduler.tree.nodes() if node.private]
        return [done.tokens for done in again], len(private)

    async def undisturbed(session: Session) -> list[Tokens]:
        cursor = await transplanted(session, SOURCE, target, pairs)
        branches = [done.cursor for done in await written(session, cursor, 5, branches=3)]
        return [done.tokens for done in await session.decode([cursor, *branches], GREEDY.replace(max_tokens=6))]

    with tiny_engine(tiny_model("Llama")) as engine:
        expected = engine.run(undisturbed)
        exactly = engine.run(lambda s: asyncio.gather(s.prefill(target)))  # an exact one differs
        assert [c.logits.argmax().item() for c in exactly if c.logits is not None] != expected[0][:1]
    for also_exact in (False, True):
        with tiny_engine(tiny_model("Llama")) as engine:
            got, private = engine.run(lambda s, e=also_exact: ask(s, e))
            assert got == expected
            assert private == 1  # one copy of the prompt for all its branches
            engine.check_books()


def test_branches_of_an_evicted_transplant_that_go_on_apart_share_one_prompt() -> None:
    target, pairs = CASES["several"]

    async def ask(session: Session) -> int:
        scheduler = session._work.scheduler
        cursor = await transplanted(session, SOURCE, target, pairs)
        branches = [done.cursor for done in await written(session, cursor, 5, branches=3)]
        scheduler.tree.evict(10**9)
        await asyncio.gather(*(session.decode([b], GREEDY.replace(max_tokens=2)) for b in branches if b is not None))
        return sum(node.private for node in scheduler.tree.nodes())

    with tiny_engine(tiny_model("Llama")) as engine:
        assert engine.run(ask) == 1
        engine.check_books()


def test_a_branch_goes_on_under_its_transplant_without_computing_the_prompt() -> None:
    target, pairs = CASES["several"]

    async def ask(session: Session) -> tuple[Tokens, Tokens, int]:
        runner = session._work.scheduler.runner
        cursor = await transplanted(session, SOURCE, target, pairs)
        (whole,) = await written(session, cursor, 9)
        (start,) = await written(session, cursor, 4)
        assert start.cursor is not None
        before = runner.tokens_computed
        (rest,) = await session.decode([start.cursor], GREEDY.replace(max_tokens=5))
        computed = runner.tokens_computed - before
        assert rest.cursor is not None
        assert [node.private for node in rest.cursor.node.path()].count(True) == 1
        return whole.tokens, start.tokens + rest.tokens, computed

    with tiny_engine(tiny_model("Llama")) as engine:
        whole, in_two, computed = engine.run(ask)
        assert in_two == whole
        assert computed <= 1 + 4  # the first part's last token, and all but the last of the second
        engine.check_books()


def test_only_a_branch_that_was_evicted_is_computed_again_not_its_prompt() -> None:
    target, pairs = CASES["several"]

    async def ask(session: Session) -> int:
        scheduler = session._work.scheduler
        cursor = await transplanted(session, SOURCE, target, pairs)
        (done,) = await written(session, cursor, 6)
        assert done.cursor is not None
        while done.cursor.node.alive:
            scheduler.tree.evict(1)
        assert cursor.node.alive
        before = scheduler.runner.tokens_computed
        await session.ready(done.cursor)
        assert session.ledger.recomputed == 6
        return scheduler.runner.tokens_computed - before

    with tiny_engine(tiny_model("Llama")) as engine:
        assert engine.run(ask) == 6
        engine.check_books()


def test_a_transplant_that_is_evicted_while_its_branch_waits_is_computed_again() -> None:
    target, pairs = CASES["several"]

    async def ask(session: Session, disturbed: bool) -> Tokens:
        scheduler = session._work.scheduler
        cursor = await transplanted(session, SOURCE, target, pairs)
        (done,) = await written(session, cursor, 6)
        assert done.cursor is not None
        while done.cursor.node.alive:
            scheduler.tree.evict(1)
        going_on = asyncio.create_task(session.ready(done.cursor))
        while not scheduler.waiting:
            await asyncio.sleep(0)
        assert cursor.node.alive
        if disturbed:
            scheduler.tree.evict(10**9)
        await going_on
        assert cursor.node.alive is not disturbed
        return (await session.decode([done.cursor], GREEDY.replace(max_tokens=6)))[0].tokens

    with tiny_engine(tiny_model("Llama")) as engine:
        assert engine.run(lambda s: ask(s, True)) == engine.run(lambda s: ask(s, False))
        engine.check_books()


def test_an_exact_twin_of_a_transplanted_branch() -> None:
    target, pairs = CASES["several"]

    async def ask(session: Session) -> None:
        cursor = await transplanted(session, SOURCE, target, pairs)
        (done,) = await written(session, cursor, 6)
        assert done.cursor is not None
        twin = await session.exact(done.cursor)
        assert twin.tokens == done.cursor.tokens
        assert not any(node.private for node in twin.node.path())
        assert twin.node.end == len(twin.tokens) - 1
        assert await session.exact(twin) is twin
        read = await session.logits_along(twin, NEW[:3])
        torch.testing.assert_close(read[-1], plain(oracle, twin.tokens + NEW[:3]), rtol=0, atol=1e-4)
        assert session.ledger.prompt_tokens == len(SOURCE) + len(target)

    oracle = tiny_model("Llama")
    with tiny_engine(tiny_model("Llama")) as engine:
        engine.run(ask)
        engine.check_books()


# -- budgets, failures, cancellation -------------------------------------------------------------------


def test_a_transplant_stays_inside_the_budget() -> None:
    target, pairs = CASES["forwards"]
    model = tiny_model("Llama")
    with tiny_engine(model) as engine:
        token = engine.runner.token_bytes
        expected = engine.run(lambda s: read(s, SOURCE, target, pairs))
    needed = (len(SOURCE) + 2 * len(target)) * token
    for limit in range(needed - 20 * token, needed + 30 * token, 7 * token):
        with tiny_engine(model, kv_limit=limit) as engine:
            engine.run(lambda s: s.prefill(NEW[:20]))  # something to evict
            future = engine.submit(lambda s: read(s, SOURCE, target, pairs))
            error = future.exception(timeout=30)
            assert engine.budget.peak <= limit
            if limit >= needed:
                assert error is None, error
                assert torch.equal(future.result(), expected)
            else:
                assert isinstance(error, KVBudgetError)
                assert error.needed == needed
            engine.check_books()


def test_a_failure_inside_the_pass_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    target, pairs = CASES["forwards"]
    with tiny_engine(tiny_model("Llama")) as engine:
        expected = engine.run(lambda s: read(s, SOURCE, target, pairs))
        held = engine.held()
        forward = engine.runner.forward

        def failing(runs: Any) -> torch.Tensor:
            if any(run.scattered is not None for run in runs):
                raise RuntimeError("no")
            return forward(runs)

        with monkeypatch.context() as patched:
            patched.setattr(engine.runner, "forward", failing)
            with pytest.raises(EngineError, match="no"):
                engine.run(lambda s: read(s, SOURCE, target, pairs))
        engine.check_books()
        assert engine.held() == held
        assert torch.equal(engine.run(lambda s: read(s, SOURCE, target, pairs)), expected)


def test_cancelled_while_it_waits_for_room() -> None:
    target, pairs = CASES["forwards"]
    model = tiny_model("Llama")
    with tiny_engine(model) as engine:
        token = engine.runner.token_bytes
    limit = (len(SOURCE) + 2 * len(target)) * token

    async def ask(session: Session) -> None:
        scheduler = session._work.scheduler
        source = await session.prefill(SOURCE)
        long = asyncio.create_task(session.decode([source], GREEDY.replace(max_tokens=60)))
        while not scheduler.decodes.jobs:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(session.transplant(source, target, pairs))
        while not scheduler.waiting:
            await asyncio.sleep(0)
        for _ in range(30):
            await asyncio.sleep(0)
        assert [type(job).__name__ for job in scheduler.waiting] == ["TransplantJob"]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        assert not scheduler.waiting
        (done,) = await long
        assert len(done.tokens) == 60

    with tiny_engine(model, kv_limit=limit) as engine:
        engine.run(ask)
        engine.check_books()


def test_cancelled_in_the_step_that_computes_it() -> None:
    target, pairs = CASES["forwards"]

    async def ask(session: Session, turns: int) -> None:
        source = await session.prefill(SOURCE)
        task = asyncio.create_task(session.transplant(source, target, pairs))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with tiny_engine(tiny_model("Llama")) as engine:
        for turns in range(12):
            engine.run(lambda s, n=turns: ask(s, n))
            engine.check_books()
            assert engine.held() == len(SOURCE) * engine.runner.token_bytes


def test_a_source_that_was_evicted_is_computed_again() -> None:
    target, pairs = CASES["forwards"]

    async def ask(session: Session) -> torch.Tensor:
        source = await session.prefill(SOURCE)
        session._work.scheduler.tree.evict(10**9)
        cursor = await session.transplant(source, target, pairs)
        assert cursor.logits is not None
        return cursor.logits

    with tiny_engine(tiny_model("Llama")) as engine:
        expected = engine.run(lambda s: read(s, SOURCE, target, pairs))
        assert torch.equal(engine.run(ask), expected)


def test_a_finished_branch_can_be_a_source() -> None:
    """Its last token, which has no KV yet, is computed for it."""

    async def ask(session: Session) -> tuple[torch.Tensor, Tokens]:
        (done,) = await written(session, await session.prefill(SOURCE), 4)
        assert done.cursor is not None
        line = done.cursor.tokens
        target = NEW[:3] + line[-4:] + NEW[3:5]
        cursor = await session.transplant(done.cursor, target, runs((3, len(line) - 4, 4)))
        assert cursor.logits is not None
        return cursor.logits, target

    with tiny_engine(tiny_model("Llama", num_hidden_layers=1)) as engine:
        got, target = engine.run(ask)
    torch.testing.assert_close(got, plain(tiny_model("Llama", num_hidden_layers=1), target), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "pairs",
    [
        ((8, 8), (7, 7)),
        ((8, 8), (8, 8)),
        ((len(SOURCE) - 1, len(SOURCE) - 1),),
        ((-1, len(SOURCE) - 1),),
        ((3, len(SOURCE)),),
        ((3, -1),),
        ((3, 4),),
    ],
)
def test_pairs_that_cannot_be(pairs: Pairs) -> None:
    with tiny_engine(tiny_model("Llama", num_hidden_layers=1)) as engine:
        with pytest.raises(ConfigError, match="pairs holds"):
            engine.run(lambda s: transplanted(s, SOURCE, SOURCE, pairs))
        engine.check_books()


def test_prompts_and_sources_that_cannot_be() -> None:
    target, pairs = CASES["forwards"]

    async def from_a_transplant(session: Session) -> None:
        cursor = await transplanted(session, SOURCE, target, pairs)
        await session.transplant(cursor, SOURCE, ())

    async def from_a_released_one(session: Session) -> None:
        source = await session.prefill(SOURCE)
        session.release(source)
        await session.transplant(source, target, pairs)

    with tiny_engine(tiny_model("Llama"), context=48) as engine:
        for ask in (from_a_transplant, from_a_released_one):
            with pytest.raises(ConfigError, match="still held"):
                engine.run(ask)
        for tokens in (NEW + NEW[:8], ()):
            with pytest.raises(PromptTooLongError):
                engine.run(lambda s, t=tokens: transplanted(s, SOURCE, t, ()))
        engine.check_books()


# -- models that cannot -----------------------------------------------------------------------------------


@pytest.fixture
def _per_branch_is_said() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerBranchWarning)
        yield


CANNOT = ["GPT-2", "Qwen3.5 (hybrid)", "LFM2 (hybrid)", "BLOOM (ALiBi)", "Mamba"]


@pytest.mark.usefixtures("_per_branch_is_said")
@pytest.mark.parametrize("name", CANNOT)
def test_a_model_that_cannot_says_so_and_leaves_nothing_behind(name: str) -> None:
    target, pairs = CASES["forwards"]
    with tiny_engine(tiny_model(name)) as engine:
        engine.run(lambda s: s.prefill(SOURCE))
        held = engine.held()
        with pytest.raises(UnsupportedModelError, match="mode exact"):
            engine.run(lambda s: transplanted(s, SOURCE, target, pairs))
        engine.check_books()
        assert engine.held() == held


@pytest.mark.usefixtures("_per_branch_is_said")
@pytest.mark.parametrize("name", CANNOT)
def test_the_reasoner_raises_the_same_error(name: str) -> None:
    tokenizer = scripted_tokenizer()
    model = tiny_model(name, vocab_size=len(tokenizer))
    engine = EngineConfig(kv_budget=2**26, fast_linears=False)
    with RKSCReasoner.from_model(model, tokenizer, engine=engine, strategy=SelfConsistency(branches=2)) as reasoner:
        with pytest.raises(UnsupportedModelError, match="mode exact"):
            reasoner.reason(
                "first of all, what is this thing",
                phrasings=["now, what is this thing"],
                sharing=Sharing(mode="aligned", first=0),
                max_tokens=3,
            )
        assert reasoner.reason("what is this", sharing="aligned", max_tokens=3).branches  # nothing to take
        reasoner.clear_cache()
        assert reasoner.kv_bytes == 0


# -- any sequence of verbs ----------------------------------------------------------------------------------


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), PROMPTS, st.booleans()),
        st.tuples(st.just("transplant"), st.integers(0, 9), PROMPTS, st.integers(0, 999)),
        st.tuples(st.just("decode"), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 7)),
        st.tuples(st.just("fork"), st.integers(0, 9), st.integers(1, 3)),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("exact"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(1, 200)),
        st.tuples(st.just("cancel"), st.integers(0, 9), PROMPTS, st.integers(1, 20)),
    ),
    min_size=1,
    max_size=14,
)


def some_pairs(source: Tokens, target: Tokens, seed: int) -> Pairs:
    """Any of the target's tokens but the last, each from any place of the source that has the same."""
    random = Random(seed)
    places = {token: [i for i, other in enumerate(source) if other == token] for token in set(target)}
    return tuple(
        (at, random.choice(places[token]))
        for at, token in enumerate(target[:-1])
        if places[token] and random.random() < 0.7
    )


async def act(session: Session, actions: list[tuple[Any, ...]]) -> None:
    held: list[Cursor] = [await session.prefill((0, 1))]
    for verb, first, *more in actions:
        exact = [cursor for cursor in held if cursor.graft is None]
        if verb == "prefill":
            held.append(await session.prefill(first, keep=more[0]))
        elif verb == "transplant":
            source, (target, seed) = exact[first % len(exact)], more
            cursor = await session.transplant(source, target, some_pairs(source.tokens, target, seed))
            assert cursor.logits is not None
            assert torch.equal(cursor.logits, logits(target))
            held.append(cursor)
        elif verb == "cancel":
            source, (target, turns) = exact[first % len(exact)], more
            pairs = some_pairs(source.tokens, target, turns)
            task = asyncio.create_task(session.transplant(source, target, pairs))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif verb == "decode":
            cursors = [held[i % len(held)] for i in first]
            cursors = [cursor for cursor in cursors if len(cursor.tokens) < CONTEXT - 1] or held[:1]
            for cursor, done in zip(
                cursors, await session.decode(cursors, GREEDY.replace(max_tokens=more[0])), strict=True
            ):
                assert done.tokens == continued(cursor.tokens, more[0])
                assert done.cursor is not None
                assert done.cursor.graft == cursor.graft
                held.append(done.cursor)
        elif verb == "exact":
            cursor = held[first % len(held)]
            if len(cursor.tokens) > 1 and cursor.graft is not None:
                held.append(await session.exact(cursor))
                assert not any(node.private for node in held[-1].node.path())
        elif verb == "fork":
            held.extend(session.fork(held[first % len(held)], more[0]))
        elif verb == "release" and len(held) > 1:
            session.release(held.pop(first % (len(held) - 1) + 1))
        elif verb == "evict":
            session._work.scheduler.tree.evict(first)
        budget = session._work.scheduler.budget
        assert budget.held <= budget.limit


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=st.lists(ACTIONS, min_size=1, max_size=3), limit=st.sampled_from([8 * 200, 8 * 400, 8 * 10**5]))
def test_any_sequence_of_verbs_reads_back_its_own_tokens(requests: list[list[tuple[Any, ...]]], limit: int) -> None:
    engine = TinyEngine(
        lambda budget: ScriptedRunner(logits, 5, budget),
        NumberCodec(),  # type: ignore[arg-type]
        context=CONTEXT,
        kv_limit=limit,
        config=EngineConfig(prefill_chunk=5),
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
