"""Runs the conformance suite without pytest, and tells results by area."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest

Verdict = Literal["passed", "failed", "not supported"]

AREAS = [
    "interface", "answers", "streams", "conversations", "prompts", "tools", "structured", "events", "callbacks",
    "tokens", "copies", "concurrency", "event loop",
]  # fmt: skip
"""In the order of the table."""


@dataclass(frozen=True)
class Outcome:
    """What became of one test of an LLM."""

    llm: str
    area: str
    test: str
    verdict: Verdict
    reason: str = ""


def suite_tests(suite: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The suite's tests by name."""
    for name in dir(suite):
        if name.startswith("test_"):
            yield name, getattr(suite, name)


def area_of(suite: type, test: str) -> str:
    """The area that a test belongs to."""
    area: str = next(cls.area for cls in suite.__mro__ if test in vars(cls) and "area" in vars(cls))  # type: ignore[attr-defined]
    return area


def missing(suite: type, test: Callable[..., Any]) -> list[str]:
    """What the LLM cannot of what a test is about."""
    return [flag for flag in getattr(test, "needs", ()) if not getattr(suite, flag)]


def run_suite(suite: type) -> list[Outcome]:
    """Run a suite whose tests take no fixtures."""
    return [_outcome(suite, name, test) for name, test in suite_tests(suite)]


def failures(suite: type) -> set[str]:
    """The tests that fail."""
    return {outcome.test for outcome in run_suite(suite) if outcome.verdict == "failed"}


def _outcome(suite: type, name: str, test: Callable[..., Any]) -> Outcome:
    area = area_of(suite, name)
    if flags := missing(suite, test):
        return Outcome(suite.__name__, area, name, "not supported", ", ".join(flags))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = test(suite())
            if inspect.iscoroutine(found):
                asyncio.run(found)
    except pytest.skip.Exception as skipped:
        return Outcome(suite.__name__, area, name, "not supported", str(skipped))
    except (Exception, pytest.fail.Exception) as error:
        return Outcome(suite.__name__, area, name, "failed", f"{type(error).__name__}: {error}")
    return Outcome(suite.__name__, area, name, "passed")


def table(outcomes: list[Outcome]) -> list[str]:
    """Lines of a Markdown table: per area and LLM how many of the tests passed, and how many it does not support."""
    llms = list(dict.fromkeys(outcome.llm for outcome in outcomes))
    areas = sorted({outcome.area for outcome in outcomes}, key=AREAS.index)
    found: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.area, outcome.llm].append(outcome.verdict)
        found["all", outcome.llm].append(outcome.verdict)
    lines = [f"| Area | {' | '.join(llms)} |", "| --- " * (len(llms) + 1) + "|"]
    return lines + [f"| {area} | {' | '.join(_cell(found[area, llm]) for llm in llms)} |" for area in (*areas, "all")]


def _cell(verdicts: list[Verdict]) -> str:
    unsupported = verdicts.count("not supported")
    cell = f"{verdicts.count('passed')} of {len(verdicts)}"
    return f"{cell} ({unsupported} not supported)" if unsupported else cell


class Tabulator:
    """A pytest plugin that notes what becomes of the suite's tests, and prints the table where pytest is verbose."""

    name = "llm-conformance"

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str, str]] = {}
        self.outcomes: dict[str, Outcome] = {}

    def note(self, item: pytest.Item, suite: type, test: str) -> None:
        """A test of the suite begins."""
        self._known[item.nodeid] = (suite.__name__.removeprefix("Test"), area_of(suite, test), test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test ended; a failure of any part is a failure of the test."""
        if (known := self._known.get(report.nodeid)) is None:
            return
        expected = getattr(report, "wasxfail", "")
        if report.failed or (report.skipped and expected):
            self.outcomes[report.nodeid] = Outcome(*known, "failed", expected or _reason(report))
        elif report.skipped:
            self.outcomes[report.nodeid] = Outcome(*known, "not supported", _reason(report))
        elif report.when == "call":
            self.outcomes[report.nodeid] = Outcome(*known, "passed")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The table, and a line for each failure."""
        if terminalreporter.verbosity > 0 and self.outcomes:
            outcomes = list(self.outcomes.values())
            terminalreporter.section("conformance of LLMs")
            for line in table(outcomes):
                terminalreporter.line(line)
            for outcome in sorted(outcomes, key=lambda outcome: AREAS.index(outcome.area)):
                if outcome.verdict == "failed":
                    terminalreporter.line(f"{outcome.llm}, {outcome.area}: {outcome.test}: {outcome.reason}")


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message).splitlines()[0] if crash is not None else ""


def tabulate(request: pytest.FixtureRequest) -> None:
    """Note a test of the suite for the table."""
    manager = request.config.pluginmanager
    tabulator = manager.get_plugin(Tabulator.name)
    if tabulator is None:
        manager.register(tabulator := Tabulator(), Tabulator.name)
    tabulator.note(request.node, request.cls, request.function.__name__)
