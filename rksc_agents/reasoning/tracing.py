"""From a run that has just ended to its trace."""

from __future__ import annotations

from rksc_agents.model.chat import conversation
from rksc_agents.reasoning.problem import Problem
from rksc_agents.result import ReasoningResult
from rksc_agents.trace import State, Trace, TraceNode
from rksc_agents.types import Prompt


def trace_of(problem: Problem, result: ReasoningResult, model: str) -> Trace:
    """The trace of the run that gave this result, while the request still holds its KV."""
    ledger = problem.session.ledger
    line = set(problem.line(result.winner))
    return Trace(
        question=_asked(problem.question),
        model=model,
        strategy=result.strategy,
        rule=result.rule,
        answer=result.answer,
        winner=result.winner,
        votes=result.votes,
        nodes=tuple(_node(problem, index, chosen=index in line) for index in range(len(result.branches))),
        prompt_tokens=len(problem.prompts[0]),
        depth=problem.session.depth,
        spans=tuple(ledger.spans),
        kv_samples=tuple(ledger.samples),
        kv_limit=problem.session.kv_limit,
        verification=result.verification,
        usage=result.usage,
        kv=result.kv,
        timings=result.timings,
    )


def _node(problem: Problem, index: int, *, chosen: bool) -> TraceNode:
    life, branch = problem.lives[index], problem.branch(index)
    return TraceNode(
        **dict(branch),
        index=index,
        state="chosen" if chosen else _state(problem, index),
        pieces=life.completion.pieces,
        confidences=life.completion.scores,
        kv_bytes=problem.session.token_bytes * max(0, len(branch.tokens) - 1),  # the last token's is never computed
        start_s=life.start_s,
        end_s=life.end_s,
    )


def _state(problem: Problem, index: int) -> State:
    if problem.branch(index).finish_reason in ("cancelled", "unsure"):
        return "stopped"
    if index in problem.pruned:
        return "pruned"
    cursor = problem.cursors.get(index)  # none where a search went on from the branch
    return "evicted" if cursor is not None and not cursor.node.alive else "finished"


def _asked(question: Prompt) -> str:
    """The last user message's text; of a rendered prompt all of it."""
    texts = [str(message["content"]) for message in conversation(question) if message["role"] == "user"]
    return texts[-1] if texts else str(question)
