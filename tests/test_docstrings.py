"""Every public name says what it is, what it takes, and shows one use; what it shows is run."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import rksc_agents
from rksc_agents import RKSCReasoner, SelfConsistency
from rksc_agents.testing import scripted_reasoner

PLAIN = {"Event", "__version__"}  # a union and a text have no docstring of their own
NAMES = sorted(set(rksc_agents.__all__) - PLAIN)
SCRIPT = {"Q": "The answer is 4.", "Is the answer above correct? Reply YES or NO.": "YES"}


def text_of(name: str) -> str:
    return inspect.getdoc(vars_of(name)) or ""


def vars_of(name: str) -> Any:
    return getattr(rksc_agents, name)


@pytest.fixture(scope="module")
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted_reasoner(SCRIPT, strategy=SelfConsistency(branches=3, stop=None)) as made:
        yield made


@pytest.mark.parametrize("name", NAMES)
def test_the_example_shows_what_it_says(name: str, reasoner: RKSCReasoner) -> None:
    assert re.search(r"^Examples\n-{8}\n", text_of(name), re.MULTILINE), f"{name} has no example"
    result = reasoner.reason("Q")
    names = {**{each: vars_of(each) for each in NAMES}, "reasoner": reasoner, "result": result}
    test = doctest.DocTestParser().get_doctest(text_of(name), names, name, None, 0)
    assert test.examples
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_takes_is_described(name: str) -> None:
    """Each field and parameter, unless it is inherited; of options where `reason` describes them."""
    value, text = vars_of(name), text_of(name)
    if name == "Options":
        text = inspect.getdoc(RKSCReasoner.reason) or ""
        text += inspect.getdoc(rksc_agents.Sampling) or ""
    if not inspect.isclass(value):
        taken = set(inspect.signature(value).parameters)
    elif issubclass(value, Exception) or not hasattr(value, "__annotations__"):
        taken = set()
    else:
        taken = {field for field in vars(value).get("__annotations__", {}) if not field.startswith("_")} - {"name"}
    missing = [field for field in sorted(taken) if not re.search(rf"(^|[\s`,*]){field}([\s`,:]|$)", text)]
    assert not missing, f"{name} does not say what {', '.join(missing)} is"


@pytest.mark.parametrize("name", NAMES)
def test_its_methods_say_what_they_do(name: str) -> None:
    value = vars_of(name)
    if not inspect.isclass(value) or not value.__module__.startswith("rksc_agents"):
        return
    silent = [
        method
        for method, function in vars(value).items()
        if not method.startswith("_")
        and (inspect.isfunction(function) or isinstance(function, (classmethod, staticmethod, property)))
        and not inspect.getdoc(getattr(value, method))
    ]
    assert not silent


def test_tensors_have_their_shapes() -> None:
    """Where a public signature takes or gives a tensor, its docstring has a shape in brackets."""
    for name in NAMES:
        value = vars_of(name)
        for function in [value, *vars(value).values()] if inspect.isclass(value) else [value]:
            if inspect.isfunction(function) and "Tensor" in str(function.__annotations__):
                assert re.search(r"\[\w+(, \w+)*\]", inspect.getdoc(function) or ""), f"{name}: {function.__name__}"
