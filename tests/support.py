"""What several test files need: engines on tiny models, and the oracle."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from rksc_agents.config import EngineConfig, Sampling
from rksc_agents.engine.engine import Engine
from rksc_agents.engine.session import Session
from rksc_agents.model.runners import make_runner

T = TypeVar("T")

GREEDY = Sampling(temperature=0)


class NumberStream:
    """Text of tokens written as numbers."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.text = ""
        self.stopped = False
        self._stop = stop

    def push(self, token: int) -> str:
        if str(token) in self._stop:
            self.stopped = True
            return ""
        self.text += f"{token} "
        return f"{token} "

    def finish(self) -> str:
        return ""


class NumberCodec:
    """A codec for models without a tokenizer."""

    def __init__(self, eos: Sequence[int] = ()) -> None:
        self.eos_token_ids = frozenset(eos)

    def stream(self, stop: Sequence[str] = (), *, shown: frozenset[int] = frozenset()) -> NumberStream:
        return NumberStream(stop)


class TinyEngine(Engine):
    """An engine on a tiny model, with blocking verbs for tests."""

    def run(self, solve: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        return self.submit(solve).result(timeout=60)

    def held(self) -> int:
        return self.inspect(lambda scheduler: scheduler.budget.held)

    def check_books(self) -> None:
        """The budget agrees with the tensors, and nothing is claimed while nothing runs."""

        def look(scheduler: Any) -> None:
            nodes = list(scheduler.tree.nodes())
            assert scheduler.budget.held == sum(node.payload.nbytes for node in nodes)
            assert scheduler.budget.promised == 0
            assert all(node.pins == node.refs == 0 for node in nodes)
            assert not scheduler.busy

        self.inspect(look)


@contextmanager
def tiny_engine(
    model: PreTrainedModel, *, eos: Sequence[int] = (), kv_limit: int = 10**9, context: int = 256, **config: Any
) -> Iterator[TinyEngine]:
    """An engine on `model`; after the block all its KV is gone."""
    settings = EngineConfig(fast_linears=False, **config)
    engine = TinyEngine(
        lambda budget: make_runner(model, budget, settings),
        NumberCodec(eos),  # type: ignore[arg-type]
        context=context,
        kv_limit=kv_limit,
        config=settings,
    )
    try:
        yield engine
    finally:
        engine.close()
    assert engine.budget.held == 0
    assert engine.budget.promised == 0


def random_tokens(count: int, seed: int = 0, vocabulary: int = 96) -> tuple[int, ...]:
    """Token ids from 3 up, so that none is special."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocabulary, (count,), generator=generator).tolist())


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The oracle: what `model.generate` continues `prompt` with, alone and greedily."""
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return tuple(out[0, len(prompt) :].tolist())


def keys_of(value: Any) -> Iterator[str]:
    """All keys of a JSON value, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)
