"""The conformance suite passes for a mock that conforms, and each of its tests fails for some mock that does not."""

from __future__ import annotations

from typing import Any, ClassVar

import conformance_broken_chat
import conformance_broken_events
import conformance_broken_prompts
import conformance_broken_running
import conformance_broken_tools
import pytest
from conformance import SECRET, LLMConformance
from conformance_mock import BROKEN, FAILING, Mock, MockError
from conformance_report import Outcome, failures, run_suite, suite_tests, table
from llama_index.core.llms import LLM

MODULES = (
    conformance_broken_chat,
    conformance_broken_prompts,
    conformance_broken_tools,
    conformance_broken_events,
    conformance_broken_running,
)


class TestMock(LLMConformance):
    kind: ClassVar[type[Mock]] = Mock
    function_calling = True
    counts_tokens = True
    bounds = "max_tokens"
    stops = "stop"
    secret: ClassVar = {"api_key": SECRET}

    def make_llm(self, **settings: Any) -> LLM:
        return self.kind(**settings)

    def make_failing(self, **settings: Any) -> tuple[LLM, str, type[Exception]]:
        return self.make_llm(**settings), FAILING, MockError


class Understated(TestMock):
    """Says of the mock that it calls no functions."""

    __test__ = False
    function_calling = False


class Plain(TestMock):
    """Says of the mock no more than it must."""

    __test__ = False
    function_calling = structured = counts_tokens = deterministic = False
    bounds = stops = None
    secret: ClassVar = {}

    def make_failing(self, **settings: Any) -> tuple[LLM, str, type[Exception]]:
        return LLMConformance.make_failing(self, **settings)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_what_is_broken_fails(broken: type[Mock]) -> None:
    suite = type("Broken", (TestMock,), {"__test__": False, "kind": broken})
    assert failures(suite) == BROKEN[broken]


def test_more_than_was_told_fails() -> None:
    assert failures(Understated) == {"test_function_calling_is_told"}


def test_each_test_of_the_suite_can_fail() -> None:
    can_fail = set().union(*BROKEN.values(), failures(Understated))
    assert can_fail == {name for name, _ in suite_tests(LLMConformance)}


def test_all_broken_mocks_are_there() -> None:
    assert {kind.__module__ for kind in BROKEN} == {module.__name__ for module in MODULES}


def test_what_is_not_supported_is_skipped() -> None:
    outcomes = run_suite(Plain)
    skipped = {outcome.test for outcome in outcomes if outcome.verdict == "not supported"}
    assert skipped > {name for name, test in suite_tests(Plain) if hasattr(test, "needs")}
    assert {outcome.test for outcome in outcomes if outcome.test not in skipped and outcome.verdict != "passed"} == {
        "test_function_calling_is_told"
    }
    reasons = {outcome.test: outcome.reason for outcome in outcomes}
    assert reasons["test_a_failure_is_told"] == "not supported: no call is known to fail"
    assert reasons["test_a_function_calling_program"] == "structured, function_calling"


def test_the_table() -> None:
    outcomes = [
        Outcome("A", "tools", "test_x", "passed"),
        Outcome("A", "tools", "test_y", "failed", "why"),
        Outcome("B", "tools", "test_x", "not supported"),
        Outcome("B", "copies", "test_z", "passed"),
    ]
    assert table(outcomes) == [
        "| Area | A | B |",
        "| --- | --- | --- |",
        "| tools | 1 of 2 | 0 of 1 (1 not supported) |",
        "| copies | 0 of 0 | 1 of 1 |",
        "| all | 1 of 2 | 1 of 2 (1 not supported) |",
    ]
