"""Kills a run over a file at random moments, goes on with it, and says what came of it; run by test_bulk.py.

Usage: python kill_runs.py FOLDER KILLS
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from rksc_agents import SelfConsistency
from rksc_agents.bulk import answer_file
from rksc_agents.testing import scripted_reasoner


def answer(folder: Path, out: str) -> None:
    script = {f"How much is {i}?": [f"I think {i}.", f"The answer is {i}.", f"It is {i + 1}."] for i in range(40)}
    with scripted_reasoner(script, strategy=SelfConsistency(branches=4)) as reasoner:
        answer_file(reasoner, folder / "questions.jsonl", folder / out, seed=5)


def main(folder: Path, kills: int) -> None:
    answer(folder, "undisturbed.jsonl")
    moments = random.Random(0)
    killed = 0
    while killed < kills:
        child = os.fork()
        if child == 0:
            answer(folder, "killed.jsonl")
            os._exit(0)
        time.sleep(moments.uniform(0, 0.12))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        else:  # it was done before: begin again
            assert os.WEXITSTATUS(status) == 0
            assert (folder / "killed.jsonl").read_bytes() == (folder / "undisturbed.jsonl").read_bytes()
            (folder / "killed.jsonl").unlink()
    if not (folder / "killed.jsonl").exists() or (folder / "killed.jsonl.partial").exists():
        answer(folder, "killed.jsonl")
    print(f"killed {killed}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
