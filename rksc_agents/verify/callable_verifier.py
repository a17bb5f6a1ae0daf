"""Verification by a function of the user's: a unit test, a solver, the rules of a puzzle."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import attrgetter
from typing import Self

from rksc_agents.engine.session import Session
from rksc_agents.errors import ConfigError
from rksc_agents.model.exits import ExitRule
from rksc_agents.types import Verdict
from rksc_agents.verify.verifier import Claim

Check = Callable[[Claim], float]
"""Says how right a claim is: a bool, or a number in [0, 1]."""

_SHOWN = 80  # characters of a claim that a message repeats


@dataclass(frozen=True, init=False)
class CallableVerifier:
    """Asks a function about each claim.

    ::

        CallableVerifier(lambda claim: claim.answer == "42")

    Parameters
    ----------
    function : callable
        Takes a :class:`~rksc_agents.verify.verifier.Claim` and returns a bool or a number in [0, 1]. It runs outside
        the engine's thread, on the claims of a request at the same time, so it must be safe for several threads.
    name : str or None, default None
        The name in results; the function's own where it is None.
    always : bool, default True
        Whether the function is asked also where one branch is decisively confident (level 1 of early exit). False is
        for functions that take long and say no more than confidence does.

    Raises
    ------
    ConfigError
        If `function` cannot be called, or is a coroutine function.

    Examples
    --------
    >>> short = CallableVerifier(lambda claim: 1 / (1 + len(claim.text)), "short")
    >>> reasoner.reason("Q", strategy=BestOfN(score="verifier", verifier=short)).answer
    '4'
    """

    function: Check
    name: str
    always: bool

    def __init__(self, function: Check, name: str | None = None, *, always: bool = True) -> None:
        if not callable(function):
            raise ConfigError(f"function = {function!r} cannot be called: give a function of one claim")
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"function = {function!r} is a coroutine function: give a plain one, it may block")
        own = getattr(function, "__qualname__", type(function).__qualname__)
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "name", str(own) if name is None else name)
        object.__setattr__(self, "always", always)

    @classmethod
    def load(cls, path: str) -> Self:
        """Import the function that ``package.module:function`` names.

        Raises
        ------
        ConfigError
            If the path is malformed, the module cannot be imported, or there is no such function in it.
        """
        module_name, _, function_name = path.partition(":")
        names = [*module_name.split("."), *function_name.split(".")]
        if not all(name.isidentifier() for name in names):
            raise ConfigError(f"{path!r} names no function: write it as package.module:function")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # whatever the module does when it is imported
            raise ConfigError(
                f"{module_name!r} of {path!r} cannot be imported ({type(error).__name__}: {error}): correct the name, "
                "install its package, or put its folder on PYTHONPATH"
            ) from error
        try:
            function = attrgetter(function_name)(module)
        except AttributeError:
            raise ConfigError(
                f"{module_name!r} has no {function_name!r}: name a function that it defines, as package.module:function"
            ) from None
        return cls(function, name=path)

    async def verify(self, session: Session, claims: Sequence[Claim], exit_rule: ExitRule | None) -> list[Verdict]:
        """Call the function once per claim, for all claims at the same time.

        What the function raises comes out as it is; calls that have not begun by then are left out.

        Raises
        ------
        ConfigError
            If the function returns something else than a bool or a number in [0, 1].
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(session.call(self._score, claim)) for claim in claims]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        return [Verdict(score=task.result()) for task in tasks]

    def _score(self, claim: Claim) -> float:
        try:
            value: object = self.function(claim)
        except StopIteration as error:  # asyncio cannot carry it: whoever awaits the call would wait for ever
            raise RuntimeError(f"{self.name} raised StopIteration") from error
        if isinstance(value, Real) and 0.0 <= float(value) <= 1.0:  # NaN compares as false
            return float(value)
        shown = claim.text if len(claim.text) <= _SHOWN else claim.text[:_SHOWN] + "..."
        raise ConfigError(
            f"{self.name} returned {value!r} ({type(value).__name__}) for the claim {shown!r}: return a bool, or a "
            "number from 0 to 1"
        )
