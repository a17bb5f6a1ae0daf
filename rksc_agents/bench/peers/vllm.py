"""vLLM, in an environment of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import torch

from rksc_agents.bench.peers import vllm_script
from rksc_agents.bench.peers.child import Child, environment, program
from rksc_agents.bench.peers.system import MissingSystemError, System, Took
from rksc_agents.bench.peers.weights import Weights
from rksc_agents.bench.unit import Unit
from rksc_agents.errors import EngineError


class VLLM(System):
    """Samples with ``n=B`` and prefix caching, then sends a request with log-probabilities for each verdict.

    The script beside this file runs in the Python that `RKSC_VLLM_PYTHON` names, which needs vLLM and nothing of this
    package. On a CPU it is given as many cores as torch has threads here; by itself it leaves one out. What goes
    through the model is told by its counters of cached tokens; calls and bytes of KV are not known. It draws from its
    own generator: with a seed for each request it would draw row by row, which takes longer.
    """

    name: ClassVar[str] = "vllm"

    _child: Child | None = None

    def open(self, weights: Weights, unit: Unit) -> None:
        python = program(weights.places.vllm_python, "the Python that has vLLM", "RKSC_VLLM_PYTHON")
        if not Path(weights.place).is_dir():
            raise MissingSystemError(
                f"vLLM would have to fetch {weights.place!r} by itself: name a local folder with --model"
            )
        env = environment(
            VLLM_CPU_OMP_THREADS_BIND=_cores(torch.get_num_threads()),
            VLLM_CPU_NUM_OF_RESERVED_CPU="0",
            VLLM_LOGGING_LEVEL="ERROR",
        )
        self._child = Child([python, str(vllm_script.__file__)], "vLLM", env)
        message = {
            "model": weights.place,
            "dtype": str(weights.model.dtype).removeprefix("torch."),
            "length": unit.length + 1,
            "rows": unit.branches,
        }
        try:
            answer = self._child.ask({"do": "open", **message})
        except EngineError as error:
            self.close()
            raise MissingSystemError(str(error)) from error
        self.note = f"version {answer['version']}"

    def run(self, unit: Unit, seed: int) -> Took:
        assert self._child is not None
        answer = self._child.ask(
            {
                "do": "run",
                "prompt": list(unit.prompt),
                "branches": unit.branches,
                "tokens": unit.tokens,
                "temperature": unit.sampling.temperature,
                "verification": list(unit.verification),
                "verdicts": [list(group) for group in unit.verdicts],
            }
        )
        return Took(
            seconds=answer["seconds"],
            scores=tuple(answer["scores"]),
            tokens_computed=answer["tokens_computed"],
            verify_s=answer["verify_s"],
        )

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def _cores(threads: int) -> str:
    """The first cores that this process may use, as vLLM takes them; where that is not known, its own choice."""
    if not hasattr(os, "sched_getaffinity"):
        return "auto"
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
