"""From what a strategy settled on to the result that the caller gets."""

from __future__ import annotations

import time

from rksc_agents.reasoning.strategy import Outcome, Problem, Strategy
from rksc_agents.types import ReasoningResult, Timings, Usage


def result_of(strategy: Strategy, problem: Problem, outcome: Outcome) -> ReasoningResult:
    """The result of a run that has just ended, with what it took."""
    ledger, now = problem.session.ledger, time.perf_counter()
    winner = problem.branches[outcome.winner]
    started = ledger.started if ledger.started is not None else now
    return ReasoningResult(
        answer=outcome.answer if outcome.answer is not None else winner.text.strip() or None,
        text=winner.text,
        strategy=strategy.name,
        branches=tuple(problem.branches),
        winner=outcome.winner,
        votes=outcome.votes,
        usage=Usage(
            prompt_tokens=ledger.prompt_tokens,
            prompt_tokens_computed=ledger.prompt_tokens - ledger.prompt_tokens_reused,
            prompt_tokens_reused=ledger.prompt_tokens_reused,
            completion_tokens=ledger.completion_tokens,
            completion_tokens_winner=len(winner.tokens),
        ),
        kv=ledger.kv.model_copy(update={"evicted": problem.session.evicted(), "recomputed": ledger.recomputed}),
        timings=Timings(
            queue_s=started - ledger.submitted,
            prefill_s=ledger.prefill_s,
            decode_s=ledger.decode_s,
            total_s=now - ledger.submitted,
        ),
    )
