"""OpenTelemetry hears the figures of the result, and the spans stand where the trace says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rksc_agents import BestOfN, ConfigError, EngineError, RKSCReasoner, SelfConsistency, Telemetry
from rksc_agents.adapter.progress import told
from rksc_agents.events import BranchEnd, BranchVerified, VoteChanged
from rksc_agents.telemetry import BRANCH, COUNTERS, EVENTS, HISTOGRAMS, REQUEST
from rksc_agents.testing import scripted_reasoner
from rksc_agents.types import Verdict

SCRIPT = {"Q": ["The answer is 4.", "It is 5."], "Is the answer above correct? Reply YES or NO.": ["YES", "NO"]}
ROOT = Path(__file__).parents[1]


class Heard:
    """What OpenTelemetry was told."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def points(self, name: str) -> dict[str, Any]:
        """Points of a metric by their attributes."""
        data = self.reader.get_metrics_data()
        assert data is not None
        metrics = [m for resource in data.resource_metrics for scope in resource.scope_metrics for m in scope.metrics]
        (metric,) = [metric for metric in metrics if metric.name == name]
        return {" ".join(map(str, (point.attributes or {}).values())): point for point in metric.data.data_points}

    def counts(self, name: str) -> dict[str, float]:
        return {key: point.value for key, point in self.points(name).items()}


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted_reasoner(SCRIPT, strategy=SelfConsistency(branches=3, stop=None)) as made:
        yield made


def watched(reasoner: RKSCReasoner, heard: Heard) -> Telemetry:
    return Telemetry(reasoner, meter_provider=heard.meters, tracer_provider=heard.tracers)


def test_the_metrics_are_the_results_figures(reasoner: RKSCReasoner, heard: Heard) -> None:
    with watched(reasoner, heard):
        results = [reasoner.reason("Q"), reasoner.reason("Q", strategy=BestOfN(branches=2, score="verifier"))]
    total = {
        "prompt": sum(r.usage.prompt_tokens_computed for r in results),
        "completion": sum(r.usage.completion_tokens for r in results),
        "verification": sum(r.verification.tokens_computed for r in results),
    }
    assert heard.counts("rksc.tokens.computed") == total
    assert heard.counts("rksc.tokens.reused") == {"": sum(r.usage.prompt_tokens_reused for r in results)}
    assert heard.counts("rksc.requests") == {"self-consistency answered": 1, "best-of-n answered": 1}
    assert heard.counts("rksc.branches") == {"eos": 5}
    verified = results[1].verification
    assert heard.counts("rksc.verifications") == {"full": verified.verified, "exited": 0, "skipped": verified.skipped}
    assert verified.verified + verified.skipped == 2
    (duration,) = heard.points("rksc.request.duration").values()
    assert (duration.count, duration.sum) == (2, pytest.approx(sum(r.timings.total_s for r in results), rel=0.5))
    (peak,) = heard.points("rksc.kv.peak").values()
    assert peak.max == max(r.kv.peak_bytes for r in results)
    (step,) = heard.points("rksc.step.duration").values()
    assert step.count >= max(len(branch.tokens) for branch in results[0].branches)


def test_spans_are_the_request_and_its_branches(reasoner: RKSCReasoner, heard: Heard) -> None:
    with watched(reasoner, heard):
        result = reasoner.reason("Q", strategy=BestOfN(branches=2, score="verifier"), exit="off")
    (request,) = heard.spans(REQUEST)
    branches = heard.spans(BRANCH)
    assert request.start_time is not None
    assert request.attributes is not None
    assert request.attributes["strategy"] == "best-of-n"
    for node, span in zip(result.trace.nodes, branches, strict=True):
        assert span.parent is not None
        assert span.parent.span_id == request.get_span_context().span_id
        assert span.start_time is not None
        assert span.end_time is not None
        assert (span.start_time - request.start_time) / 1e9 == pytest.approx(node.start_s, abs=1e-6)
        assert (span.end_time - request.start_time) / 1e9 == pytest.approx(node.end_s, abs=1e-6)
        assert [event.name for event in span.events] == ["rksc_branch_end", "rksc_branch_verified"]
        assert span.events[0].attributes is not None
        assert span.events[0].attributes["answer"] == node.answer


def test_a_request_is_a_child_of_the_callers_span(reasoner: RKSCReasoner, heard: Heard) -> None:
    mine = heard.tracers.get_tracer("mine").start_span("mine")
    with watched(reasoner, heard), otel.use_span(mine, end_on_exit=True):
        reasoner.reason("Q")
    (request,) = heard.spans(REQUEST)
    assert request.parent is not None
    assert request.parent.span_id == mine.get_span_context().span_id


def test_errors_and_cancellations_are_told(reasoner: RKSCReasoner, heard: Heard) -> None:
    with watched(reasoner, heard):
        with pytest.raises(EngineError):
            reasoner.reason("Who knows?")
        stream = reasoner.stream("Q")
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        reasoner.clear_cache()  # waits for the step in which the run was cancelled
    assert heard.counts("rksc.requests") == {"EngineError": 1, "cancelled": 1}
    failed, cancelled = heard.spans(REQUEST)
    assert not failed.status.is_ok
    assert cancelled.status.is_unset


def test_after_the_block_nothing_is_told(reasoner: RKSCReasoner, heard: Heard) -> None:
    with watched(reasoner, heard) as telemetry:
        pass
    telemetry.close()
    reasoner.reason("Q")
    assert not heard.exporter.get_finished_spans()


def test_it_may_be_closed_after_the_reasoner(heard: Heard) -> None:
    with scripted_reasoner(SCRIPT) as reasoner:
        telemetry = watched(reasoner, heard)
    telemetry.close()


def test_a_listener_that_fails_harms_nobody(reasoner: RKSCReasoner) -> None:
    heard: list[float] = []

    def fails(*_: object) -> None:
        raise ValueError("oops")

    with (
        reasoner.listening(fails),
        reasoner.listening(lambda _, seconds: heard.append(seconds)),
        pytest.warns(RuntimeWarning, match="ValueError: oops"),
    ):
        reasoner.reason("Q")
    assert len(heard) == 1


def test_without_the_extra_it_says_what_to_install(reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"rksc-agents\[otel\]"):
        Telemetry(reasoner)


def test_events_are_called_as_in_the_frameworks() -> None:
    events = (BranchEnd(0, "eos", "x", "1"), BranchVerified(0, Verdict(score=1.0)), VoteChanged(()))
    assert tuple((told(event) or ("",))[0] for event in events) == EVENTS


def test_the_documentation_lists_every_name() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    names = set(re.findall(r"^\| `(rksc[._a-z]+)`", text, re.MULTILINE))
    assert names == {*COUNTERS, *HISTOGRAMS, *EVENTS, REQUEST, BRANCH}
