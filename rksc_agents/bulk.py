"""Answering a file of questions: resumable, and the same file whatever happened on the way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rksc_agents.errors import EngineClosedError, RKSCError
from rksc_agents.journal import Journal
from rksc_agents.questions import Question, conversation_of, read_questions
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.result import ReasoningResult
from rksc_agents.types import Record

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


class Bulk(Record):
    """What came of a file.

    Attributes
    ----------
    answered, failed : int
        Questions with an answer, and with an error instead.
    resumed : int
        How many of them an earlier run had done.
    """

    answered: int
    failed: int
    resumed: int


def answer_file(
    reasoner: RKSCReasoner,
    questions: str | Path,
    out: str | Path,
    *,
    seed: int = 0,
    in_flight: int = 1,
    system: str | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Bulk:
    """Answer each question of a file, and write a line of JSON for each.

    A line has `line` (its question's number, from 1), `question`, and either `error` or `answer`, `text`, `strategy`,
    `rule`, `winner`, `branches` (how many), `votes` (each with answer, weight, branches), `agreement`, `confidence`,
    `score`, `finish_reason`, `completion_tokens_winner`: only what is the same in every run. A question that fails does
    not stop the others.

    A killed run goes on when it is called again with the same arguments. With one question in flight the file is then
    the same, byte for byte, as that of a run that nobody disturbed, on the same machine with the same number of threads
    and ``EngineConfig(fast_linears=True)``: each question has a seed of its own and is computed alone.

    Parameters
    ----------
    reasoner : RKSCReasoner
        Answers.
    questions : str or Path
        JSONL, see :func:`rksc_agents.questions.read_questions`; `prompts` of a line are other phrasings.
    out : str or Path
        The file to write; while the run goes on its lines are in `out` + ".partial".
    seed : int, default 0
        What the questions' seeds are made of.
    in_flight : int, default 1
        Questions that are answered at once: more of them are quicker, and a sampled token may then depend on what
        else was computed in the same step.
    system : str or None
        A system message before each question.
    fresh : bool, default False
        Replace what is there instead of going on with it.
    progress : callable or None
        Called after each question.
    **options
        As for :meth:`~rksc_agents.reasoner.RKSCReasoner.reason`, but for `seed` and `phrasings`.

    Raises
    ------
    ConfigError
        If the questions cannot be read, or `out` is there already, was begun with other arguments, or cannot be
        written.
    """
    asked = read_questions(questions)
    identity = _identity(reasoner, asked, seed=seed, alone=in_flight == 1, system=system, options=options)
    with Journal(Path(out), identity, fresh=fresh) as journal:
        resumed = len(journal.done)
        todo = [line for line in range(1, len(asked) + 1) if line not in journal.done]

        def ask(line: int) -> dict[str, Any]:
            question = asked[line - 1]
            if in_flight == 1:  # what an earlier question left in the cache would change the last bits
                reasoner.clear_cache()
            phrasings = [conversation_of(text, system) for text in question.prompts]
            try:
                result = reasoner.reason(
                    conversation_of(question.text, system),
                    **{**options, "seed": _seed(seed, line), **({"phrasings": phrasings} if phrasings else {})},
                )
            except EngineClosedError:
                raise
            except RKSCError as error:
                return {"question": question.text, "error": f"{type(error).__name__}: {error}"}
            return {"question": question.text, **_record(result)}

        if progress is not None:
            progress("questions", resumed, len(asked))
        for line, record in _in_turn(ask, todo, in_flight):
            journal.add(line, record)
            if progress is not None:
                progress("questions", len(journal.done), len(asked))
        failed = sum("error" in json.loads(text) for text in journal.done.values())
        journal.finish()
    return Bulk(answered=len(asked) - failed, failed=failed, resumed=resumed)


def _in_turn(
    ask: Callable[[int], dict[str, Any]], lines: list[int], in_flight: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Ask about each line, `in_flight` of them at once; yield what came of them in their order."""
    if in_flight == 1:
        yield from ((line, ask(line)) for line in lines)
        return
    with ThreadPoolExecutor(in_flight) as pool:
        waiting: list[tuple[int, Future[dict[str, Any]]]] = [(line, pool.submit(ask, line)) for line in lines]
        try:
            for line, future in waiting:
                yield line, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _record(result: ReasoningResult) -> dict[str, Any]:
    winner = result.branches[result.winner]
    return {
        "answer": result.answer,
        "text": result.text,
        "strategy": result.strategy,
        "rule": result.rule,
        "winner": result.winner,
        "branches": len(result.branches),
        "votes": [vote.model_dump(mode="json") for vote in result.votes],
        "agreement": result.agreement,
        "confidence": winner.confidence,
        "score": None if winner.verdict is None else winner.verdict.score,
        "finish_reason": winner.finish_reason,
        "completion_tokens_winner": result.usage.completion_tokens_winner,
    }


def _seed(seed: int, line: int) -> int:
    """A seed of a question's own, of 63 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{line}".encode()).digest()[:8], "big") >> 1


def _identity(reasoner: RKSCReasoner, asked: list[Question], **settings: Any) -> str:
    """A name for everything that the answers depend on."""
    own = {"strategy": reasoner.strategy, "sampling": reasoner.sampling, "exit": reasoner.exit}
    what = {"model": reasoner.model_hash, "questions": [[q.text, q.prompts] for q in asked], **own, **settings}
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=_plain).encode()).hexdigest()[:24]


def _plain(value: object) -> Any:
    return [type(value).__name__, value.model_dump(mode="json")] if isinstance(value, BaseModel) else repr(value)
