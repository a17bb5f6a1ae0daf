"""Whoever wants to hear of every request of a reasoner."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rksc_agents.result import ReasoningResult

Listener = Callable[[ReasoningResult | BaseException, float], None]
"""Called in the engine's thread when a request has ended, with its result or its error, and the seconds it took since
it was submitted. The context variables are those of the caller. It must not block."""


class Listeners:
    """The listeners of a reasoner."""

    def __init__(self) -> None:
        self._listening: list[Listener] = []

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Have `listener` called for the length of the block."""
        self._listening.append(listener)
        try:
            yield
        finally:
            self._listening.remove(listener)

    def tell(self, outcome: ReasoningResult | BaseException, seconds: float) -> None:
        """Tell all of them; an error in one of them becomes a warning."""
        for listener in list(self._listening):
            try:
                listener(outcome, seconds)
            except Exception as error:
                warnings.warn(
                    f"a listener failed and missed a request: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
