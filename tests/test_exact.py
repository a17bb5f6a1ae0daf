"""The engine gives what `model.generate` gives, for every supported architecture."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from support import GREEDY, generate, random_tokens, tiny_engine
from tiny_models import CONFIGS, tiny_model

from rksc_agents.cache.budget import Budget
from rksc_agents.engine.session import Session
from rksc_agents.model.plan import Run
from rksc_agents.model.private_runner import PrivateRunner
from rksc_agents.model.runner import TreeRunner
from rksc_agents.model.runners import PerBranchWarning, make_runner

PER_BRANCH = {"Mamba", "BLOOM (ALiBi)", "Falcon-H1 (parallel hybrid)"}
ON_TREE = [name for name in CONFIGS if name not in PER_BRANCH]
PROMPTS = [random_tokens(n, seed=n) for n in (5, 13, 30)]  # the window of the sliding models is 8


@pytest.fixture(autouse=True)
def _per_branch_is_said() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerBranchWarning)
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_branches_equal_generate(name: str) -> None:
    """Ragged prompts at once, forks, forks inside forks, prompts in pieces."""
    model = tiny_model(name)
    shared = PROMPTS[2]
    branches = [shared + random_tokens(n, seed=90 + n) for n in (1, 4, 9)]

    async def alone(session: Session, prompt: tuple[int, ...]) -> list[tuple[int, ...]]:
        root = await session.prefill(prompt)
        first = await session.decode(session.fork(root, 2), GREEDY.replace(max_tokens=9))
        forks = [fork for done in first for fork in session.fork(done.cursor, 2)]  # type: ignore[arg-type]
        second = await session.decode(forks, GREEDY.replace(max_tokens=6))
        return [a.tokens + b.tokens for a, b in zip([x for x in first for _ in (0, 1)], second, strict=True)]

    with tiny_engine(model, prefill_chunk=7) as engine:
        assert isinstance(engine.runner, TreeRunner) == (name in ON_TREE)
        prompts = PROMPTS + branches
        futures = [engine.submit(lambda s, p=p: alone(s, p)) for p in prompts]
        results = [future.result(timeout=60) for future in futures]
        engine.check_books()
    for prompt, result in zip(prompts, results, strict=True):
        expected = generate(model, prompt, 15)
        assert result == [expected] * 4


@pytest.mark.parametrize("name", ON_TREE)
def test_logits_equal_the_plain_model(name: str) -> None:
    """Logits after ragged rows under different nodes, in one pass, within 1e-4 of an uncached forward."""
    model = tiny_model(name)
    runner = TreeRunner(model, Budget(10**9))
    tree = runner.tree()
    long, short = PROMPTS[2], PROMPTS[1]
    steps = [random_tokens(4, seed=s) for s in (1, 2, 3)]
    with runner.attached():
        ends = []
        for prompt in (long, short):
            tail = runner.tail([tree.root], len(prompt), 0)
            for start in range(0, len(prompt), 7):
                piece = list(prompt[start : start + 7])
                tail.grow(len(piece))
                runner.forward([Run(tail, [piece], [tree.root], wanted=0)])
            (segment,) = tail.part([0], [])
            ends.append(tree.insert(tree.root, prompt, segment))
        bases = [ends[0], ends[1], ends[0]]
        tail = runner.tail(bases, 4, 0)
        got = []
        for step in range(4):
            tail.grow(1)
            got.append(runner.forward([Run(tail, [[row[step]] for row in steps], bases)]))
    for row, base in enumerate(bases):
        sequence = torch.tensor([(long if base is ends[0] else short) + steps[row]])
        with torch.inference_mode():
            expected = model(input_ids=sequence, use_cache=False).logits[0, -4:]
        ours = torch.stack([logits[row] for logits in got])
        assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["LFM2 (hybrid)", "Qwen3.5 (hybrid)"])
def test_states_at_the_root_and_beyond_do_not_mix(name: str) -> None:
    """A piece that begins a prompt and one that goes on with another, equally wide, in one pass."""
    model = tiny_model(name)
    prompts = [PROMPTS[2], random_tokens(10, seed=77)]  # in pieces of 20, 9, 1 and 9, 1

    async def solve(session: Session, prompt: tuple[int, ...]) -> tuple[int, ...]:
        (done,) = await session.decode([await session.prefill(prompt)], GREEDY.replace(max_tokens=12))
        return done.tokens

    failed = []
    with tiny_engine(model, prefill_chunk=20) as engine:
        forward = engine.runner.forward

        def noting(runs: list[Run]) -> torch.Tensor:
            try:
                return forward(runs)
            except Exception as error:  # the scheduler would try the requests one by one
                failed.append(error)
                raise

        engine.runner.forward = noting  # type: ignore[method-assign,assignment]
        futures = [engine.submit(lambda s, p=p: solve(s, p)) for p in prompts]
        results = [future.result(timeout=60) for future in futures]
    assert not failed
    assert results == [generate(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_the_size_of_pieces_changes_nothing(chunk: int) -> None:
    model = tiny_model("Gemma 3")
    prompt = PROMPTS[2]

    async def solve(session: Session) -> tuple[int, ...]:
        (done,) = await session.decode([await session.prefill(prompt)], GREEDY.replace(max_tokens=12))
        return done.tokens

    with tiny_engine(model, prefill_chunk=chunk) as engine:
        assert engine.run(solve) == generate(model, prompt, 12)


def test_model_is_left_as_found() -> None:
    from transformers import AttentionInterface

    model = tiny_model("Llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention, registered = model.config._attn_implementation, set(AttentionInterface())
    seen = []

    async def solve(session: Session) -> None:
        root = await session.prefill(PROMPTS[0])
        seen.append(model.config._attn_implementation)
        await session.decode([root], GREEDY.replace(max_tokens=3))

    with tiny_engine(model) as engine:
        engine.run(solve)
    assert seen != [attention]
    assert model.config._attn_implementation == attention
    assert set(AttentionInterface()) == registered
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


def test_models_page_is_up_to_date() -> None:
    """docs/models.md is what this test finds; write it anew with RKSC_WRITE_DOCS=1."""
    rows = []
    for name, (kind, _) in CONFIGS.items():
        model = tiny_model(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PerBranchWarning)
            runner = make_runner(model, Budget(10**9))
        reasons = [str(w.message) for w in caught if w.category is PerBranchWarning]
        assert isinstance(runner, PrivateRunner) == bool(reasons) == (name in PER_BRANCH)
        rows.append(f"| {name} | `{kind}` | {_how(runner, reasons)} |")
    text = _PAGE + "\n".join(rows) + "\n"
    page = Path(__file__).parent.parent / "docs" / "models.md"
    if os.environ.get("RKSC_WRITE_DOCS"):
        page.write_text(text)
    assert page.read_text() == text


def _how(runner: TreeRunner | PrivateRunner, reasons: list[str]) -> str:
    if isinstance(runner, PrivateRunner):
        return reasons[0].split("because ")[1].split("; ")[0].join(("a cache per branch: ", ""))
    kinds = runner.kinds
    windows = {w for w in kinds.windows.values() if w is not None}
    parts = ["on the tree"]
    if windows:
        every = all(kinds.windows.values())
        parts.append("sliding window" if every else "sliding and full attention mixed")
    if kinds.reusing:
        parts.append("some layers reuse another layer's KV")
    if kinds.linear:
        parts.append("recurrent or convolution states kept at node ends, copied on fork")
    return ", ".join(parts)


_PAGE = """\
# Models tried

What the tests try with a tiny random model of each architecture, and how it runs. Each gives, greedily and in
float32, token for token what `model.generate` gives, over ragged prompts, forks inside forks and crossed windows.
Made by `RKSC_WRITE_DOCS=1 pytest tests/test_exact.py -k models_page`.

A model that is not listed is tried when it is loaded: a few tokens are computed on the tree and by the model alone.
Where the logits differ, or the tree cannot hold a layer, the model runs with a cache per branch and a warning says why.

| architecture | `model_type` | how it runs |
| --- | --- | --- |
"""
