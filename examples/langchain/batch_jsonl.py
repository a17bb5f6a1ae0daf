"""A file of questions as one batch, with progress.

    python examples/langchain/batch_jsonl.py tests/data/gsm8k_small.jsonl --limit 8 --out answers.jsonl

All questions that run at once, with all their branches, are rows of one batch. The answers come as they are ready and
are written in the order of the questions, first to another name: a run that is broken off leaves no half file. Look at
the agreement: where branches differ, the answer is not to be trusted. A question that fails leaves its error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from rich.progress import track

from langchain_rksc import ChatRKSC
from rksc_agents.questions import read_questions

DATA = Path(__file__).parents[2] / "tests" / "data" / "gsm8k_small.jsonl"


async def answers(chat: ChatRKSC, questions: Sequence[str], at_once: int) -> list[dict[str, Any]]:
    """The questions with their answers, in order."""
    found: dict[int, dict[str, Any]] = {}
    config: RunnableConfig = {"max_concurrency": at_once}
    coming = chat.abatch_as_completed(list(questions), config, return_exceptions=True)
    for _ in track(range(len(questions)), description="questions"):
        index, message = await anext(coming)
        found[index] = {"question": questions[index], **told(message)}
    return [found[index] for index in range(len(questions))]


def told(message: AIMessage | Exception) -> dict[str, Any]:
    """What is written of an answer."""
    if isinstance(message, Exception):
        return {"error": f"{type(message).__name__}: {message}"}
    record = message.response_metadata["rksc"]
    answer = record["votes"][0]["answer"] if record["votes"] else message.text.strip()
    return {"answer": answer, "agreement": record["agreement"]}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSONL, whole or not at all."""
    draft = path.with_name(f"{path.name}.part")
    draft.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    draft.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Answer a file of questions.")
    parser.add_argument("data", type=Path, nargs="?", default=DATA, help="one JSON object with a question per line")
    parser.add_argument("--out", type=Path, default=Path("answers.jsonl"))
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--branches", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=16)
    options = parser.parse_args(argv)
    questions = [question.text for question in read_questions(options.data, limit=options.limit)]
    strategy = {"name": "self-consistency", "branches": options.branches}
    settings = {"strategy": strategy, "temperature": 0.5, "max_tokens": options.max_tokens}
    with closing(ChatRKSC(model=options.model, **settings)) as chat:
        rows = asyncio.run(answers(chat, questions, options.at_once))
    write(options.out, rows)
    print(f"{sum('error' not in row for row in rows)} answers to {len(rows)} questions in {options.out}")


if __name__ == "__main__":
    main()
