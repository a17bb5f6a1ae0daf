"""What a reasoner does, told to OpenTelemetry: metrics, and a span per request with its branches as children."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rksc_agents.adapter.progress import BRANCH_END, BRANCH_VERIFIED, VOTES, told
from rksc_agents.errors import ConfigError
from rksc_agents.events import BranchEnd, BranchVerified, VoteChanged
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.result import ReasoningResult
from rksc_agents.trace import TraceNode

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

REQUEST, BRANCH = "rksc_request", "rksc_branch"
"""Names of the spans."""

EVENTS = (BRANCH_END, BRANCH_VERIFIED, VOTES)
"""Names of the events in them: LangChain's custom events and LlamaIndex's events have the same."""

COUNTERS = {
    "rksc.requests": ("{request}", "Requests that ended, by strategy and outcome."),
    "rksc.branches": ("{branch}", "Branches that ended, by finish_reason."),
    "rksc.tokens.computed": ("{token}", "Tokens computed, by kind: prompt, completion, verification."),
    "rksc.tokens.reused": ("{token}", "Prompt tokens whose KV was there."),
    "rksc.verifications": ("{verdict}", "Branches that were to be verified, by outcome: full, exited, skipped."),
    "rksc.kv.evicted": ("{node}", "Nodes of the KV tree that were evicted while a request ran."),
    "rksc.kv.recomputed": ("{token}", "Tokens computed again because their KV had been evicted."),
}
HISTOGRAMS = {
    "rksc.request.duration": ("s", "From the question to the answer."),
    "rksc.queue.duration": ("s", "From the question to the first step that worked for it."),
    "rksc.step.duration": ("s", "One step of the engine: a pass over all that is awaited."),
    "rksc.kv.peak": ("By", "Most bytes of KV that a request's branches held."),
}


class Telemetry:
    """Tells OpenTelemetry what a reasoner does, for the length of a ``with`` block or until :meth:`close`.

    Parameters
    ----------
    reasoner : RKSCReasoner
        Whose requests are told; it stays yours to close, after the telemetry.
    meter_provider, tracer_provider : MeterProvider, TracerProvider or None
        Where metrics and spans go; None is the process's own, which drops them until one is set.

    Raises
    ------
    ConfigError
        If opentelemetry-api is not installed.

    Examples
    --------
    >>> with Telemetry(reasoner):  # doctest: +SKIP
    ...     reasoner.reason("What is 17 + 25?")
    """

    def __init__(
        self,
        reasoner: RKSCReasoner,
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"Telemetry needs opentelemetry-api ({error}): pip install 'rksc-agents[otel]'"
            ) from error
        meter = metrics.get_meter("rksc_agents", meter_provider=meter_provider)
        self._tracer: Tracer = trace.get_tracer("rksc_agents", tracer_provider=tracer_provider)
        self._count = {name: meter.create_counter(name, unit, said) for name, (unit, said) in COUNTERS.items()}
        self._measure = {name: meter.create_histogram(name, unit, said) for name, (unit, said) in HISTOGRAMS.items()}
        self._undo = ExitStack()
        self._undo.enter_context(reasoner.listening(self._ended))
        self._undo.enter_context(reasoner.watching_steps(self._measure["rksc.step.duration"].record))

    def close(self) -> None:
        """Tell no more. Closing twice does nothing."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ended(self, outcome: ReasoningResult | BaseException, seconds: float) -> None:
        began = time.time_ns() - int(1e9 * seconds)
        self._measure["rksc.request.duration"].record(seconds)
        if isinstance(outcome, BaseException):
            self._failed(outcome, began)
            return
        self._metrics(outcome)
        self._spans(outcome, began)

    def _failed(self, error: BaseException, began: int) -> None:
        from opentelemetry.trace import StatusCode

        cancelled = isinstance(error, asyncio.CancelledError)
        name = "cancelled" if cancelled else type(error).__name__
        self._count["rksc.requests"].add(1, {"outcome": name})
        span = self._tracer.start_span(REQUEST, start_time=began, attributes={"outcome": name})
        if not cancelled:
            span.set_status(StatusCode.ERROR, str(error))
        span.end()

    def _metrics(self, result: ReasoningResult) -> None:
        count, usage, checked = self._count, result.usage, result.verification
        count["rksc.requests"].add(1, {"strategy": result.strategy, "outcome": "answered"})
        for branch in result.branches:
            count["rksc.branches"].add(1, {"finish_reason": branch.finish_reason})
        kinds = {
            "prompt": usage.prompt_tokens_computed,
            "completion": usage.completion_tokens,
            "verification": checked.tokens_computed,
        }
        for kind, tokens in kinds.items():
            count["rksc.tokens.computed"].add(tokens, {"kind": kind})
        count["rksc.tokens.reused"].add(usage.prompt_tokens_reused)
        verdicts = {
            "full": checked.verified - checked.exited,
            "exited": checked.exited,
            "skipped": checked.skipped,
        }
        for outcome, branches in verdicts.items():
            count["rksc.verifications"].add(branches, {"outcome": outcome})
        count["rksc.kv.evicted"].add(result.kv.evicted)
        count["rksc.kv.recomputed"].add(result.kv.recomputed)
        self._measure["rksc.queue.duration"].record(result.timings.queue_s)
        self._measure["rksc.kv.peak"].record(result.kv.peak_bytes)

    def _spans(self, result: ReasoningResult, began: int) -> None:
        from opentelemetry.trace import set_span_in_context

        trace = result.trace
        request = self._tracer.start_span(
            REQUEST,
            start_time=began,
            attributes={
                "strategy": result.strategy,
                "model": trace.model,
                "branches": len(trace.nodes),
                "outcome": "answered",
                "prompt_tokens": result.usage.prompt_tokens,
                "prompt_tokens_reused": result.usage.prompt_tokens_reused,
                "completion_tokens": result.usage.completion_tokens,
            },
        )
        inside = set_span_in_context(request)
        for node in trace.nodes:
            span = self._tracer.start_span(
                BRANCH,
                context=inside,
                start_time=_at(began, node.start_s),
                attributes={
                    "branch": node.index,
                    "state": node.state,
                    "tokens": len(node.tokens),
                    "confidence": node.confidence,
                    "kv_bytes": node.kv_bytes,
                },
            )
            _add_events(span, node, began)
            span.end(_at(began, node.end_s))
        if trace.votes:
            _add(request, VoteChanged(trace.votes), _at(began, trace.timings.total_s))
        request.end(_at(began, trace.timings.total_s))


def _add_events(span: Span, node: TraceNode, began: int) -> None:
    _add(span, BranchEnd(node.index, node.finish_reason, node.text, node.answer), _at(began, node.end_s))
    if node.verdict is not None:
        _add(span, BranchVerified(node.index, node.verdict), _at(began, node.end_s))


def _add(span: Span, event: BranchEnd | BranchVerified | VoteChanged, when: int) -> None:
    name, data = told(event) or ("", {})
    span.add_event(name, {key: _plain(value) for key, value in data.items() if value is not None}, when)


def _plain(value: Any) -> str | bool | int | float:
    """A value as an attribute takes it."""
    return value if isinstance(value, str | bool | int | float) else repr(value)


def _at(began: int, seconds: float) -> int:
    return began + int(1e9 * seconds)
