"""Runs the unit in vLLM: JSON lines on standard input, one answer each on standard output.

It runs in an environment that has vLLM and not this package, so it imports nothing of it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, TextIO

TOP = 20  # log-probabilities that vLLM gives at most unless it is set up for more
MEMORY = 0.5  # share of a GPU's memory: the systems that this is compared with are loaded too


class Runner:
    """One engine."""

    def __init__(self, *, model: str, dtype: str, length: int, rows: int) -> None:
        vllm = import_module("vllm")  # by name: type checkers of this package do not have it
        self.vllm = vllm
        self.version = str(vllm.__version__)
        self.engine = vllm.LLM(
            model=model,
            dtype=dtype,
            max_model_len=length,
            max_num_seqs=rows,
            enable_prefix_caching=True,
            gpu_memory_utilization=MEMORY,
            disable_log_stats=False,  # its counters tell what was computed
            generation_config="vllm",  # draw as told, not as the model's files recommend
        )

    def run(
        self,
        *,
        prompt: Sequence[int],
        branches: int,
        tokens: int,
        temperature: float,
        verification: Sequence[int],
        verdicts: Sequence[Sequence[int]],
    ) -> dict[str, Any]:
        """Sample the branches, then read a verdict on each."""
        params = self.vllm.SamplingParams
        drawn = params(n=branches, temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = params(temperature=0.0, max_tokens=1, logprobs=TOP, detokenize=False)
        self.engine.reset_prefix_cache()
        before = self._computed()
        began = time.perf_counter()
        (done,) = self.engine.generate([{"prompt_token_ids": list(prompt)}], drawn, use_tqdm=False)
        written = time.perf_counter()
        wholes = [
            {"prompt_token_ids": [*prompt, *branch.token_ids, *verification]}
            for branch in sorted(done.outputs, key=lambda output: output.index)
        ]
        judged = self.engine.generate(wholes, asked, use_tqdm=False)
        scores = [score_of(_logprobs(output), verdicts) for output in judged]
        ended = time.perf_counter()
        after = self._computed()
        return {
            "seconds": ended - began,
            "verify_s": ended - written,
            "scores": scores,
            # a sampled token is computed when the next one is drawn, so the last one of each request never is
            "tokens_computed": after - before + branches * (tokens - 1)
            if before is not None and after is not None
            else None,
        }

    def _computed(self) -> int | None:
        """Prompt tokens computed so far: those that were looked for in the cache and were not there."""
        found = {metric.name: metric.value for metric in self.engine.get_metrics() if hasattr(metric, "value")}
        names = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")
        if not all(name in found for name in names):
            return None
        return int(found[names[0]] - found[names[1]])


def _logprobs(output: Any) -> dict[int, float]:
    return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


def score_of(logprobs: Mapping[int, float], verdicts: Sequence[Sequence[int]]) -> float:
    """P(YES) / (P(YES) + P(NO)) as far as the likeliest tokens tell; a word that is not among them counts as the last.

    Parameters
    ----------
    logprobs : mapping of int to float
        Log-probabilities of the likeliest tokens.
    verdicts : sequence of sequence of int
        The tokens of YES, and those of NO.
    """
    least = min(logprobs.values())
    yes, no = (
        math.log(sum(math.exp(logprobs[token]) for token in group if token in logprobs) or max(math.exp(least), 1e-300))
        for group in verdicts
    )
    return 1.0 / (1.0 + math.exp(no - yes))


def serve(lines: TextIO, out: TextIO) -> None:
    """Answer each line."""
    runner: Runner | None = None
    for line in lines:
        message = json.loads(line)
        do = message.pop("do")
        try:
            if do == "open":
                runner = Runner(**message)
                answer = {"version": runner.version}
            elif runner is None:
                raise RuntimeError("not opened yet")
            else:
                answer = runner.run(**message)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    # Python looks beside a script first, and there is a file with vLLM's name
    beside = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != beside]
    # what libraries print must not come between the answers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
