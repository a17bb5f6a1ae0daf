"""`rksc bench steps`: one decode step of B branches on a shared prefix, ours against transformers.

transformers runs as its users run it: a `DynamicCache` prefilled once and repeated for B rows, with
sdpa attention. Both run the same tokens, alternating in one process, so that a drift of the machine
meets both; the ratio of medians is what counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from rksc_agents.cache.budget import Budget
from rksc_agents.config import DEFAULT_MODEL, Config, EngineConfig
from rksc_agents.errors import ConfigError
from rksc_agents.model.loader import load_model
from rksc_agents.model.plan import Run
from rksc_agents.model.protocol import vocabulary_size
from rksc_agents.model.runner import TreeRunner
from rksc_agents.model.runners import make_runner


class StepRow(Config):
    """One measurement.

    Attributes
    ----------
    branches, prefix : int
        Rows in the step, and tokens in the prefix they share.
    ratio : float
        transformers' median over ours; above 1 ours is faster.
    ratio_low, ratio_high : float
        Quartiles of the ratios of neighbouring steps.
    ours_median_s, transformers_median_s : float
        Seconds per step.
    """

    branches: int
    prefix: int
    ratio: float
    ratio_low: float
    ratio_high: float
    ours_median_s: float
    transformers_median_s: float


def bench_steps(
    model: str = DEFAULT_MODEL,
    *,
    branches: Sequence[int] = (1, 8, 32),
    prefix: Sequence[int] = (1024,),
    steps: int = 24,
    progress: Callable[[str], None] | None = None,
    **hf_kwargs: Any,
) -> dict[str, Any]:
    """Measure decode steps.

    Parameters
    ----------
    model : str
        As for :func:`~rksc_agents.model.loader.load_model`; loaded twice, because packed weights would serve both.
    branches, prefix : sequence of int
        Every pair is measured.
    steps : int, default 24
        Timed steps of each; 4 more warm up.

    Returns
    -------
    dict
        `model`, `dtype`, `threads`, `packed_layers`, `panelled_layers`, and `rows`: fields of :class:`StepRow`.
    """
    if steps < 1 or min(*branches, *prefix, 1) < 1:
        raise ConfigError(
            f"steps = {steps}, branches = {list(branches)}, prefix = {list(prefix)}: all must be at least 1"
        )
    plain = load_model(model, progress=progress, **hf_kwargs).model
    plain.set_attn_implementation("sdpa")
    runner = make_runner(
        load_model(model, **hf_kwargs).model,
        Budget(2**62),
        EngineConfig(),
    )
    if not isinstance(runner, TreeRunner):
        raise ConfigError(f"{model} does not run on the tree, so there is no step to compare")
    rows = []
    try:
        for tokens in prefix:
            for count in branches:
                if progress is not None:
                    progress(f"{count} branches on {tokens} tokens")
                rows.append(_compare(plain, runner, count, tokens, steps))
    finally:
        runner.close()
    return {
        "model": str(model),
        "dtype": str(plain.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "packed_layers": len(runner.packed),
        "panelled_layers": len(runner.panelled),
        "rows": [row.model_dump() for row in rows],
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """What :func:`bench_steps` found, as text."""
    yield (
        f"{found['model']}, {found['dtype']}, {found['threads']} threads, "
        f"{found['packed_layers']} linears packed, {found['panelled_layers']} in panels"
    )
    for row in found["rows"]:
        yield (
            f"{row['branches']} branches on {row['prefix']} tokens: {row['ratio']:.2f}x as fast as transformers "
            f"(quartiles {row['ratio_low']:.2f} to {row['ratio_high']:.2f}; {row['ours_median_s'] * 1e3:.1f} ms and "
            f"{row['transformers_median_s'] * 1e3:.1f} ms a step)"
        )


def _compare(plain: PreTrainedModel, runner: TreeRunner, branches: int, prefix: int, steps: int) -> StepRow:
    generator = torch.Generator().manual_seed(0)
    vocabulary = vocabulary_size(plain)
    shared = torch.randint(vocabulary, (prefix,), generator=generator).tolist()
    told = torch.randint(vocabulary, (steps + 4, branches), generator=generator).tolist()
    ours: list[float] = []
    theirs: list[float] = []
    with _our_steps(runner, shared, told) as our_step, torch.no_grad():  # as `generate` does
        their_step = _their_steps(plain, shared, told)
        for i in range(steps + 4):
            for step, taken in ((our_step, ours), (their_step, theirs)):
                began = time.perf_counter()
                step(i)
                taken.append(time.perf_counter() - began)
    ours, theirs = ours[4:], theirs[4:]
    pairs = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    mine, other = statistics.median(ours), statistics.median(theirs)
    return StepRow(
        branches=branches,
        prefix=prefix,
        ratio=other / mine,
        ratio_low=pairs[len(pairs) // 4],
        ratio_high=pairs[(3 * len(pairs)) // 4],
        ours_median_s=mine,
        transformers_median_s=other,
    )


@contextmanager
def _our_steps(runner: TreeRunner, prefix: list[int], told: list[list[int]]) -> Iterator[Callable[[int], None]]:
    tree = runner.tree()
    with runner.attached():
        tail = runner.tail([tree.root], len(prefix), 0)
        tail.grow(len(prefix))
        runner.forward([Run(tail, [prefix], [tree.root], wanted=0)])
        (segment,) = tail.part([0], [])
        tail.close()
        bases = [tree.insert(tree.root, tuple(prefix), segment)] * len(told[0])
        tail = runner.tail(bases, len(told), 0)

        def step(i: int) -> None:
            tail.grow(1)
            runner.forward([Run(tail, [[token] for token in told[i]], bases)])

        yield step
        tail.close()
        tree.clear()


def _their_steps(model: PreTrainedModel, prefix: list[int], told: list[list[int]]) -> Callable[[int], None]:
    device = model.device
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([prefix], device=device), cache=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(len(told[0]))

    def step(i: int) -> None:
        ids = torch.tensor(told[i], device=device)[:, None]
        model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)

    return step
