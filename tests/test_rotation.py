"""Keys moved to other positions equal the keys that the model computes there."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import random_tokens
from tiny_models import COMMON, tiny_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from rksc_agents.cache.budget import Budget
from rksc_agents.cache.store import Layout
from rksc_agents.errors import ConfigError, UnsupportedModelError
from rksc_agents.model.rotation import Rotary, Rotation
from rksc_agents.model.runner import TreeRunner

TOKENS = random_tokens(6, seed=5)  # fewer than the windows, so that no layer's cache forgets any
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
PARTIAL = {  # architectures that turn only the first dimensions of each head, or neighbours
    "glm": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "stablelm": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "phi": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "cohere": {},
}
MODELS = [
    "Llama", "Falcon3 (Llama)", "Qwen2", "Qwen3", "Mistral", "Mistral, sliding window", "Gemma 2", "Gemma 3", "Phi-3",
    "OLMo 2", "SmolLM3", "Qwen3-MoE", "Ministral 3", "Gemma 4", "DeepSeek-V3 (MLA)", "gpt-oss (sinks)",
]  # fmt: skip


def other_model(kind: str, **special: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **{**COMMON, **special})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def layout_of(model: PreTrainedModel) -> Layout:
    runner = TreeRunner(model, Budget(10**9))
    runner.close()
    return runner.layout


@torch.inference_mode()
def keys_at(model: PreTrainedModel, start: int) -> dict[int, Tensor]:
    """Keys [heads, tokens, width] of a few tokens that begin at `start`: a rotary model sees distances only."""
    ids = torch.tensor([TOKENS])
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, position_ids=torch.arange(start, start + len(TOKENS))[None], cache=cache, use_cache=True)
    keys = {}
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is None:
            continue  # it reuses another layer's
        attention = model.model.layers[index].self_attn
        if hasattr(attention, "expand_kv"):  # the cache holds latents, the tree keys
            keys[index] = attention.expand_kv(layer.keys, layer.values)[0][0]
        else:
            keys[index] = layer.keys[0]
    return keys


def assert_moves(model: PreTrainedModel) -> Rotation:
    layout = layout_of(model)
    rotation = Rotation.measure(model, layout)
    here, there = keys_at(model, 3), keys_at(model, 90)
    assert set(layout.layers) == set(here) == set(rotation.layers)
    for layer in layout.layers:
        scale = here[layer].abs().max()
        for old, new, by in ((here, there, 87), (there, here, -87)):
            got = rotation.moved(layer, old[layer], torch.full((len(TOKENS),), by))
            assert (got - new[layer]).abs().max() < 1e-4 * scale
    return rotation


@pytest.mark.parametrize("name", MODELS)
def test_moved_keys_are_those_of_the_new_position(name: str) -> None:
    assert_moves(tiny_model(name))


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rotary_embeddings(kind: str) -> None:
    plain = assert_moves(tiny_model("Llama")).layers[0]
    scaled = assert_moves(tiny_model("Llama", rope_parameters={"rope_theta": 1e4, **SCALED[kind]})).layers[0]
    assert plain is not None
    assert scaled is not None
    assert torch.equal(plain.frequencies, scaled.frequencies) == (kind == "dynamic")  # which changes beyond its length


@pytest.mark.parametrize("kind", PARTIAL)
def test_partial_and_interleaved_embeddings(kind: str) -> None:
    rotation = assert_moves(other_model(kind, **PARTIAL[kind]))
    rotary = rotation.layers[0]
    assert rotary is not None
    assert (rotary.start, rotary.interleaved) == (0, kind in ("glm", "cohere"))
    assert rotary.frequencies.shape == (4 if kind == "cohere" else 2,)


def test_each_layer_has_its_own_frequencies() -> None:
    model = tiny_model("Gemma 3")
    rotation = Rotation.measure(model, layout_of(model))
    sliding, full, again = (rotation.layers[layer].frequencies for layer in range(3))  # type: ignore[union-attr]
    assert torch.equal(sliding, again)
    assert not torch.equal(sliding, full)


def test_layers_without_rotary_embedding() -> None:
    model = tiny_model("SmolLM3")
    rotation = Rotation.measure(model, layout_of(model))
    assert [rotary is None for rotary in rotation.layers.values()] == [False, False, True]
    keys = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    moved = rotation.moved(2, keys, torch.tensor([1, 2, 3]))
    assert torch.equal(moved, keys)
    assert moved.data_ptr() != keys.data_ptr()


def test_latent_attention_turns_the_last_dimensions() -> None:
    model = tiny_model("DeepSeek-V3 (MLA)")
    rotation = Rotation.measure(model, layout_of(model))
    assert all(rotary is not None and rotary.start == 8 for rotary in rotation.layers.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "DeepSeek-V3 (MLA)", "SmolLM3"])
def test_in_16_bits_the_same_rotation_is_found(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name)
    exact = Rotation.measure(model, layout_of(model))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(dtype)
    for module in model.modules():  # loading a model in 16 bits leaves its frequencies as they are
        for key in [key for key in module._buffers if key.endswith("inv_freq")]:
            module._buffers[key] = next(b for n, b in buffers.items() if n.endswith(key))
    rounded = Rotation.measure(model, layout_of(model))
    for layer, rotary in exact.layers.items():
        other = rounded.layers[layer]
        assert (rotary is None) == (other is None)
        if rotary is not None and other is not None:
            assert (rotary.start, rotary.interleaved) == (other.start, other.interleaved)
            assert torch.equal(rotary.frequencies, other.frequencies)


def test_a_rotation_of_a_small_part_of_the_key_is_found() -> None:
    """Not turning at all would be within the tolerance too; the best fit is taken."""
    model = tiny_model("DeepSeek-V3 (MLA)")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_a_proj_with_mqa.weight[-8:] *= 1e-5
    assert all(rotary is not None for rotary in assert_moves(model).layers.values())


def test_a_long_context() -> None:
    """The model's own angles are rounded there."""
    rope = {"rope_type": "default", "rope_theta": 123.0}
    assert_moves(tiny_model("Llama", max_position_embeddings=4_000_000, rope_parameters=rope))


def test_measured_up_to_the_end_of_the_context_and_not_beyond() -> None:
    """Dynamic scaling changes its frequencies there."""
    rope = {"rope_theta": 1e4, **SCALED["dynamic"]}
    model = tiny_model("Llama", max_position_embeddings=64, rope_parameters=rope)
    before = model.model.rotary_emb.inv_freq.clone()
    layout = layout_of(model)
    tried: list[int] = []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: tried.extend(kwargs["position_ids"].unique().tolist()), with_kwargs=True
    )
    rotary = Rotation.measure(model, layout).layers[0]
    assert tried == [0, 1, 7, 63]
    assert rotary is not None
    assert torch.equal(rotary.frequencies, before.double())
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_learned_positions_are_refused() -> None:
    model = tiny_model("GPT-2")
    with pytest.raises(
        UnsupportedModelError, match=r"layer 0 of GPT2LMHeadModel .* rotary embedding .* use mode exact"
    ):
        Rotation.measure(model, layout_of(model))


def test_a_rotation_by_unknown_frequencies_is_refused() -> None:
    """The layer that differs is named."""
    model = tiny_model("Llama")
    layout = layout_of(model)
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "position_embeddings": _other(kwargs)}),
        with_kwargs=True,
    )
    with pytest.raises(UnsupportedModelError, match="layer 1 of LlamaForCausalLM"):
        Rotation.measure(model, layout)


def _other(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    cos, sin = kwargs["position_embeddings"]
    return cos**2 - sin**2, 2 * sin * cos  # twice the angle


def test_values_that_depend_on_the_position_are_refused() -> None:
    model = tiny_model("Llama")
    layout = layout_of(model)
    seen: list[Tensor] = []
    model.model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True)
    model.model.layers[2].self_attn.v_proj.register_forward_hook(lambda _, args, out: out + seen[-1][..., None])
    with pytest.raises(UnsupportedModelError, match=r"layer 2 of .* its values depend on the position"):
        Rotation.measure(model, layout)


def test_keys_that_tell_nothing_are_refused() -> None:
    model = tiny_model("Llama")
    torch.nn.init.zeros_(model.model.layers[1].self_attn.k_proj.weight)
    with pytest.raises(UnsupportedModelError, match=r"layer 1 of .* its keys are all zero"):
        Rotation.measure(model, layout_of(model))


def test_keys_of_another_shape_than_the_stored_are_refused() -> None:
    model = tiny_model("Llama")
    layout = layout_of(model)
    wider = {**layout.layers, 2: replace(layout.layers[2], key_width=16)}
    for layers, layer in ((wider, 2), ({**layout.layers, 7: layout.layers[2]}, 7)):
        with pytest.raises(UnsupportedModelError, match=f"layer {layer} of .* as they are stored"):
            Rotation.measure(model, Layout(layers))


def test_the_model_is_left_as_found() -> None:
    from transformers import AttentionInterface

    model = tiny_model("Llama")
    layout = layout_of(model)
    before, registered = model.config._attn_implementation, set(AttentionInterface())
    Rotation.measure(model, layout)
    model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Rotation.measure(model, layout)
    assert model.config._attn_implementation == before
    assert set(AttentionInterface()) == registered


ROTATIONS = st.builds(
    lambda pairs, spare, last, interleaved: (
        Rotary(1e4 ** -(torch.arange(pairs, dtype=torch.float64) / pairs), spare * last, interleaved),
        2 * pairs + spare,
    ),
    st.integers(1, 8),
    st.sampled_from([0, 2, 6]),
    st.integers(0, 1),
    st.booleans(),
)


@given(ROTATIONS, st.lists(st.integers(-200_000, 200_000), min_size=1, max_size=9), st.integers(0, 99))
def test_there_and_back_is_the_identity(rotary: tuple[Rotary, int], by: list[int], seed: int) -> None:
    rotation = Rotation({4: rotary[0]})
    keys = torch.randn(2, len(by), rotary[1], generator=torch.Generator().manual_seed(seed))
    before = keys.clone()
    moved = rotation.moved(4, keys, torch.tensor(by))
    assert torch.equal(keys, before)
    assert torch.allclose(moved.norm(dim=-1), keys.norm(dim=-1), atol=1e-5)
    assert torch.allclose(rotation.moved(4, moved, -torch.tensor(by)), keys, atol=1e-5)
    twice = rotation.moved(4, moved, torch.tensor(by))
    assert torch.allclose(twice, rotation.moved(4, keys, 2 * torch.tensor(by)), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_known_angles(dtype: torch.dtype, interleaved: bool) -> None:
    """One pair that turns and one that does not; far moves keep their angle, and the dtype stays."""
    keys = torch.tensor([1.0, 1.0, 0.0, 0.0] if not interleaved else [1.0, 0.0, 1.0, 0.0], dtype=dtype)
    keys = keys.expand(1, 3, 4)
    rotation = Rotation({0: Rotary(torch.tensor([0.3, 0.0], dtype=torch.float64), 0, interleaved)})
    steps = [2, -5, 1_000_003]
    got = rotation.moved(0, keys, torch.tensor(steps, dtype=torch.int32))
    assert got.dtype == dtype
    expected = [
        [math.cos(0.3 * n), math.sin(0.3 * n), 1.0, 0.0]
        if interleaved
        else [math.cos(0.3 * n), 1.0, math.sin(0.3 * n), 0.0]
        for n in steps
    ]
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 2.0**-9}[dtype]
    assert (got[0].double() - torch.tensor(expected, dtype=torch.float64)).abs().max() < tolerance


@given(ROTATIONS, st.integers(0, 99))
def test_keys_in_16_bits_are_turned_in_32(rotary: tuple[Rotary, int], seed: int) -> None:
    keys = torch.randn(2, 5, rotary[1], generator=torch.Generator().manual_seed(seed)).bfloat16()
    rotation, by = Rotation({0: rotary[0]}), torch.tensor([3, 3, -1, 0, 70])
    assert torch.equal(rotation.moved(0, keys, by), rotation.moved(0, keys.float(), by).bfloat16())


def test_wrong_arguments_raise() -> None:
    rotation = Rotation({0: None, 3: None})
    keys = torch.zeros(2, 5, 8)
    with pytest.raises(ConfigError, match="layer = 1 stores no keys: give one of 0, 3"):
        rotation.moved(1, keys, torch.zeros(5, dtype=torch.long))
    for by in (torch.zeros(1, dtype=torch.long), torch.tensor(3), torch.zeros(5)):
        with pytest.raises(ConfigError, match="one whole number for each of the 5 tokens"):
            rotation.moved(0, keys, by)
