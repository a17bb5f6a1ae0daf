"""`bench_branches`: exact counts of every system, the order of the runs, what is told of systems that are missing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_units import ENGINE, NOWHERE, QUESTIONS, TOKEN_BYTES, tiny_loaded, tiny_unit, tiny_weights

from rksc_agents.bench import branches as measuring
from rksc_agents.bench.branches import bench_branches, lines
from rksc_agents.bench.peers import SYSTEMS, systems_of
from rksc_agents.bench.peers.generate import Generate, Kind
from rksc_agents.bench.peers.no_kv import NoKV
from rksc_agents.bench.peers.rksc import Rksc
from rksc_agents.bench.peers.rksc_adaptive import RkscAdaptive
from rksc_agents.bench.peers.rksc_cgee import RkscCgee
from rksc_agents.bench.peers.rksc_int8 import RkscInt8
from rksc_agents.bench.peers.system import MissingSystemError, System, Took
from rksc_agents.bench.peers.weights import Weights
from rksc_agents.bench.rounds import quartiles
from rksc_agents.errors import ConfigError, EngineClosedError
from rksc_agents.model.int8 import int8_available

P, B, T = 64, 3, 4


def ran(system: System, weights: Weights, **sizes: int) -> tuple[Took, int]:
    """What one run took, and how many tokens ask about a branch."""
    unit = tiny_unit(weights, **{"prefix": P, "branches": B, "tokens": T, **sizes})
    system.open(weights, unit)
    try:
        return system.run(unit, 1), len(unit.verification)
    finally:
        system.close()


# -- counts -------------------------------------------------------------------------------------


def test_the_baseline_computes_every_prompt_and_verifies_from_nothing() -> None:
    with tiny_weights(lent=False) as weights:
        took, v = ran(NoKV(), weights)
    assert took.tokens_computed == B * P + B * (T - 1) + B * (P + T + v)
    assert took.passes == T + 1
    assert took.kv_bytes == B * (P + T - 1) * TOKEN_BYTES


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_transformers_computes_the_prompt_once(kind: Kind) -> None:
    with tiny_weights(lent=False) as weights:
        took, v = ran(Generate(kind), weights)
    assert took.tokens_computed == P - 1 + B * T + B * (v + 1)
    assert took.passes == T + 2
    assert took.kv_bytes == B * (P + T + v) * TOKEN_BYTES


def test_ours_shares_the_prompt_and_verifies_on_the_branches_kv() -> None:
    with tiny_weights(plain=False) as weights:
        took, v = ran(Rksc(), weights)
    assert took.tokens_computed == P + B * (T - 1) + B * (v + 1)
    assert took.passes == 1 + (T - 1) + 1
    assert took.kv_bytes == (P + B * (T + v)) * TOKEN_BYTES


@pytest.mark.skipif(not int8_available(), reason="no exact 8-bit products on this CPU")
def test_ours_in_8_bits_does_the_same_work_on_a_copy() -> None:
    with tiny_weights() as weights:
        system = RkscInt8()
        took, v = ran(system, weights)
        assert took.tokens_computed == P + B * (T - 1) + B * (v + 1)
        assert took.kv_bytes == (P + B * (T + v)) * TOKEN_BYTES
        assert system.note.startswith("divergence 0.")
        assert weights.described()["copies"] == 3
        assert weights.reasoner.quantization is None
        with pytest.raises(EngineClosedError):
            system.reasoner.reason("?")


def test_what_cannot_run_in_8_bits_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rksc_agents.model.int8.int8_available", lambda: False)
    with tiny_weights(lent=False) as weights, pytest.raises(MissingSystemError, match="does not multiply"):
        RkscInt8().open(weights, tiny_unit(weights))


def test_ours_begins_every_run_from_nothing() -> None:
    with tiny_weights(plain=False) as weights:
        unit, system = tiny_unit(weights), Rksc()
        system.open(weights, unit)
        first, second = (system.run(unit, seed) for seed in (1, 2))
    counts = [(took.tokens_computed, took.passes, took.kv_bytes) for took in (first, second)]
    assert counts[0] == counts[1]


def test_a_long_prompt_takes_one_pass_for_each_chunk() -> None:
    engine = ENGINE.replace(prefill_chunk=70)
    with tiny_weights(plain=False, engine=engine) as weights:
        took, _ = ran(Rksc(), weights, prefix=160, branches=1)
    assert took.passes == 3 + (T - 1) + 1


def test_the_adaptive_system_computes_no_more_than_the_exact_one() -> None:
    with tiny_weights(plain=False) as weights:
        exact, _ = ran(Rksc(), weights)
        adaptive, _ = ran(RkscAdaptive(), weights)
    assert adaptive.tokens_computed is not None
    assert exact.tokens_computed is not None
    assert 0 < adaptive.tokens_computed <= exact.tokens_computed


def test_ours_asks_as_the_unit_says(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, tuple[Any, ...]] = {}
    with tiny_weights(plain=False, exit="paper") as weights:
        ask = weights.reasoner.batch
        for kind in (Rksc, RkscCgee, RkscAdaptive):

            def asked(questions: Any, kind: type[System] = kind, **options: Any) -> Any:
                told[kind.name] = tuple(options[name] for name in ("exit", "ignore_eos", "max_tokens", "seed"))
                return ask(questions, **options)

            monkeypatch.setattr(weights.reasoner, "batch", asked)
            ran(kind(), weights)
    assert told == {
        "rksc": ("off", True, T, 1), "rksc-cgee": ("paper", True, T, 1), "rksc-adaptive": ("paper", False, T, 1),
    }  # fmt: skip


# -- verdicts -----------------------------------------------------------------------------------


def test_all_systems_read_the_same_verdict_of_the_same_branch() -> None:
    with tiny_weights() as weights:
        unit = tiny_unit(weights, branches=2, tokens=3)
        # so cold that every system takes the likeliest token
        greedy = replace(unit, sampling=unit.sampling.replace(temperature=1e-4))
        scores = []
        for system in (NoKV(), Generate("dynamic"), Generate("static"), Rksc()):
            system.open(weights, greedy)
            scores.append(system.run(greedy, 1).scores)
            system.close()
    assert len({len(found) for found in scores}) == 1
    assert all(0 < value < 1 for found in scores for value in found)
    for found in scores:
        assert found == pytest.approx(scores[0], abs=1e-4)


def test_transformers_draws_from_its_seed_and_leaves_the_global_generator_alone() -> None:
    with tiny_weights(lent=False) as weights:
        unit, system = tiny_unit(weights, tokens=8), NoKV()
        system.open(weights, unit)
        before = torch.get_rng_state()
        first, again, other = (system.run(unit, seed).scores for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), before)
    assert first == again != other


def test_transformers_gets_back_its_model_as_it_was() -> None:
    with tiny_weights(lent=False) as weights:
        model = weights.plain
        model.set_attn_implementation("eager")
        generation = model.generation_config
        ran(NoKV(), weights)
        assert model.config._attn_implementation == "eager"
        assert model.generation_config is generation
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


def test_the_cache_of_transformers_is_chosen_by_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    for quick in ("dynamic", "static"):
        system = Generate()
        monkeypatch.setattr(
            Generate, "run", lambda self, unit, seed, quick=quick: Took(1.0 if self.kind == quick else 2.0, ())
        )
        with tiny_weights(lent=False) as weights:
            system.open(weights, tiny_unit(weights))
        assert (system.kind, system.note) == (quick, f"{quick} cache")


def test_windows_keep_the_dynamic_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generate, "run", lambda self, unit, seed: Took(1.0 if self.kind == "static" else 2.0, ()))
    with tiny_weights(tiny_loaded("Mistral, sliding window"), lent=False) as weights:
        system = Generate()
        system.open(weights, tiny_unit(weights))
        assert system.kind == "dynamic"


def test_weights_are_copied_only_where_both_kinds_run() -> None:
    loaded = tiny_loaded()
    for settings, copied in (({"lent": False}, False), ({"plain": False}, False), ({}, True)):
        with tiny_weights(loaded, **settings) as weights:
            assert weights.copied is copied
            assert weights.described()["copies"] == 1 + copied
            if copied:
                assert weights.plain is not loaded.model
            elif "lent" in settings:
                assert weights.plain is loaded.model
    with tiny_weights(plain=False) as weights, pytest.raises(ConfigError, match="plain=True"):
        _ = weights.plain
    with tiny_weights(lent=False) as weights, pytest.raises(ConfigError, match="lent=True"):
        _ = weights.reasoner


def test_a_unit_of_another_tokenizer_is_refused() -> None:
    with tiny_weights(plain=False) as weights:
        unit = tiny_unit(weights)
        with pytest.raises(ConfigError, match="another tokenizer"):
            Rksc().open(weights, replace(unit, prompt=unit.prompt[1:]))


# -- rows ---------------------------------------------------------------------------------------


def test_speedup_is_the_ratio_of_medians() -> None:
    base = [Took(seconds, (), tokens_computed=7) for seconds in (6.0, 2.0, 4.0)]
    took = [Took(seconds, (0.5, None)) for seconds in (1.0, 4.0, 2.0)]
    row = measuring._row("x", "a note", took, base)
    assert (row["median_s"], row["speedup_over_no_kv"], row["spread"]) == (2.0, 2.0, [1.5, 3.0])
    assert row["speedup_spread"] == quartiles([6.0, 0.5, 2.0])
    assert (row["tokens_computed"], row["verified"], row["note"]) == (None, 1, "a note")
    assert measuring._row("no-kv", "", base, base)["tokens_computed"] == 7
    alone = measuring._row("x", "", took, None)
    assert (alone["speedup_over_no_kv"], alone["speedup_spread"]) == (None, None)


# -- the whole ----------------------------------------------------------------------------------

MEASURED = {
    "median_s", "spread", "speedup_over_no_kv", "speedup_spread", "verified", "tokens_computed", "kv_bytes", "passes",
    "prefill_s", "decode_s", "verify_s",
}  # fmt: skip


def test_the_result_has_a_row_for_every_system_in_order() -> None:
    names = ["rksc", "vllm", "no-kv", "transformers", "llama.cpp", "rksc-cgee", "rksc-adaptive"]
    told: list[tuple[int, int]] = []
    found = bench_branches(
        tiny_loaded(), QUESTIONS, systems=names, prefix=P, branches=B, tokens=T, runs=2, places=NOWHERE,
        engine=ENGINE, progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == {"unit", "machine", "systems"}
    assert found["unit"] == {
        "prefix": P, "examples": 2, "branches": B, "tokens": T, "verification_tokens": 49, "temperature": 0.7,
        "runs": 2,
    }  # fmt: skip
    assert found["machine"]["model"] == "tiny"
    assert found["machine"]["copies"] == 2
    assert found["machine"]["parameters"] == tiny_loaded().model.num_parameters()
    rows = {row["system"]: row for row in found["systems"]}
    assert list(rows) == names
    assert told[-1] == (15, 15)
    for name, row in rows.items():
        assert row.keys() == {"system", "note", "missing", *MEASURED}
        if name in ("vllm", "llama.cpp"):
            assert {row[field] for field in MEASURED} == {None}
        else:
            assert row["missing"] is None
            assert row["median_s"] > 0
            assert row["spread"][0] <= row["median_s"] <= row["spread"][1]
    assert "RKSC_VLLM_PYTHON" in rows["vllm"]["missing"]
    assert "RKSC_LLAMA_CPP" in rows["llama.cpp"]["missing"]
    assert rows["no-kv"]["speedup_over_no_kv"] == 1.0
    assert rows["no-kv"]["tokens_computed"] == B * P + B * (T - 1) + B * (P + T + 49)
    text = list(lines(found))
    assert sum(line.startswith("| ") for line in text) == 2 + 5
    assert text[-2].startswith("vllm did not run: ")
    assert any(line.startswith("| no-kv ") and " 1.00x " in line for line in text)
    assert {rows[name]["verified"] for name in ("no-kv", "transformers", "rksc")} == {B}
    assert [rows[name]["note"] for name in ("rksc", "rksc-cgee")] == ["exit off", "exit strict"]


def test_without_the_baseline_there_is_no_speedup() -> None:
    found = bench_branches(
        tiny_loaded(), QUESTIONS, systems=["rksc"], prefix=P, branches=2, tokens=2, runs=1, places=NOWHERE,
        engine=ENGINE,
    )  # fmt: skip
    (row,) = found["systems"]
    assert row["speedup_over_no_kv"] is None
    assert found["machine"]["copies"] == 1
    assert "x |" not in list(lines(found))[-1]


def test_what_was_opened_is_closed_when_a_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_loaded()
    loaded.model.set_attn_implementation("eager")

    def fail(*_: object) -> Took:
        raise MemoryError("no room")

    monkeypatch.setattr(NoKV, "run", fail)
    with pytest.raises(MemoryError):
        bench_branches(loaded, QUESTIONS, systems=["no-kv"], prefix=P, branches=2, tokens=2, runs=1, places=NOWHERE)
    assert loaded.model.config._attn_implementation == "eager"


def test_every_name_is_a_system_of_that_name() -> None:
    assert [kind.name for kind in systems_of(list(SYSTEMS))] == list(SYSTEMS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"systems": ["rksc", "nope"]}, "system 'nope' is unknown: give some of no-kv, transformers, vllm"),
        ({"systems": ["rksc", "rksc"]}, "named twice"),
        ({"systems": []}, "no system is named"),
        ({"runs": 0}, "runs = 0"),
        ({"prefix": 5}, "prefix = 5"),
    ],
)
def test_wrong_arguments_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_branches(
            tiny_loaded(), QUESTIONS, **{"systems": ["rksc"], "places": NOWHERE, "engine": ENGINE, **settings}
        )
