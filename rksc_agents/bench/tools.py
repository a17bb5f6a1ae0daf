"""Tool calls: whether they are valid, and how often they are right, by one branch and by a vote."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rksc_agents.errors import ConfigError
from rksc_agents.model.tools import tools_of
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.reasoning import Direct, SelfConsistency, Strategy
from rksc_agents.request import Options
from rksc_agents.result import ReasoningResult
from rksc_agents.types import ToolCall

ABSENT = ""
"""Among the accepted values of an argument: it may be left out."""

_TOGETHER = 10  # requests that run at once
_MARKS = re.compile(r"[\s,./\-_*^'\"]")


@dataclass(frozen=True, slots=True)
class Task:
    """A request that one call answers.

    Attributes
    ----------
    question : str
        The user's request.
    tools : list of mapping
        What may be called.
    name : str
        The tool that is right.
    accept : mapping
        For each argument its accepted values; "" among them where it may be left out. An accepted object holds such
        a list for each of its fields.
    """

    question: str
    tools: list[Mapping[str, Any]]
    name: str
    accept: Mapping[str, Any]


def read_tasks(path: Path, limit: int | None = None) -> list[Task]:
    """Read tasks: one JSON object per line with "question", "tools", "answer" (with the "name") and "accept".

    Raises
    ------
    ConfigError
        If a line is no such object.
    """
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[:limit], 1):
        try:
            row = json.loads(line)
            tasks.append(Task(str(row["question"]), list(row["tools"]), str(row["answer"]["name"]), row["accept"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"line {number} of {path}: {error!r}; give a JSON object with question, tools, answer and accept"
            ) from error
        tools_of(tasks[-1].tools)
    return tasks


def bench_tools(
    model: str,
    tasks: Sequence[Task],
    *,
    branches: int = 5,
    temperature: float = 0.7,
    tokens: int = 160,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Have each task answered by a forced call, once by one greedy branch and once by a vote of branches.

    Parameters
    ----------
    model : str
        As for :meth:`~rksc_agents.reasoner.RKSCReasoner.from_pretrained`.
    tasks : sequence of Task
        What is asked.
    branches : int, default 5
        Branches that vote.
    temperature : float, default 0.7
        Theirs; the single branch is greedy.
    tokens : int, default 160
        Tokens of a branch at most.
    progress : callable or None
        Called with the number of answers so far and in all.

    Returns
    -------
    dict
        model, tasks; rows, each with strategy, branches, temperature, valid, right (counts), agreement (mean share of
        the branches that gave the winning call).
    """
    ways: list[tuple[Strategy, float]] = [
        (Direct(), 0.0),
        (SelfConsistency(branches=branches, vote="majority", stop=None), temperature),
    ]
    rows = []
    with RKSCReasoner.from_pretrained(model) as reasoner:
        for turn, (strategy, heat) in enumerate(ways):
            told = None if progress is None else partial(_tell, progress, turn * len(tasks), len(ways) * len(tasks))
            options = Options(strategy=strategy, temperature=heat, max_tokens=tokens, tool_choice="any")
            results = asyncio.run(_answers(reasoner, tasks, options, told))
            rows.append(_row(strategy, heat, tasks, results))
        return {"model": reasoner.name, "tasks": len(tasks), "rows": rows}


def _tell(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


async def _answers(
    reasoner: RKSCReasoner, tasks: Sequence[Task], options: Options, told: Callable[[int], None] | None
) -> list[ReasoningResult]:
    room, done = asyncio.Semaphore(_TOGETHER), count(1)

    async def answer(task: Task) -> ReasoningResult:
        async with room:
            asked: Options = {**options, "tools": task.tools, "parallel_tool_calls": False}
            result = await reasoner.areason(task.question, **asked)
        if told is not None:
            told(next(done))
        return result

    return await asyncio.gather(*map(answer, tasks))


def _row(strategy: Strategy, heat: float, tasks: Sequence[Task], results: Sequence[ReasoningResult]) -> dict[str, Any]:
    pairs = list(zip(tasks, results, strict=True))
    return {
        "strategy": strategy.name,
        "branches": len(results[0].branches),
        "temperature": heat,
        "valid": sum(valid(task, result.tool_calls) for task, result in pairs),
        "right": sum(right(task, result.tool_calls) for task, result in pairs),
        "agreement": sum(map(_agreement, results)) / len(results),
    }


def _agreement(result: ReasoningResult) -> float:
    return len(result.votes[0].branches) / len(result.branches) if result.votes else 1.0


def valid(task: Task, calls: Sequence[ToolCall]) -> bool:
    """Whether there is one call, of a tool that was offered, and its arguments fit that tool's schema."""
    from jsonschema import Draft202012Validator

    schemas = {tool.name: tool.parameters for tool in tools_of(task.tools)}
    if len(calls) != 1 or calls[0].name not in schemas:
        return False
    return bool(Draft202012Validator(schemas[calls[0].name]).is_valid(calls[0].arguments))


def right(task: Task, calls: Sequence[ToolCall]) -> bool:
    """Whether there is one call, of the right tool, with accepted arguments and no others."""
    return len(calls) == 1 and calls[0].name == task.name and _accepted(calls[0].arguments, task.accept)


def _accepted(given: Mapping[str, Any], accept: Mapping[str, Any]) -> bool:
    if not given.keys() <= accept.keys():
        return False
    return all(
        any(_same(given[name], value) for value in values) if name in given else ABSENT in values
        for name, values in accept.items()
    )


def _same(given: Any, value: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(given, Mapping) and _accepted(given, value)
    if isinstance(value, list):
        return isinstance(given, list) and len(given) == len(value) and all(map(_same, given, value))
    if isinstance(value, str) and isinstance(given, str):  # as the benchmark does: case, spaces and marks do not count
        return _MARKS.sub("", given).casefold() == _MARKS.sub("", value).casefold()
    return type(given) is type(value) and given == value if isinstance(value, bool) else bool(given == value)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the result as a Markdown table."""
    yield f"{found['model']}, {found['tasks']} tasks, one forced call each"
    yield ""
    yield "| strategy | branches | temperature | valid | right | agreement |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for row in found["rows"]:
        yield (
            f"| {row['strategy']} | {row['branches']} | {row['temperature']} | {row['valid']} | {row['right']} | "
            f"{row['agreement']:.2f} |"
        )
