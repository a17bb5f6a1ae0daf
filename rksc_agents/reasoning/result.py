"""From what a strategy settled on to the result that the caller gets."""

from __future__ import annotations

import time

from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.strategy import Outcome, Strategy
from rksc_agents.reasoning.tracing import trace_of
from rksc_agents.result import ReasoningResult
from rksc_agents.types import Timings, Usage, VerificationUsage
from rksc_agents.verify.verifier import ProbingVerifier


def result_of(strategy: Strategy, problem: Problem, outcome: Outcome, model: str) -> ReasoningResult:
    """The result of a run of the model of this name that has just ended, with what it took and its trace."""
    result = _result(strategy, problem, outcome)
    return result.traced(trace_of(problem, result, model))


def _result(strategy: Strategy, problem: Problem, outcome: Outcome) -> ReasoningResult:
    ledger, now = problem.session.ledger, time.perf_counter()
    started = ledger.started if ledger.started is not None else now
    return ReasoningResult(
        answer=outcome.answer if outcome.answer is not None else problem.text_of(outcome.winner).strip() or None,
        text=problem.text_of(outcome.winner),
        strategy=strategy.name,
        branches=tuple(problem.branches),
        winner=outcome.winner,
        tool_calls=problem.branch(outcome.winner).tool_calls,
        invalid_tool_calls=problem.branch(outcome.winner).invalid_tool_calls,
        votes=outcome.votes,
        rule=outcome.rule,
        usage=Usage(
            prompt_tokens=ledger.prompt_tokens,
            prompt_tokens_computed=ledger.prompt_tokens - ledger.prompt_tokens_reused,
            prompt_tokens_reused=ledger.prompt_tokens_reused,
            completion_tokens=ledger.completion_tokens,
            completion_tokens_winner=sum(len(problem.branches[at].tokens) for at in problem.line(outcome.winner)),
            completion_tokens_thinking=problem.thinking_length(outcome.winner),
        ),
        verification=_verification(problem),
        quantization=problem.session.quantization,
        kv=ledger.kv.model_copy(update={"evicted": problem.session.evicted(), "recomputed": ledger.recomputed}),
        timings=Timings(
            queue_s=started - ledger.submitted,
            prefill_s=ledger.seconds("prefill"),
            decode_s=ledger.seconds("decode"),
            verify_s=ledger.seconds("verify"),
            total_s=now - ledger.submitted,
        ),
    )


def _verification(problem: Problem) -> VerificationUsage:
    verdicts = [branch.verdict for branch in problem.branches if branch.verdict is not None]
    done = [verdict for verdict in verdicts if verdict.score is not None]
    # a reward model's layers are none of the reasoner's, which early exit could spare
    own = done if isinstance(problem.settings.verifier, ProbingVerifier) else []
    return VerificationUsage(
        verifier=problem.settings.verifier.name if verdicts else None,
        exit=problem.settings.exits.source,
        verified=len(done),
        skipped=sum(verdict.skipped for verdict in verdicts),
        exited=sum(verdict.exit_layer is not None for verdict in done),
        tokens_computed=sum(verdict.tokens_computed for verdict in done),
        layers=sum(verdict.layers for verdict in own),
        layers_full=len(own) * problem.session.depth,
    )
