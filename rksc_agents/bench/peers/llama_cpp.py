"""llama.cpp's server, over HTTP on this machine."""

from __future__ import annotations

import http.client
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch

from rksc_agents.bench.peers.child import Process, environment, program
from rksc_agents.bench.peers.system import MissingSystemError, System, Took
from rksc_agents.bench.peers.vllm_script import score_of
from rksc_agents.bench.peers.weights import Weights
from rksc_agents.bench.unit import Unit
from rksc_agents.errors import EngineError

_HOST = "127.0.0.1"
_TOP = 50  # log-probabilities that are asked for
_LOADING_S = 600.0
_TIMEOUT_S = 3600.0


class LlamaCpp(System):
    """Samples B completions of one prompt in a unified KV cache, then sends a request for each verdict to its slot.

    `RKSC_LLAMA_CPP` names llama-server, `RKSC_LLAMA_CPP_MODEL` a GGUF file of the same weights, by default the one that
    the model was loaded from. It computes with the file's own quantized weights, which are fewer bytes to read. Its
    slots are erased before each run. Calls and bytes of KV are not known.
    """

    name: ClassVar[str] = "llama.cpp"

    _server: Process | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _port: int = 0

    def open(self, weights: Weights, unit: Unit) -> None:
        server = program(weights.places.llama_cpp, "llama-server", "RKSC_LLAMA_CPP")
        model = weights.places.llama_cpp_model
        if not model or not Path(model).expanduser().is_file():
            raise MissingSystemError(
                f"llama.cpp needs the weights as a GGUF file: RKSC_LLAMA_CPP_MODEL = {model!r} is none"
            )
        self._port = _free_port()
        self._folder = tempfile.TemporaryDirectory()  # slots can be erased only where they could be saved
        command = [server, "-m", str(Path(model).expanduser()), "--host", _HOST, "--port", str(self._port)]
        command += ["-np", str(unit.branches), "--kv-unified", "-c", str(_room(unit))]
        command += ["-t", str(torch.get_num_threads()), "--cache-ram", "0", "--slot-save-path", self._folder.name]
        self._server = Process(command, "llama-server", environment())
        try:
            self._await()
        except EngineError as error:
            self.close()
            raise MissingSystemError(str(error)) from error
        self.note = os.path.basename(model)

    def _await(self) -> None:
        """Wait until the model is loaded."""
        assert self._server is not None
        until = time.monotonic() + _LOADING_S
        while time.monotonic() < until:
            if self._server.ended:
                raise EngineError(f"llama-server ended: {self._server.said()}")
            try:
                self._call("GET", "/health", None)
                return
            except (OSError, EngineError):  # it does not listen yet, or says that it is loading
                time.sleep(0.2)
        raise EngineError(f"llama-server was not ready after {_LOADING_S:.0f} seconds: {self._server.said()}")

    def run(self, unit: Unit, seed: int) -> Took:
        for slot in range(unit.branches):
            self._call("POST", f"/slots/{slot}?action=erase", {})
        with ThreadPoolExecutor(unit.branches) as pool:
            began = time.perf_counter()
            done = self._completions(
                {
                    "prompt": list(unit.prompt),
                    "n_cmpl": unit.branches,
                    "n_predict": unit.tokens,
                    "ignore_eos": True,
                    "return_tokens": True,
                    "samplers": ["temperature"],
                    "temperature": unit.sampling.temperature,
                    "seed": seed,
                    "cache_prompt": True,
                }
            )
            written = time.perf_counter()
            judged = list(pool.map(lambda branch: self._judged(unit, branch), done))
            ended = time.perf_counter()
        if len(done) != unit.branches:
            raise EngineError(
                f"llama-server gave {len(done)} completions of {unit.branches}: a newer build can do that"
            )
        return Took(
            seconds=ended - began,
            scores=tuple(score_of(_logprobs(answer), unit.verdicts) for answer in judged),
            tokens_computed=_computed(done, judged),
            verify_s=ended - written,
        )

    def _judged(self, unit: Unit, branch: Mapping[str, Any]) -> dict[str, Any]:
        (answer,) = self._completions(
            {
                "prompt": [*unit.prompt, *branch["tokens"], *unit.verification],
                "n_predict": 1,
                "n_probs": _TOP,
                "samplers": [],
                "temperature": 0.0,
                "id_slot": branch["id_slot"],
                "cache_prompt": True,
            }
        )
        return answer

    def _completions(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        answer = self._call("POST", "/completion", request)
        return answer if isinstance(answer, list) else [answer]

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=_TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        finally:
            connection.close()
        if response.status != 200:
            raise EngineError(f"llama-server answered {path} with {response.status}: {text[:200]}")
        return json.loads(text)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _room(unit: Unit) -> int:
    """Tokens of context: some builds count the shared prompt for each branch, though they hold it once."""
    return unit.branches * (unit.length + 1) + 256


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _logprobs(answer: Mapping[str, Any]) -> dict[int, float]:
    top = answer["completion_probabilities"][0]["top_logprobs"]
    return {entry["id"]: entry["logprob"] for entry in top}


def _computed(done: Sequence[Mapping[str, Any]], judged: Sequence[Mapping[str, Any]]) -> int | None:
    """Tokens computed: the shared prompt once, each branch but its last token, and what the verdicts took."""
    try:
        shared = max(branch["timings"]["prompt_n"] for branch in done)  # each completion repeats it
        drawn = sum(branch["timings"]["predicted_n"] - 1 for branch in done)
        return int(shared + drawn + sum(answer["timings"]["prompt_n"] for answer in judged))
    except KeyError:
        return None
