"""`rksc bench accuracy`: ways to answer side by side, on questions with known answers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rksc_agents.bench.accuracy_record import Answered, Record, key_of
from rksc_agents.bench.rounds import Progress
from rksc_agents.bench.table import table
from rksc_agents.bench.ways import WAYS, Way, ways_of
from rksc_agents.errors import ConfigError
from rksc_agents.questions import Question
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.reasoning import Strategy
from rksc_agents.reasoning.equivalence import equivalent
from rksc_agents.verify.certificate import stored_path
from rksc_agents.verify.intervals import clopper_pearson


def bench_accuracy(
    reasoner: RKSCReasoner,
    questions: Sequence[Question],
    *,
    ways: Sequence[str] = tuple(WAYS),
    branches: int = 8,
    tokens: int = 256,
    temperature: float = 0.7,
    exit: str = "strict",
    seed: int = 0,
    resume: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Answer every question in every way.

    Questions run one at a time, each in all ways in turn, and nothing of the KV cache is left from the way before.

    Parameters
    ----------
    reasoner : RKSCReasoner
        Answers.
    questions : sequence of Question
        Each with its answer.
    ways : sequence of str
        Names out of :data:`~rksc_agents.bench.ways.WAYS`; all by default.
    branches, tokens : int, default 8, 256
        Branches, and tokens of each at most.
    temperature : float, default 0.7
        Of all ways that draw.
    exit : str, default "strict"
        Early exit of the ways that have it: a preset, "auto", or the path of a certificate.
    seed : int, default 0
        Of the branches.
    resume : Path or None
        A file that keeps each answer; what it has is not answered again.
    progress : callable or None
        Called with the number of answers so far and in all.

    Returns
    -------
    dict
        model, questions, branches, tokens, temperature, exit, seed; rows, each with way, strategy, right, accuracy, low
        and high (95 % interval, Clopper and Pearson), generated_tokens and seconds (means per question), reference and
        agreement (share of equal answers; None without a reference), skip_rate (share of questions without
        verification), exits (share of verified branches that ended early; None where none was verified).

    Raises
    ------
    ConfigError
        If a name or setting is wrong, or a question has no answer.
    """
    chosen = ways_of(ways)
    if lacking := [number for number, question in enumerate(questions, 1) if question.answer is None]:
        raise ConfigError(f"question {lacking[0]} has no answer to compare with: give each one")
    if not questions:
        raise ConfigError("no questions: give at least one")
    strategies = {name: way.strategy(branches) for name, way in chosen.items()}
    told = {"branches": branches, "tokens": tokens, "temperature": temperature, "seed": seed}
    record = Record(resume)
    answers: dict[str, list[Answered]] = {name: [] for name in chosen}
    total = len(questions) * len(chosen)
    for at, question in enumerate(questions):
        for number, (name, way) in enumerate(chosen.items(), 1):
            exits = exit if way.early else "off"
            key = key_of(
                model=reasoner.model_hash,
                prompt=reasoner.prompt_hash(strategies[name]),
                way=name,
                question=question.text,
                answer=question.answer,
                exit=_identified(exits, reasoner, strategies[name]),
                sampling=reasoner.sampling.model_dump(mode="json"),
                **told,
            )
            if key not in record.known:
                options = {
                    "temperature": 0.0 if way.greedy else temperature,
                    "max_tokens": tokens,
                    "seed": seed,
                    "exit": exits,
                    "strategy": strategies[name],
                }
                record.add(key, _answered(reasoner, question, options))
            answers[name].append(record.known[key])
            if progress is not None:
                progress(at * len(chosen) + number, total)
    return {
        "model": reasoner.name,
        "questions": len(questions),
        "exit": exit,
        **told,
        "rows": [_row(name, way, strategies[name].name, answers) for name, way in chosen.items()],
    }


def _identified(exit: str, reasoner: RKSCReasoner, strategy: Strategy) -> str:
    """A preset's name, or what identifies the file of a certificate."""
    auto = exit == "auto"
    path = stored_path(reasoner.model_hash, reasoner.prompt_hash(strategy)) if auto else Path(exit)
    return f"{exit} {hashlib.sha256(path.read_bytes()).hexdigest()}" if path.is_file() else exit


def _answered(reasoner: RKSCReasoner, question: Question, options: Mapping[str, Any]) -> Answered:
    reasoner.clear_cache()
    began = time.perf_counter()
    result = reasoner.reason(question.text, **options)
    seconds = time.perf_counter() - began
    assert question.answer is not None
    return Answered(
        answer=result.answer,
        right=result.answer is not None and equivalent(result.answer, question.answer),
        tokens=result.usage.completion_tokens,
        seconds=seconds,
        verified=result.verification.verified,
        exited=result.verification.exited,
        skipped=result.verification.skipped > 0,
    )


def _row(name: str, way: Way, strategy: str, answers: Mapping[str, Sequence[Answered]]) -> dict[str, Any]:
    mine = answers[name]
    right = sum(each.right for each in mine)
    low, high = clopper_pearson(right, len(mine))
    verified = sum(each.verified for each in mine)
    others = answers.get(way.reference) if way.reference is not None else None
    return {
        "way": name,
        "strategy": strategy,
        "right": right,
        "accuracy": right / len(mine),
        "low": low,
        "high": high,
        "generated_tokens": fmean(each.tokens for each in mine),
        "seconds": fmean(each.seconds for each in mine),
        "reference": way.reference if others is not None else None,
        "agreement": None if others is None else fmean(map(_same, mine, others)),
        "skip_rate": fmean(each.skipped for each in mine),
        "exits": sum(each.exited for each in mine) / verified if verified else None,
    }


def _same(one: Answered, other: Answered) -> bool:
    if one.answer is None or other.answer is None:
        return one.answer == other.answer
    return equivalent(one.answer, other.answer)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the result as a Markdown table."""
    yield (
        f"{found['model']}, {found['questions']} questions, {found['branches']} branches of at most "
        f"{found['tokens']} tokens, temperature {found['temperature']}, exit {found['exit']}"
    )
    yield ""
    yield from table(
        ("way", ">right", ">accuracy", "95 % interval", ">tokens", ">seconds", "agreement", ">skipped", ">exits"),
        [_cells(row) for row in found["rows"]],
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["way"],
        str(row["right"]),
        f"{row['accuracy']:.1%}",
        f"{row['low']:.1%} to {row['high']:.1%}",
        f"{row['generated_tokens']:.0f}",
        f"{row['seconds']:.2f}",
        "" if row["agreement"] is None else f"{row['agreement']:.1%} with {row['reference']}",
        f"{row['skip_rate']:.1%}",
        "" if row["exits"] is None else f"{row['exits']:.1%}",
    )
