"""The systems with environments of their own, against stand-ins that speak their protocols."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_units import NOWHERE, QUESTIONS, tiny_loaded, tiny_unit, tiny_weights

from rksc_agents.bench.branches import bench_branches, lines
from rksc_agents.bench.peers.child import Child, Process, environment, program
from rksc_agents.bench.peers.llama_cpp import LlamaCpp
from rksc_agents.bench.peers.system import MissingSystemError
from rksc_agents.bench.peers.vllm import VLLM
from rksc_agents.bench.peers.vllm_script import score_of
from rksc_agents.bench.peers.weights import Places, Weights
from rksc_agents.bench.unit import Unit
from rksc_agents.errors import EngineError


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Weights]:
    with tiny_weights(lent=False) as made:
        made.place = str(tmp_path)
        yield made


@pytest.fixture
def unit(weights: Weights) -> Unit:
    return tiny_unit(weights, prefix=64, branches=3, tokens=4)


def executable(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def python(path: Path, code: str) -> str:
    """A program that runs `code` in this Python."""
    return executable(path, f"#!{sys.executable}\n{code}")


# -- a child ------------------------------------------------------------------------------------

ECHO = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("die"):
        sys.exit("out of luck")
    if message.get("babble"):
        print("loading weights", flush=True)
        continue
    print(json.dumps(message), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Child]:
    child = Child([python(tmp_path / "echo", ECHO)], "echo", environment())
    yield child
    child.close()
    child.close()


def test_a_child_answers_each_message(echo: Child) -> None:
    assert [echo.ask({"number": number, "text": "ä\n"}) for number in range(3)] == [
        {"number": number, "text": "ä\n"} for number in range(3)
    ]
    assert not echo.ended


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"die": True}, "echo ended with code 1: out of luck"),
        ({"babble": True}, "echo answered 'loading weights\\\\n', which is no JSON object"),
        ({"error": "no memory"}, "echo failed: no memory"),
    ],
)
def test_a_child_that_fails_is_told(echo: Child, message: dict[str, Any], error: str) -> None:
    with pytest.raises(EngineError, match=error):
        echo.ask(message)


def test_a_child_that_ended_stays_ended(echo: Child) -> None:
    for _ in range(2):
        with pytest.raises(EngineError, match="ended with code 1"):
            echo.ask({"die": True})


def test_closing_ends_the_program(tmp_path: Path) -> None:
    child = Child([python(tmp_path / "echo", ECHO)], "echo", environment())
    child.close()
    assert child.ended
    quiet = Process([python(tmp_path / "sleep", "import time; time.sleep(60)")], "sleeper", environment())
    assert (quiet.ended, quiet.said()) == (False, "it wrote nothing")
    quiet.close()
    assert quiet.ended


def test_a_program_is_looked_for(tmp_path: Path) -> None:
    there = python(tmp_path / "it", "")
    assert program(there, "it", "RKSC_IT") == there
    for path, message in ((None, "set RKSC_IT to its path"), (str(tmp_path / "no"), "RKSC_IT = .* is no program")):
        with pytest.raises(MissingSystemError, match=message):
            program(path, "it", "RKSC_IT")
    with pytest.raises(MissingSystemError, match="cannot be started"):
        Process([str(tmp_path / "no")], "it", {})


def test_a_child_gets_no_path_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/here")
    monkeypatch.setenv("RKSC_SET", "by the user")
    made = environment(RKSC_SET="by us", RKSC_UNSET="by us")
    assert "PYTHONPATH" not in made
    assert (made["RKSC_SET"], made["RKSC_UNSET"]) == ("by the user", "by us")


# -- vLLM ---------------------------------------------------------------------------------------

FAKE_VLLM = """
import json, os, types
__version__ = "0.0-fake"
NOTES = {notes!r}

def note(**what):
    with open(NOTES, "a") as file:
        file.write(json.dumps(what) + "\\n")

class SamplingParams:
    def __init__(self, **given):
        self.__dict__.update(n=1, logprobs=None)
        self.__dict__.update(given)

class LLM:
    def __init__(self, **given):
        print("a banner on standard output", flush=True)
        note(made=given, cores=os.environ["VLLM_CPU_OMP_THREADS_BIND"])
        self.queries = self.hits = 0

    def reset_prefix_cache(self):
        note(reset=True)
        self.known = set()

    def get_metrics(self):
        metric = lambda name, value: types.SimpleNamespace(name=name, value=value)
        return [types.SimpleNamespace(name="vllm:a_vector"), metric("vllm:prefix_cache_queries", self.queries),
                metric("vllm:prefix_cache_hits", self.hits)]

    def generate(self, prompts, params, use_tqdm):
        note(prompts=[p["prompt_token_ids"] for p in prompts], params=vars(params))
        out = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            self.queries += len(ids) * params.n
            common = max((next((i for i, (a, b) in enumerate(zip(ids, k)) if a != b), min(len(ids), len(k)))
                          for k in self.known), default=0)
            self.hits += common + len(ids) * (params.n - 1)
            outputs = []
            for index in range(params.n):
                tokens = [index + 5] * params.max_tokens
                top = {{{yes}: types.SimpleNamespace(logprob=-1.0), {no}: types.SimpleNamespace(logprob=-2.0)}}
                outputs.append(types.SimpleNamespace(index=index, token_ids=tokens,
                                                     logprobs=[top] if params.logprobs else None))
                self.known.add(tuple(ids) + tuple(tokens[:-1]))
            out.append(types.SimpleNamespace(outputs=outputs[::-1]))
        return out
"""


def fake_vllm(tmp_path: Path, unit: Unit, code: str | None = None) -> tuple[str, Path]:
    """A Python that has a stand-in for vLLM, and the file of what it was asked."""
    notes, folder = tmp_path / "notes.jsonl", tmp_path / "site"
    folder.mkdir()
    text = FAKE_VLLM.format(notes=str(notes), yes=unit.verdicts[0][0], no=unit.verdicts[1][0]) if code is None else code
    (folder / "vllm.py").write_text(text, encoding="utf-8")
    return executable(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n'), notes


def noted(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_vllm_is_asked_for_branches_and_then_for_verdicts(tmp_path: Path, weights: Weights, unit: Unit) -> None:
    found, notes = fake_vllm(tmp_path, unit)
    weights.places = replace(NOWHERE, vllm_python=found)
    system = VLLM()
    system.open(weights, unit)
    try:
        took = [system.run(unit, seed) for seed in (1, 2)]
    finally:
        system.close()
        system.close()
    v = len(unit.verification)
    assert system.note == "version 0.0-fake"
    # the prompt once, each branch but its last token, and that one with the question about it
    assert [each.tokens_computed for each in took] == [64 + 3 * 3 + 3 * (1 + v)] * 2
    assert (took[0].kv_bytes, took[0].passes) == (None, None)
    assert took[0].scores == pytest.approx([1 / (1 + math.exp(-1.0))] * 3)
    assert took[0].seconds >= (took[0].verify_s or 0.0) > 0.0
    made, *runs = noted(notes)
    assert len(made["cores"].split(",")) == torch.get_num_threads()
    assert made["made"].items() >= {
        "model": str(tmp_path), "dtype": "float32", "max_model_len": unit.length + 1, "max_num_seqs": 3,
        "enable_prefix_caching": True,
    }.items()  # fmt: skip
    assert [list(each) for each in runs] == [["reset"], ["prompts", "params"], ["prompts", "params"]] * 2
    drawn, asked = runs[1:3]
    assert drawn["prompts"] == [list(unit.prompt)]
    assert drawn["params"].items() >= {"n": 3, "max_tokens": 4, "temperature": 0.7, "ignore_eos": True}.items()
    assert asked["prompts"] == [[*unit.prompt, *[5 + at] * 4, *unit.verification] for at in range(3)]
    assert asked["params"].items() >= {"n": 1, "max_tokens": 1, "temperature": 0.0, "logprobs": 20}.items()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('libfoo is missing')", "vLLM failed: ImportError: libfoo is missing"),
        ("import os; os._exit(3)", "vLLM ended with code 3"),
    ],
)
def test_vllm_that_does_not_start_is_missing(
    tmp_path: Path, weights: Weights, unit: Unit, code: str, message: str
) -> None:
    weights.places = replace(NOWHERE, vllm_python=fake_vllm(tmp_path, unit, code)[0])
    with pytest.raises(MissingSystemError, match=message):
        VLLM().open(weights, unit)


def test_vllm_fetches_no_model(tmp_path: Path, weights: Weights, unit: Unit) -> None:
    weights.places = replace(NOWHERE, vllm_python=fake_vllm(tmp_path, unit)[0])
    weights.place = "owner/name"
    with pytest.raises(MissingSystemError, match=r"name a local folder with --model"):
        VLLM().open(weights, unit)


def test_a_run_that_fails_in_vllm_raises(tmp_path: Path, weights: Weights, unit: Unit) -> None:
    code = "__version__ = '1'\nclass LLM:\n def __init__(self, **_): pass\nSamplingParams = LLM\n"
    weights.places = replace(NOWHERE, vllm_python=fake_vllm(tmp_path, unit, code)[0])
    system = VLLM()
    system.open(weights, unit)
    with pytest.raises(EngineError, match="vLLM failed: AttributeError"):
        system.run(unit, 1)
    system.close()


def test_what_stands_beside_its_result_is_the_version(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    loaded.model.config._name_or_path = str(tmp_path)
    with tiny_weights(loaded) as weights:
        found, _ = fake_vllm(tmp_path, tiny_unit(weights))
    result = bench_branches(
        loaded, QUESTIONS, systems=["vllm"], prefix=64, branches=2, tokens=3, runs=1,
        places=replace(NOWHERE, vllm_python=found),
    )  # fmt: skip
    (row,) = result["systems"]
    assert (row["missing"], row["note"], row["kv_bytes"]) == (None, "version 0.0-fake", None)
    assert list(lines(result))[-1].endswith("| version 0.0-fake |")


@pytest.mark.parametrize(
    ("logprobs", "score"),
    [
        ({1: math.log(0.6), 2: math.log(0.2)}, 0.75),
        ({1: math.log(0.3), 3: math.log(0.3), 2: math.log(0.2)}, 0.75),
        ({1: math.log(0.6), 9: math.log(0.2)}, 0.75),  # NO is not among the likeliest: it counts as the last of them
        ({9: math.log(0.2)}, 0.5),
        ({1: math.log(0.5), 9: -math.inf}, 1.0),
    ],
)
def test_a_score_of_the_likeliest_tokens(logprobs: dict[int, float], score: float) -> None:
    assert score_of(logprobs, [[1, 3], [2]]) == pytest.approx(score)


# -- llama.cpp ----------------------------------------------------------------------------------

FAKE_SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NOTES = {notes!r}
asked = 0

def note(**what):
    with open(NOTES, "a") as file:
        file.write(json.dumps(what) + "\\n")

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, code, value):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        global asked
        asked += 1
        self.answer(503 if asked < 2 else 200, {{"status": "ok"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note(path=self.path, body=body)
        if self.path.startswith("/slots"):
            return self.answer(200, {{"n_erased": 0}})
        if "n_cmpl" in body:
            rows = [{{"id_slot": at, "tokens": [at + 5] * body["n_predict"],
                     "timings": {{"prompt_n": len(body["prompt"]), "predicted_n": body["n_predict"]}}}}
                    for at in range(body["n_cmpl"] - {short})]
            return self.answer(200, rows)
        top = [{{"id": {yes}, "logprob": -1.0}}, {{"id": {no}, "logprob": -2.0}}]
        self.answer(200, {{"completion_probabilities": [{{"top_logprobs": top}}],
                          "timings": {{"prompt_n": 50, "predicted_n": 1}}}})

note(arguments=sys.argv[1:])
host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port"))
ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""


def fake_server(tmp_path: Path, unit: Unit, short: int = 0) -> tuple[Places, Path]:
    """Places with a stand-in for llama-server, and the file of what it was asked."""
    notes, model = tmp_path / "notes.jsonl", tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    code = FAKE_SERVER.format(notes=str(notes), yes=unit.verdicts[0][0], no=unit.verdicts[1][0], short=short)
    return Places(llama_cpp=python(tmp_path / "llama-server", code), llama_cpp_model=str(model)), notes


@pytest.mark.enable_socket
def test_llama_cpp_is_asked_for_completions_and_then_for_verdicts(tmp_path: Path, weights: Weights, unit: Unit) -> None:
    weights.places, notes = fake_server(tmp_path, unit)
    system = LlamaCpp()
    system.open(weights, unit)
    try:
        took = system.run(unit, 7)
    finally:
        system.close()
        system.close()
    assert system.note == "tiny.gguf"
    assert took.tokens_computed == 64 + 3 * 3 + 3 * 50
    assert took.scores == pytest.approx([1 / (1 + math.exp(-1.0))] * 3)
    assert (took.kv_bytes, took.passes) == (None, None)
    started, *posts = noted(notes)
    arguments = started["arguments"]
    assert {"-np", "--kv-unified", "--cache-ram"} <= set(arguments)
    assert int(arguments[arguments.index("-np") + 1]) == 3
    assert int(arguments[arguments.index("-c") + 1]) >= 64 + 3 * (4 + len(unit.verification))
    assert [post["path"] for post in posts] == [
        *(f"/slots/{slot}?action=erase" for slot in range(3)), *["/completion"] * 4,
    ]  # fmt: skip
    drawn, *asked = (post["body"] for post in posts[3:])
    assert drawn.items() >= {"n_cmpl": 3, "n_predict": 4, "ignore_eos": True, "temperature": 0.7, "seed": 7}.items()
    assert drawn["prompt"] == list(unit.prompt)
    by_slot = {body["id_slot"]: body["prompt"] for body in asked}
    assert by_slot == {at: [*unit.prompt, *[at + 5] * 4, *unit.verification] for at in range(3)}


@pytest.mark.enable_socket
def test_a_server_that_cannot_do_several_completions_is_told(tmp_path: Path, weights: Weights, unit: Unit) -> None:
    weights.places, _ = fake_server(tmp_path, unit, short=1)
    system = LlamaCpp()
    system.open(weights, unit)
    with pytest.raises(EngineError, match="llama-server gave 2 completions of 3"):
        system.run(unit, 1)
    system.close()


@pytest.mark.enable_socket
def test_llama_cpp_that_does_not_start_is_missing(tmp_path: Path, weights: Weights, unit: Unit) -> None:
    places, _ = fake_server(tmp_path, unit)
    weights.places = replace(places, llama_cpp=python(tmp_path / "bad", "import sys; sys.exit('unknown argument -np')"))
    with pytest.raises(MissingSystemError, match="llama-server ended: unknown argument -np"):
        LlamaCpp().open(weights, unit)


def test_llama_cpp_needs_a_gguf_file(tmp_path: Path, weights: Weights, unit: Unit) -> None:
    places, _ = fake_server(tmp_path, unit)
    for model in (None, str(tmp_path / "no.gguf")):
        weights.places = replace(places, llama_cpp_model=model)
        with pytest.raises(MissingSystemError, match="RKSC_LLAMA_CPP_MODEL"):
            LlamaCpp().open(weights, unit)


def test_places_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSC_VLLM_PYTHON", "/v")
    monkeypatch.setenv("RKSC_LLAMA_CPP", "/l")
    monkeypatch.delenv("RKSC_LLAMA_CPP_MODEL", raising=False)
    assert Places.from_environment() == Places("/v", "/l", None)


def test_the_gguf_file_is_by_default_the_one_that_the_model_is_loaded_from(tmp_path: Path) -> None:
    for name in ("mine.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    mine = str(tmp_path / "mine.gguf")
    assert Places().with_gguf_of(mine).llama_cpp_model == mine
    assert Places(llama_cpp_model="told").with_gguf_of(mine).llama_cpp_model == "told"
    assert Places().with_gguf_of("owner/name") == Places()
