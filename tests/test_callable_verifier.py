"""Verification by a function of the user's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from support import TinyEngine, tiny_engine
from tiny_models import tiny_model

from rksc_agents.errors import ConfigError
from rksc_agents.types import Verdict
from rksc_agents.verify.callable_verifier import CallableVerifier
from rksc_agents.verify.checkers import game24
from rksc_agents.verify.verifier import Claim, Verifier


@pytest.fixture(scope="module")
def engine() -> Iterator[TinyEngine]:
    with tiny_engine(tiny_model("Llama")) as made:
        yield made


def claims(*texts: str) -> list[Claim]:
    return [Claim("1 1 4 6", text, None, cast(Any, None)) for text in texts]


def verdicts(engine: TinyEngine, function: Callable[[Claim], Any], *texts: str) -> list[Verdict]:
    verifier = CallableVerifier(function)
    return engine.run(lambda session: verifier.verify(session, claims(*texts), None))


def test_scores_come_in_the_order_of_the_claims(engine: TinyEngine) -> None:
    found = verdicts(engine, lambda claim: len(claim.text) / 4, "abc", "", "abcd", "a")
    assert found == [Verdict(score=score, layers=0, tokens_computed=0) for score in (0.75, 0.0, 1.0, 0.25)]
    assert verdicts(engine, lambda claim: 1 / 0) == []


@pytest.mark.parametrize(("value", "score"), [(True, 1.0), (False, 0.0), (0.25, 0.25), (1, 1.0), (0, 0.0)])
def test_bools_and_numbers_are_scores(engine: TinyEngine, value: Any, score: float) -> None:
    verdict = verdicts(engine, lambda claim: value, "a")[0]
    assert verdict.score == score
    assert type(verdict.score) is float


@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.5, float("inf"), 2, None, "1", [0.5], 0.5j])
def test_what_is_no_score_is_refused(engine: TinyEngine, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        verdicts(engine, lambda claim: value, "the claim " + "x" * 500)
    message = str(caught.value)
    assert repr(value) in message
    assert "'the claim xxx" in message
    assert "0 to 1" in message
    assert len(message) < 400


def test_it_runs_outside_the_engines_thread_and_for_all_claims_at_once(engine: TinyEngine) -> None:
    all_there = threading.Barrier(3)

    def check(claim: Claim) -> bool:
        all_there.wait(timeout=30)  # fails where one call waits for another
        return threading.current_thread().name != "rksc-engine"

    assert [verdict.score for verdict in verdicts(engine, check, "a", "b", "c")] == [1.0, 1.0, 1.0]


def test_what_the_function_raises_comes_out_as_it_is(engine: TinyEngine) -> None:
    class OwnError(Exception):
        pass

    raised = OwnError("broken")
    cause = KeyError("why")

    def check(claim: Claim) -> bool:
        if claim.text == "bad":
            raise raised from cause
        return True

    with pytest.raises(OwnError) as caught:
        verdicts(engine, check, "a", "bad", "b")
    assert caught.value is raised
    assert caught.value.__cause__ is cause


def test_an_exhausted_iterator_does_not_hang_the_request(engine: TinyEngine) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        verdicts(engine, lambda claim: next(iter(())), "a")


def test_it_is_a_frozen_verifier_with_a_name() -> None:
    verifier = CallableVerifier(game24)
    assert isinstance(verifier, Verifier)
    assert verifier.name == "game24"
    assert CallableVerifier(game24, "puzzle").name == "puzzle"
    assert verifier == CallableVerifier(game24)
    assert hash(verifier) == hash(CallableVerifier(game24))
    with pytest.raises(AttributeError):
        verifier.name = "other"  # type: ignore[misc]


def test_what_cannot_be_called_is_refused() -> None:
    async def check(claim: Claim) -> bool:
        return True

    with pytest.raises(ConfigError, match="cannot be called"):
        CallableVerifier(cast(Any, 0.5))
    with pytest.raises(ConfigError, match="coroutine function"):
        CallableVerifier(cast(Any, check))


def test_a_function_is_loaded_by_its_path(engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_checks.py").write_text(
        "number = 3\n\ndef right(claim):\n    return claim.text == 'a'\n\n"
        "class Rules:\n    right = staticmethod(right)\n"
    )
    (tmp_path / "broken_checks.py").write_text("raise ValueError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("own_checks:right", "own_checks:Rules.right"):
        verifier = CallableVerifier.load(path)
        assert verifier.name == path
        found = engine.run(lambda session, v=verifier: v.verify(session, claims("a", "b"), None))
        assert [verdict.score for verdict in found] == [1.0, 0.0]
    for path, reason in (
        ("own_checks:wrong", "has no 'wrong'"),
        ("own_checks:number", "cannot be called"),
        ("broken_checks:right", "no licence"),
        ("no_such_package.checks:right", "PYTHONPATH"),
    ):
        with pytest.raises(ConfigError, match=reason):
            CallableVerifier.load(path)
    del sys.modules["own_checks"]


@pytest.mark.parametrize("path", ["", "checks", "checks:", ":right", "a:b:c", "a b:c", "./checks.py:right", "a:b()"])
def test_a_malformed_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:function"):
        CallableVerifier.load(path)
