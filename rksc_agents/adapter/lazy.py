"""A reasoner behind a framework's object: loaded at its first use, or injected."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from rksc_agents.config import EngineConfig
from rksc_agents.errors import EngineClosedError

if TYPE_CHECKING:
    from rksc_agents import RKSCReasoner


class LazyReasoner:
    """One reasoner that several objects share, loaded when it is first used.

    It may be asked for from any thread and any event loop at once; the model is loaded once, in a thread of its own.

    Parameters
    ----------
    model : str
        What :meth:`~rksc_agents.reasoner.RKSCReasoner.from_pretrained` loads.
    load_kwargs : mapping
        Passed on to it, untouched.
    engine : EngineConfig or None
        KV budget and sizes of a step.
    """

    def __init__(self, model: str, load_kwargs: Mapping[str, Any], engine: EngineConfig | None) -> None:
        self.model = model
        self.load_kwargs = dict(load_kwargs)
        self.engine = engine
        self._injected: RKSCReasoner | None = None
        self._lock = threading.Lock()
        self._future: Future[RKSCReasoner] | None = None
        self._closed = False

    @classmethod
    def of(cls, reasoner: RKSCReasoner) -> Self:
        """A live reasoner, which stays its owner's to close."""
        lazy = cls(reasoner.name, {}, None)
        lazy._injected = reasoner
        return lazy

    def serves(self, model: str, load_kwargs: Mapping[str, Any], engine: EngineConfig | None) -> bool:
        """Whether it is the reasoner of an object with these settings."""
        if self._injected is not None:
            return model == self.model
        return (model, dict(load_kwargs), engine) == (self.model, self.load_kwargs, self.engine)

    @property
    def injected(self) -> RKSCReasoner | None:
        """The live reasoner that was injected; None where it is loaded."""
        return self._injected

    @property
    def loaded(self) -> RKSCReasoner | None:
        """The reasoner, where there is one without loading."""
        if self._injected is not None:
            return self._injected
        future = self._future
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def get(self) -> RKSCReasoner:
        """The reasoner, loaded if need be.

        Raises
        ------
        EngineClosedError
            After :meth:`close`.
        RKSCError
            What loading raises; the next call tries again.
        """
        return self._injected if self._injected is not None else self._started().result()

    async def aget(self) -> RKSCReasoner:
        """Like :meth:`get`, without blocking the event loop."""
        if (loaded := self.loaded) is not None and not self._closed:
            return loaded
        return await asyncio.wrap_future(self._started())

    def close(self) -> None:
        """Close the reasoner that was loaded here; an injected one is its owner's. Closing twice does nothing."""
        with self._lock:
            self._closed, future = True, self._future
        if future is not None and future.exception() is None:
            future.result().close()

    def _started(self) -> Future[RKSCReasoner]:
        with self._lock:
            if self._closed and self._injected is None:
                raise EngineClosedError("this model was closed: make another one")
            if self._future is None:
                self._future = Future()
                self._future.set_running_or_notify_cancel()  # one caller that gives up must not take it from the others
                threading.Thread(target=self._load, args=(self._future,), name="rksc-load", daemon=True).start()
            return self._future

    def _load(self, future: Future[RKSCReasoner]) -> None:
        try:
            from rksc_agents import RKSCReasoner

            reasoner = RKSCReasoner.from_pretrained(self.model, engine=self.engine, **self.load_kwargs)
        except BaseException as error:
            with self._lock:
                self._future = None
            future.set_exception(error)
        else:
            future.set_result(reasoner)

    def __reduce__(self) -> tuple[type[Self], tuple[str, dict[str, Any], EngineConfig | None]]:
        """What is pickled are the settings: a live reasoner stays where it is."""
        return type(self), (self.model, self.load_kwargs, self.engine)

    def __deepcopy__(self, memo: object) -> Self:
        """Copies of an object share its reasoner."""
        return self
