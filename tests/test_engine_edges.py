"""What goes wrong at the edges: budgets that just do not fit, failures, and models that are not free."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from support import GREEDY, TinyEngine, generate, random_tokens, tiny_engine
from tiny_models import tiny_model

from rksc_agents import (
    ConfigError,
    EngineClosedError,
    EngineConfig,
    EngineError,
    KVBudgetError,
    Outcome,
    PerBranchWarning,
    Problem,
    PromptTooLongError,
    RKSCReasoner,
    SelfConsistency,
    Strategy,
    UnsupportedModelError,
)
from rksc_agents.cache.budget import Budget
from rksc_agents.engine.cursor import Completion
from rksc_agents.engine.session import Session
from rksc_agents.model.private_runner import PrivateRunner
from rksc_agents.model.runners import make_runner
from rksc_agents.testing import scripted_reasoner, scripted_tokenizer

PROMPT = random_tokens(40)
SMALL = EngineConfig(kv_budget=2**24, fast_linears=False)


@pytest.fixture(autouse=True)
def _per_branch_is_said() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerBranchWarning)
        yield


async def ask(session: Session, prompt: tuple[int, ...], branches: int = 2, tokens: int = 6) -> list[Completion]:
    root = await session.prefill(prompt)
    return await session.decode(session.fork(root, branches), GREEDY.replace(max_tokens=tokens))


@pytest.mark.parametrize("name", ["LFM2 (hybrid)", "Mamba", "BLOOM (ALiBi)", "Llama"])
def test_a_budget_of_any_size_gives_an_answer_or_an_error(name: str) -> None:
    """Nothing waits for ever for room that cannot come."""
    model = tiny_model(name)
    expected = generate(model, PROMPT, 6)
    outcomes = set()
    for limit in range(2_000, 200_000, 12_345):
        with tiny_engine(model, kv_limit=limit) as engine:
            future = engine.submit(lambda s: ask(s, PROMPT))
            error = future.exception(timeout=30)
            assert engine.budget.peak <= limit
            if error is None:
                assert future.result()[1].tokens == expected
            else:
                assert isinstance(error, KVBudgetError)
            outcomes.add(error is None)
    assert outcomes == {True, False}


def test_two_prompts_that_do_not_fit_together_both_finish() -> None:
    model = tiny_model("Llama")
    prompts = [random_tokens(60, seed=s) for s in (1, 2)]
    expected = [generate(model, prompt, 6) for prompt in prompts]
    with tiny_engine(model, kv_limit=384 * 100, prefill_chunk=8) as engine:
        futures = [engine.submit(lambda s, p=p: ask(s, p)) for p in prompts]
        for future, tokens in zip(futures, expected, strict=True):
            assert future.result(timeout=30)[0].tokens == tokens


@pytest.mark.parametrize("name", ["Llama", "LFM2 (hybrid)", "Qwen3.5 (hybrid)"])
def test_a_failed_pass_is_tried_again_for_the_others(name: str) -> None:
    model = tiny_model(name)
    bad = random_tokens(40, seed=9)
    expected = generate(model, PROMPT, 20)
    with tiny_engine(model) as engine:
        forward = model.forward

        def broken(**arguments: torch.Tensor) -> object:
            out = forward(**arguments)
            if (arguments["input_ids"] == 95).any():
                raise ZeroDivisionError("a kernel failed")
            return out

        vars(model)["forward"] = broken
        good = engine.submit(lambda s: ask(s, PROMPT, tokens=20))
        failing = engine.submit(lambda s: ask(s, (*bad[:-1], 95), tokens=20))
        error = failing.exception(timeout=30)
        assert isinstance(error, EngineError)
        if 95 not in PROMPT + expected:
            assert good.result(timeout=30)[0].tokens == expected
        engine.check_books()


def test_a_dead_loop_leaves_nobody_waiting() -> None:
    model = tiny_model("Llama")
    with tiny_engine(model) as engine:

        def broken() -> object:
            raise RuntimeError("the model cannot be switched")

        engine.runner.attached = broken  # type: ignore[method-assign,assignment]
        seen: list[object] = []
        hook, threading.excepthook = threading.excepthook, lambda args: seen.append(args.exc_value)
        try:
            future = engine.submit(lambda s: ask(s, PROMPT))
            with pytest.raises(EngineClosedError):
                future.result(timeout=30)
            engine._thread.join(30)
        finally:
            threading.excepthook = hook
        assert [str(error) for error in seen] == ["the model cannot be switched"]
        with pytest.raises(EngineClosedError):
            engine.submit(lambda s: ask(s, PROMPT))


def test_one_token_still_shows_what_it_held() -> None:
    async def solve(session: Session) -> int:
        await ask(session, PROMPT, branches=4, tokens=1)
        return session.ledger.kv.peak_bytes

    with tiny_engine(tiny_model("Llama")) as engine:
        assert engine.run(solve) == 40 * 384


def test_a_released_cursor_is_refused() -> None:
    async def solve(session: Session) -> None:
        root = await session.prefill(PROMPT)
        session.release(root)
        session.release(root)
        with pytest.raises(ConfigError, match="released"):
            session.fork(root, 2)
        with pytest.raises(ConfigError, match="released"):
            await session.decode([root], GREEDY)

    with tiny_engine(tiny_model("Llama")) as engine:
        engine.run(solve)
        engine.check_books()


def test_if_one_continuation_does_not_fit_the_others_are_not_computed() -> None:
    async def solve(session: Session) -> None:
        long, short = await session.prefill(random_tokens(250)), await session.prefill(PROMPT)
        ends = await session.decode([long, short], GREEDY.replace(max_tokens=6))
        cursors = [end.cursor for end in ends if end.cursor is not None]
        await session.decode(cursors, GREEDY)  # the first stands at the context's end

    with tiny_engine(tiny_model("Llama"), context=256) as engine:
        with pytest.raises(PromptTooLongError):
            engine.run(solve)
        engine.check_books()


def test_a_model_serves_one_reasoner_at_a_time() -> None:
    model, tokenizer = tiny_model("Llama", vocab_size=300), scripted_tokenizer()
    with RKSCReasoner.from_model(model, tokenizer, engine=SMALL), pytest.raises(ConfigError, match="another reasoner"):
        RKSCReasoner.from_model(model, tokenizer, engine=SMALL)
    RKSCReasoner.from_model(model, tokenizer, engine=SMALL).close()
    with pytest.raises(ConfigError, match=r"model.eval\(\)"):
        RKSCReasoner.from_model(model.train(), tokenizer, engine=SMALL)
    RKSCReasoner.from_model(model.eval(), tokenizer, engine=SMALL).close()


@pytest.mark.parametrize("name", ["Llama", "Mamba"])
def test_a_model_whose_runner_cannot_be_made_is_free_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rksc_agents.model import private_runner, runner

    def raising(*_: object, **__: object) -> None:
        raise RuntimeError("no such cache")

    model = tiny_model(name)
    with monkeypatch.context() as patch:
        patch.setattr(private_runner, "DynamicCache", raising)
        patch.setattr(runner, "LayerKinds", raising)
        with pytest.raises(UnsupportedModelError, match="no such cache"):
            make_runner(model, Budget(10**9))
    make_runner(model, Budget(10**9)).close()


def test_packed_weights_are_not_saved_empty() -> None:
    model, tokenizer = tiny_model("Llama", vocab_size=300), scripted_tokenizer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    packed = EngineConfig(kv_budget=2**24, fast_linears=True)
    with RKSCReasoner.from_model(model, tokenizer, engine=packed), pytest.raises(EngineError, match="close"):
        model.state_dict()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_embeddings_that_depend_on_the_length_are_not_shared() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    model = tiny_model("Phi-3", rope_parameters=rope, original_max_position_embeddings=64, sliding_window=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerBranchWarning)
        with pytest.raises(PerBranchWarning, match="depends on the length"):
            make_runner(model, Budget(10**9))
    gc.collect()
    with tiny_engine(model) as engine:
        assert isinstance(engine.runner, PrivateRunner)
        prompt = random_tokens(100)
        assert engine.run(lambda s: ask(s, prompt))[0].tokens == generate(model, prompt, 6)


class TwoBlocks(Strategy):
    """Two groups of branches at once."""

    name = "two-blocks"

    async def solve(self, problem: Problem) -> Outcome:

        async def group() -> list[tuple[int, str]]:
            async with problem.branching(await problem.start(3)) as ended:
                return [(index, branch.text) async for index, branch in ended]

        said = dict(pair for pairs in await asyncio.gather(group(), group()) for pair in pairs)
        assert sorted(said) == list(range(6))
        assert [branch.text for branch in problem.branches] == [said[i] for i in range(6)]
        return Outcome(0, None)


class Asks(Strategy):
    """Calls the reasoner from the engine's own thread."""

    name = "asks"
    reasoner: object

    async def solve(self, problem: Problem) -> Outcome:
        self.reasoner.reason("Say hello")  # type: ignore[attr-defined]
        return Outcome(0, None)


def test_strategies_at_the_edge() -> None:
    with scripted_reasoner({"Say hello": ["Hi.", "Hello there.", "Good day!"]}) as reasoner:
        assert len(reasoner.reason("Say hello", strategy=TwoBlocks()).branches) == 6
        with pytest.raises(EngineError, match="own thread"):
            reasoner.reason("Say hello", strategy=Asks(reasoner=reasoner))


def test_batches_raise_typed_errors_and_fail_fast() -> None:
    script = {"Say hello": "Hi.", "Long": "x" * 3000}
    with scripted_reasoner(script, context=3500) as reasoner:

        async def several() -> None:
            await reasoner.abatch(["Say hello", "Unknown"], strategy="direct")

        with pytest.raises(EngineError, match="no answer"):
            asyncio.run(several())
        with pytest.raises(EngineError, match="no answer"):
            reasoner.batch(["Long", "Unknown"], strategy="direct", max_tokens=3000)
        assert reasoner._engine.runner.tokens_computed < 2000


def test_a_stream_that_is_never_read_never_runs() -> None:
    with scripted_reasoner({"Say hello": "Hi."}) as reasoner:
        stream = reasoner.stream("Say hello", strategy=SelfConsistency(branches=4))
        stream.close()
        assert reasoner._engine.runner.passes == 0
        with pytest.raises(ConfigError):  # what is wrong is said at once
            reasoner.stream("Say hello", nonsense=1)


def test_a_script_with_impossible_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        scripted_reasoner({"Say hello": {"Hi.": 0.0}})


def test_interrupting_the_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from rksc_agents.engine import engine as module

    class Interrupted(module.Future):  # type: ignore[type-arg,name-defined]
        def result(self, timeout: float | None = None) -> object:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "Future", Interrupted)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        TinyEngine(
            lambda budget: make_runner(tiny_model("Llama"), budget, SMALL),
            None,  # type: ignore[arg-type]
            context=64,
            kv_limit=10**6,
            config=SMALL,
        )
    assert threading.active_count() == before
