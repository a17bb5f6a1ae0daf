"""`bench_load`: processes that stand in for one that loads a model, and what the real one prints."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_units import tiny_loaded

from rksc_agents.bench import first_token
from rksc_agents.bench.load import PARTS, bench_load, lines
from rksc_agents.errors import ConfigError, EngineError

STAND_IN = """
import json, pathlib, sys
notes = pathlib.Path(sys.argv[1])
count = len(notes.read_text().splitlines()) if notes.exists() else 0
with notes.open("a") as file:
    file.write(sys.argv[2] + "\\n")
print("a warning " * 20000, file=sys.stderr)
print(json.dumps({"import_s": 100.0 * count, "load_s": 20.0, "token_s": 3.0}), flush=True)
"""


def test_the_median_is_of_all_processes_but_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.cycle([1000.0, 1500.0])  # each process takes 500 seconds
    monkeypatch.setattr("rksc_agents.bench.load.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    notes = tmp_path / "notes"
    told: list[tuple[int, int]] = []
    found = bench_load(
        "a model", runs=3, command=(sys.executable, "-c", STAND_IN, str(notes)),
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert notes.read_text().splitlines() == ["a model"] * 4
    assert told == [(done, 4) for done in range(1, 5)]
    assert (found["model"], found["runs"]) == ("a model", 3)
    assert {part: found[part] for part in PARTS} == {
        "python_s": 277.0, "import_s": 200.0, "load_s": 20.0, "token_s": 3.0,
    }  # fmt: skip
    assert (found["median_s"], found["spread"]) == (500.0, [500.0, 500.0])
    assert json.loads(json.dumps(found)) == found
    assert "| 200.00 s | 20.00 s |      3.00 s |" in list(lines(found))[-1]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('wait', file=sys.stderr); sys.exit('no such model')", "code 1: no such model"),
        ("pass", "code 0: it wrote nothing"),
    ],
)
def test_a_process_that_fails_is_told(code: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        bench_load(runs=1, command=(sys.executable, "-c", code))


def test_runs_are_at_least_one() -> None:
    with pytest.raises(ConfigError, match="runs = 0"):
        bench_load(runs=0)


def test_what_is_started_loads_the_model_and_tells_its_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = tiny_loaded()
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    first_token.main(str(tmp_path))
    (line,) = capsys.readouterr().out.splitlines()
    parts = json.loads(line)
    assert list(parts) == list(PARTS[1:])
    assert all(seconds > 0 for seconds in parts.values())
