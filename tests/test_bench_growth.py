"""`bench_growth`: every size is measured, and its counts are what sharing gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench_units import ENGINE, QUESTIONS, TOKEN_BYTES, tiny_loaded

from rksc_agents.bench.growth import bench_growth, lines
from rksc_agents.bench.growth_plot import plot
from rksc_agents.errors import ConfigError


def test_every_number_of_branches_is_measured_on_every_prompt() -> None:
    told: list[tuple[int, int]] = []
    found = bench_growth(
        tiny_loaded(), QUESTIONS, branches=(1, 3), prefix=(40, 64), tokens=4, runs=2, engine=ENGINE,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert json.loads(json.dumps(found)) == found
    v = found["unit"]["verification_tokens"]
    assert found["unit"] == {"tokens": 4, "verification_tokens": v, "temperature": 0.7, "runs": 2}
    assert found["machine"]["copies"] == 1
    assert [(row["prefix"], row["branches"]) for row in found["rows"]] == [(40, 1), (40, 3), (64, 1), (64, 3)]
    for row in found["rows"]:
        p, b = row["prefix"], row["branches"]
        assert row["in_flight"] == 1
        assert row["tokens_computed"] == p + b * 3 + b * (v + 1)
        assert row["kv_bytes"] == (p + b * (4 + v)) * TOKEN_BYTES
        assert row["kv_bytes_copied"] == b * (p + 4 + v) * TOKEN_BYTES
        assert 0 < row["prefill_s"] < row["median_s"]
        assert row["spread"][0] <= row["median_s"] <= row["spread"][1]
    assert told == [(done, 12) for done in range(1, 13)]
    text = list(lines(found))
    assert sum(line.startswith("| ") for line in text) == 2 + 4


def test_questions_in_flight_have_prompts_of_their_own() -> None:
    found = bench_growth(
        tiny_loaded(), QUESTIONS, branches=(2,), prefix=(64,), in_flight=(1, 3), tokens=4, runs=1, engine=ENGINE
    )
    alone, three = found["rows"]
    assert (alone["in_flight"], three["in_flight"]) == (1, 3)
    # prompts begin alike ("What is "), and what one of them has is there for the next
    assert 3 * alone["tokens_computed"] - 64 < three["tokens_computed"] <= 3 * alone["tokens_computed"]
    assert three["kv_bytes_copied"] == 3 * alone["kv_bytes_copied"]
    assert alone["kv_bytes"] < three["kv_bytes"] <= 3 * alone["kv_bytes"]
    assert (three["prefill_s"], three["decode_s"], three["verify_s"]) == (None, None, None)


def test_the_picture_has_lines_for_every_prompt(tmp_path: Path) -> None:
    row = {"branches": 1, "median_s": 1.0, "kv_bytes": 9, "kv_bytes_copied": 9}
    sizes = [(256, 1), (1024, 1), (1024, 4)]
    rows = [{**row, "prefix": prefix, "in_flight": in_flight} for prefix, in_flight in sizes]
    plot({"machine": {"model": "a $model$"}, "rows": rows}, tmp_path / "growth.svg")
    root = ElementTree.parse(tmp_path / "growth.svg").getroot()
    named = {group.get("id") for group in root.iter("{http://www.w3.org/2000/svg}g")}
    assert {f"{part}-{prefix}-{at_once}" for part in ("time", "kv") for prefix, at_once in sizes} <= named


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runs": 0}, "runs = 0"),
        ({"branches": ()}, r"branches = \[\]"),
        ({"branches": (2, 0)}, r"branches = \[2, 0\]"),
        ({"prefix": ()}, r"prefix = \[\]"),
        ({"in_flight": (0,)}, r"in_flight = \[0\]"),
        ({"in_flight": (11,)}, "10 questions make 10 different prompts of 40 tokens, and 11 are asked for"),
    ],
)
def test_wrong_arguments_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_growth(tiny_loaded(), QUESTIONS, **{"engine": ENGINE, "prefix": (40,), **settings})
