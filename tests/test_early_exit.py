"""Level 2 of early exit: where rows settle, what is read there, and that the model is left as it was found."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from support import TinyEngine, random_tokens, tiny_engine
from tiny_models import CONFIGS, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from rksc_agents import ConfigError, EngineError, PerBranchWarning, UnsupportedModelError
from rksc_agents.cache.budget import Budget
from rksc_agents.config import EngineConfig
from rksc_agents.engine.probe import Reading
from rksc_agents.engine.session import Session
from rksc_agents.model.exits import ExitRule, Glimpse
from rksc_agents.model.private_runner import PrivateRunner
from rksc_agents.model.readout import Readout
from rksc_agents.model.runner import TreeRunner
from rksc_agents.model.runners import make_runner
from rksc_agents.verify.early_exit import FittedExit, RawExit, Record, binary_entropy
from rksc_agents.verify.lens import FittedLens

PROMPT = random_tokens(20)
GROUPS = ((5, 9), (7,))
WIDTH = 32
LAYERS = 8
TEXTS = [random_tokens(3 + seed % 4, seed=seed) for seed in range(12)]
PRIVATE = {"Mamba", "BLOOM (ALiBi)", "Falcon-H1 (parallel hybrid)"}


@pytest.fixture(autouse=True)
def _per_branch_is_said() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerBranchWarning)
        yield


@pytest.fixture(scope="module")
def deep() -> PreTrainedModel:
    """A tiny Llama whose layers change their minds gradually."""
    model = tiny_model("Llama", num_hidden_layers=LAYERS)
    with torch.no_grad():
        for layer in model.model.layers:
            for parameter in layer.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(0.4)
        model.lm_head.weight.mul_(4.0)
    return model


def hooks(model: nn.Module) -> int:
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    )


def read(engine: TinyEngine, texts: Sequence[Sequence[int]], rule: ExitRule | None) -> list[Reading]:
    return read_and_count(engine, texts, rule, [])[0]


def read_and_count(
    engine: TinyEngine, texts: Sequence[Sequence[int]], rule: ExitRule | None, spied: Sequence[nn.Module]
) -> tuple[list[Reading], list[int]]:
    """Probe after the prompt, and say how often each module ran for that."""

    async def solve(session: Session) -> tuple[list[Reading], list[int]]:
        root = await session.prefill(PROMPT)
        with calls(*spied) as counts:
            return await session.probe([root] * len(texts), texts, GROUPS, exit_rule=rule), counts

    return engine.run(solve)


@torch.inference_mode()
def by_layer(model: PreTrainedModel, text: Sequence[int]) -> list[float]:
    """The oracle: log-odds after each layer, by the model's own norm and head on what transformers returns."""
    out = model(input_ids=torch.tensor([[*PROMPT, *text]]), output_hidden_states=True, use_cache=False)
    states = [*(model.model.norm(state[0, -1]) for state in out.hidden_states[1:-1]), out.hidden_states[-1][0, -1]]
    logits = [model.lm_head(state) for state in states]  # transformers norms the last state itself
    torch.testing.assert_close(logits[-1], out.logits[0, -1])
    return [(each[list(GROUPS[0])].logsumexp(0) - each[list(GROUPS[1])].logsumexp(0)).item() for each in logits]


@torch.inference_mode()
def outputs(model: PreTrainedModel, layers: Sequence[nn.Module], tokens: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Each layer's output for the last token, before any norm, and the logits after it."""
    raw: list[Tensor] = []

    def note(_module: object, _input: object, output: Any) -> None:
        raw.append((output[0] if isinstance(output, tuple) else output)[0, -1])

    handles = [layer.register_forward_hook(note) for layer in layers]
    logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
    for handle in handles:
        handle.remove()
    return raw, logits


def entropy(log_odds: float, zero: float = 0.0) -> float:
    p = 1 / (1 + math.exp(zero - log_odds))
    return -sum(q * math.log(q) for q in (p, 1 - p) if q > 0)


def settles(log_odds: Sequence[float], theta: float, epsilon: float, zero: float = 0.0) -> int | None:
    """The paper's rule from the middle layer on, written anew; the last layer is no exit."""
    depth = len(log_odds)
    values = {layer: entropy(value, zero) for layer, value in enumerate(log_odds, 1)}
    for layer in range(depth // 2, depth):
        if values[layer] < theta and abs(values[layer] - values[layer - 1]) < epsilon:
            return layer
    return None


def lens(layers: Sequence[int], bias: Sequence[float], width: int = WIDTH, error: float = 1.0) -> FittedLens:
    return FittedLens(
        layers=tuple(layers),
        weights=torch.zeros(len(layers), width),
        bias=torch.tensor(bias),
        error=(error,) * len(layers),
        scale=1.0,
        fitted_on=100,
    )


@contextmanager
def calls(*modules: nn.Module) -> Iterator[list[int]]:
    """How often each module runs."""
    counts = [0] * len(modules)
    with ExitStack() as stack:
        for at, module in enumerate(modules):

            def count(*_: object, at: int = at) -> None:
                counts[at] += 1

            stack.callback(module.register_forward_pre_hook(count).remove)
        yield counts


# --- the readout


@pytest.mark.parametrize("name", CONFIGS)
def test_the_readout_of_the_last_layer_is_the_models_own_logits(name: str) -> None:
    """With the final norm: without it the entropy of a layer says nothing."""
    model = tiny_model(name)
    runner = make_runner(model, Budget(10**9), EngineConfig(fast_linears=False))
    if name in PRIVATE:
        assert isinstance(runner, PrivateRunner)
        assert runner.readout is None
        return
    assert isinstance(runner, TreeRunner)
    readout = runner.readout
    assert readout is not None
    assert len(readout.layers) == runner.depth
    raw: list[Tensor] = []
    handle = readout.layers[-1].register_forward_hook(
        lambda _m, _i, out: raw.append((out[0] if isinstance(out, tuple) else out).detach())
    )
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -3:]
        handle.remove()
        targets = [3, 50, 94, 17]
        state = raw[0][0, -3:]
        found = readout.logits(readout.hidden(state), targets)
        unnormed = readout.logits(state, targets)
    torch.testing.assert_close(found, logits[:, targets], atol=1e-4, rtol=1e-4)
    assert (unnormed - logits[:, targets]).abs().max() > 1e-2
    runner.close()


@pytest.mark.parametrize("name", ["Llama", "SmolLM2 (Llama)", "GPT-2"])
def test_a_packed_head_is_read_all_the_same(name: str) -> None:
    """Packed layers have no plain weight to pick rows of."""
    model = tiny_model(name)
    runner = make_runner(model, Budget(10**9), EngineConfig(fast_linears=True))
    assert isinstance(runner, TreeRunner)
    assert runner.readout is not None
    with torch.inference_mode():
        state = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
        packed = runner.readout.logits(state, [4, 90])
        expected = model.get_output_embeddings()(state)[:, [4, 90]]
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
    runner.close()


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in PRIVATE])
def test_a_watch_sees_each_layers_last_tokens(name: str) -> None:
    """Of rows of different lengths, in the flat layout and in batches with recurrent states."""
    model = tiny_model(name)
    depth = model.config.get_text_config().num_hidden_layers
    with tiny_engine(model) as engine:
        readings = read(engine, TEXTS[:6], Record(tuple(range(1, depth + 1))))
        readout = engine.runner.readout
        assert isinstance(readout, Readout)
        engine.check_books()
    for reading, text in zip(readings, TEXTS, strict=False):
        raw, logits = outputs(model, readout.layers, [*PROMPT, *text])
        assert len(raw) == depth
        for layer, state in enumerate(raw, 1):
            with torch.inference_mode():
                expected = readout.hidden(state[None])[0]
            torch.testing.assert_close(reading.trace.states[layer], expected, atol=2e-4, rtol=1e-4)
        odds = logits[list(GROUPS[0])].logsumexp(0) - logits[list(GROUPS[1])].logsumexp(0)
        assert reading.trace.log_odds[depth] == pytest.approx(odds.item(), abs=1e-3)
        assert reading.values[0] - reading.values[1] == pytest.approx(odds.item(), abs=1e-4)
        assert reading.exit_layer is None
        assert reading.layers == depth


@pytest.mark.parametrize(("name", "passes"), [("Llama", 1), ("LFM2 (hybrid)", 4)])
def test_rows_of_different_lengths_share_a_pass_where_the_model_allows(name: str, passes: int) -> None:
    """Recurrent states need rows of one length."""
    with tiny_engine(tiny_model(name)) as engine:
        layers = engine.runner.readout.layers  # type: ignore[union-attr]
        _, counts = read_and_count(engine, TEXTS[:8], Record((1,)), layers[:1])
    assert counts == [passes]


# --- the paper's rule


THRESHOLDS = [(0.3, 0.05, 0.0), (0.45, 0.1, 0.0), (0.6, 0.3, 0.0), (0.69, 0.02, 0.0), (0.4, 0.1, 1.5), (0.5, 0.2, -2.0)]


@pytest.mark.parametrize(("theta", "epsilon", "zero"), THRESHOLDS)
def test_a_row_settles_where_the_papers_rule_says(
    deep: PreTrainedModel, theta: float, epsilon: float, zero: float
) -> None:
    """Alone, and at its own layer also in a pass that goes on for others."""
    oracle = [by_layer(deep, text) for text in TEXTS]
    expected = [settles(odds, theta, epsilon, zero) for odds in oracle]
    rule = RawExit(LAYERS, theta, epsilon).about(zero)
    with tiny_engine(deep) as engine:
        together = read(engine, TEXTS, rule)
        alone = [read(engine, [text], rule)[0] for text in TEXTS]
        engine.check_books()
    assert [reading.exit_layer for reading in together] == expected
    assert [reading.exit_layer for reading in alone] == expected
    for odds, at, one, beside in zip(oracle, expected, alone, together, strict=True):
        assert one.layers == (at or LAYERS)
        assert beside.layers == (LAYERS if None in expected else max(filter(None, expected)))
        value = odds[at - 1] if at else odds[-1]
        assert one.values[0] - one.values[1] == pytest.approx(value, abs=1e-3)
        assert beside.values[0] - beside.values[1] == pytest.approx(value, abs=1e-3)
        looked = range(LAYERS // 2 - 1, LAYERS)
        assert {layer: v for layer, v in beside.trace.log_odds.items() if layer in looked} == pytest.approx(
            {layer: odds[layer - 1] for layer in looked if layer <= beside.layers}, abs=1e-3
        )


def test_the_rows_of_that_test_settle_at_different_layers(deep: PreTrainedModel) -> None:
    found = {
        (theta, settles(by_layer(deep, text), theta, epsilon, zero))
        for (theta, epsilon, zero), text in itertools.product(THRESHOLDS, TEXTS)
    }
    assert {at for _, at in found} >= {None, 4, 5, 6}


def test_the_last_layer_is_read_as_ever(deep: PreTrainedModel) -> None:
    """A rule that never fires changes no number."""
    with tiny_engine(deep) as engine:
        plain = read(engine, TEXTS, None)
    with tiny_engine(deep) as engine:
        watched = read(engine, TEXTS, RawExit(LAYERS, theta=1e-9, epsilon=1e-9))
    assert [reading.values for reading in watched] == [reading.values for reading in plain]
    assert all(reading.exit_layer is None and reading.layers == LAYERS for reading in watched)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_shallow_models_are_computed_whole_where_there_is_no_layer_to_compare(layers: int) -> None:
    model = tiny_model("Llama", num_hidden_layers=layers)
    with tiny_engine(model) as engine:
        readings = read(engine, TEXTS[:4], RawExit(layers, theta=1.0, epsilon=10.0))
    at = 2 if layers == 3 else None  # the first layer that has one before it
    assert [reading.exit_layer for reading in readings] == [at] * 4


def test_the_entropy_is_that_of_the_choice() -> None:
    for value in (-60.0, -39.0, -3.0, 0.0, 0.5, 7.0, 45.0):
        assert binary_entropy(value) == pytest.approx(entropy(max(-700.0, value)), abs=1e-12)
    assert binary_entropy(0.0) == pytest.approx(math.log(2))


# --- the fitted rule, and what it saves


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Gemma 4", "LFM2 (hybrid)"])
def test_a_pass_that_ends_early_runs_no_later_layer(name: str) -> None:
    model = tiny_model(name)
    depth = model.config.get_text_config().num_hidden_layers
    rule = FittedExit(lens([2], [1000.0]), margin=3.0)
    with tiny_engine(model) as engine:
        layers = engine.runner.readout.layers  # type: ignore[union-attr]
        (reading,), counts = read_and_count(engine, [TEXTS[0]], rule, layers)
        engine.check_books()
    assert counts == [1, 1, *[0] * (depth - 2)]
    assert reading.values == pytest.approx((1000.0, 0.0))
    assert (reading.exit_layer, reading.layers) == (2, 2)
    assert not reading.trace.states


def test_a_wide_margin_never_exits() -> None:
    model = tiny_model("Llama")
    rule = FittedExit(lens([1, 2], [50.0, -50.0]), margin=1e6)
    with tiny_engine(model) as engine:
        readings, counts = read_and_count(engine, TEXTS, rule, [model.model.layers[-1]])
    with tiny_engine(model) as engine:
        plain = read(engine, TEXTS, None)
    assert counts == [1]
    assert [reading.values for reading in readings] == [reading.values for reading in plain]
    assert all(reading.trace.log_odds == {1: 50.0, 2: -50.0} for reading in readings)
    assert all(reading.exit_layer is None for reading in readings)


def test_each_row_exits_where_its_own_prediction_is_sure(deep: PreTrainedModel) -> None:
    """The predictions read the normed state, layer by layer; the layer and the value do not hang on the neighbours."""
    generator = torch.Generator().manual_seed(3)
    made = FittedLens(
        layers=(2, 4, 6),
        weights=torch.randn(3, WIDTH, generator=generator) * 0.3,
        bias=torch.tensor([0.2, -0.1, 0.3]),
        error=(1.0, 0.9, 0.8),
        scale=1.0,
        fitted_on=100,
    )
    zero, margin = 0.4, 2.0
    expected: list[tuple[int | None, float]] = []
    for text in TEXTS:
        with torch.inference_mode():
            out = deep(input_ids=torch.tensor([[*PROMPT, *text]]), output_hidden_states=True, use_cache=False)
            predicted = [
                (layer, float(deep.model.norm(out.hidden_states[layer][0, -1]) @ made.weights[i] + made.bias[i]))
                for i, layer in enumerate(made.layers)
            ]
        sure = (
            pair for pair, error in zip(predicted, made.error, strict=True) if abs(pair[1] - zero) >= margin * error
        )
        expected.append(next(sure, (None, by_layer(deep, text)[-1])))
    assert {at for at, _ in expected} >= {None, 2, 4}
    rule = FittedExit(made, margin).about(zero)
    with tiny_engine(deep) as engine:
        together = read(engine, TEXTS, rule)
        alone = [read(engine, [text], rule)[0] for text in TEXTS]
    for (at, value), one, beside in zip(expected, alone, together, strict=True):
        assert one.exit_layer == beside.exit_layer == at
        assert (one.layers, beside.layers) == (at or LAYERS, LAYERS)
        assert one.values[0] - one.values[1] == pytest.approx(value, abs=1e-3)
        assert beside.values[0] - beside.values[1] == pytest.approx(value, abs=1e-3)


def test_a_lens_of_another_model_is_refused_and_leaves_nothing() -> None:
    model = tiny_model("Llama")
    with tiny_engine(model) as engine:
        for wrong, error, words in (
            (lens([1], [0.0], width=WIDTH + 1), ConfigError, "calibrate with the model in use"),
            (lens([4], [0.0]), UnsupportedModelError, "layers 1 to 3"),
        ):
            with pytest.raises(error, match=words):
                read(engine, TEXTS[:3], FittedExit(wrong, 2.0))
            engine.check_books()
            assert hooks(model) == 0
        assert read(engine, TEXTS[:3], None)  # and the engine goes on


def test_a_model_without_a_readout_says_that_it_cannot_exit() -> None:
    model = tiny_model("Llama")
    with tiny_engine(model) as engine:
        engine.runner.readout = None  # type: ignore[misc]
        with pytest.raises(UnsupportedModelError, match="exit='strict'"):
            read(engine, TEXTS[:2], RawExit(3))
        engine.check_books()


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_models_with_a_cache_per_branch_refuse_to_exit(name: str) -> None:
    model = tiny_model(name)
    depth = model.config.get_text_config().num_hidden_layers
    with tiny_engine(model) as engine:
        assert all(reading.layers == depth for reading in read(engine, TEXTS[:3], None))
        with pytest.raises(UnsupportedModelError, match="exit='strict'"):
            read(engine, TEXTS[:3], RawExit(depth, theta=1.0, epsilon=10.0))
        engine.check_books()


@pytest.mark.parametrize("margin", [0.0, -1.0, float("nan")])
def test_a_margin_is_above_0(margin: float) -> None:
    with pytest.raises(ConfigError, match="margin"):
        FittedExit(lens([1], [0.0]), margin)


def test_equal_rules_are_equal() -> None:
    """Rows with equal rules share a pass."""
    assert FittedExit(lens([1], [0.5]), 2.0) == FittedExit(lens([1], [0.5]), 2.0)
    assert hash(FittedExit(lens([1], [0.5]), 2.0)) == hash(FittedExit(lens([1], [0.5]), 2.0))
    assert FittedExit(lens([1], [0.5]), 2.0) != FittedExit(lens([1], [0.6]), 2.0)
    assert FittedExit(lens([1], [0.5]), 2.0) != FittedExit(lens([1], [0.5]), 2.0).about(0.1)
    assert RawExit(4).about(0.5) == RawExit(4, zero=0.5) != RawExit(4)


# --- hooks


class BrokenWatchError(Exception):
    """What a broken watch raises."""


class BrokenRule:
    """Its watch raises at the second layer."""

    def about(self, zero: float) -> BrokenRule:
        return self

    def watch(self, rows: int, groups: tuple[tuple[int, ...], ...]) -> Any:
        class Watch:
            layers = (1, 2)
            traces = ()

            def look(self, layer: int, glimpse: Glimpse) -> bool:
                if layer == 2:
                    raise BrokenWatchError
                return False

        return Watch()


@pytest.mark.parametrize("name", ["Llama", "LFM2 (hybrid)"])
def test_a_hundred_watched_passes_leave_no_hook(name: str) -> None:
    model = tiny_model(name)
    with tiny_engine(model) as engine:
        assert hooks(model) == 0  # finding the readout has left none either
        for at in range(100):
            rule = (FittedExit(lens([1 + at % 2], [100.0]), 2.0), RawExit(3, 0.5, 1.0), Record((1, 3)))[at % 3]
            read(engine, [TEXTS[at % len(TEXTS)]], rule)
            assert hooks(model) == 0
        engine.check_books()
    assert hooks(model) == 0


@pytest.mark.parametrize("name", ["Llama", "LFM2 (hybrid)"])
def test_failures_in_the_watch_and_in_the_model_leave_no_hook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name)
    with tiny_engine(model) as engine:
        before = read(engine, TEXTS[:3], None)
        with pytest.raises(EngineError) as failure:
            read(engine, TEXTS[:3], BrokenRule())
        assert isinstance(failure.value.__cause__, BrokenWatchError)
        assert hooks(model) == 0
        engine.check_books()

        layers = engine.runner.readout.layers  # type: ignore[union-attr]

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(layers[1], "forward", broken)
            with pytest.raises(EngineError, match="out of memory"):
                read(engine, TEXTS[:3], Record((1, 2, 3)))
        assert hooks(model) == 0
        engine.check_books()
        after = read(engine, TEXTS[:3], None)
    for one, other in zip(after, before, strict=True):
        assert one.values == pytest.approx(other.values, abs=1e-4)
