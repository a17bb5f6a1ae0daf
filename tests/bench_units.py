"""What the tests of the benches need: a tiny model with a tokenizer, and questions of known length."""

from __future__ import annotations

from typing import Any

from tiny_models import tiny_model

from rksc_agents.bench.peers.weights import Places, Weights
from rksc_agents.bench.unit import Unit, make_unit
from rksc_agents.config import EngineConfig
from rksc_agents.model.loader import LoadedModel
from rksc_agents.questions import Question
from rksc_agents.testing import scripted_tokenizer

QUESTIONS = [Question(f"What is {i} + {i}?", str(2 * i)) for i in range(10)]
NOWHERE = Places()
ENGINE = EngineConfig(kv_budget=2**26, fast_linears=False)
TOKEN_BYTES = 3 * 2 * 2 * 8 * 4
"""KV of one token of the tiny Llama: layers, keys and values, heads, width, bytes of a number."""


def tiny_loaded(kind: str = "Llama", **changes: Any) -> LoadedModel:
    """A tiny model that reads one token per byte."""
    tokenizer = scripted_tokenizer()
    model = tiny_model(kind, vocab_size=len(tokenizer), max_position_embeddings=1024, **changes)
    return LoadedModel(model, tokenizer, "tiny")


def tiny_weights(loaded: LoadedModel | None = None, **settings: Any) -> Weights:
    """Weights of a tiny model."""
    loaded = loaded if loaded is not None else tiny_loaded()
    settings = {"engine": ENGINE, "places": NOWHERE, **settings}
    return Weights(loaded.model, loaded.tokenizer, name=loaded.name, **settings)


def tiny_unit(weights: Weights, *, prefix: int = 64, branches: int = 2, tokens: int = 4) -> Unit:
    """A small unit."""
    return make_unit(weights.codec, QUESTIONS, prefix=prefix, branches=branches, tokens=tokens, context=weights.context)
