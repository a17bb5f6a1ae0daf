"""One thread owns the model and runs an event loop in which strategies advance between steps."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rksc_agents.cache.budget import Budget
from rksc_agents.config import EngineConfig
from rksc_agents.engine.scheduler import Scheduler
from rksc_agents.engine.session import Session
from rksc_agents.errors import EngineClosedError, EngineError
from rksc_agents.model.protocol import Runner
from rksc_agents.model.text import TextCodec

T = TypeVar("T")

_TURNS = 4  # of the loop between two steps, so that what a step resolved can ask for more before the next


class Engine:
    """Runs strategies on a model. Requests come from any thread or event loop.

    Parameters
    ----------
    make_runner : callable
        Called in the engine's thread with the budget; what it makes never leaves that thread.
    codec : TextCodec
        The model's text.
    context : int
        The model's context in tokens.
    kv_limit : int
        The KV budget in bytes.
    config : EngineConfig
        Sizes of a step.
    """

    def __init__(
        self,
        make_runner: Callable[[Budget], Runner],
        codec: TextCodec,
        *,
        context: int,
        kv_limit: int,
        config: EngineConfig,
    ) -> None:
        self.codec = codec
        self.context = context
        self.config = config
        self.budget = Budget(kv_limit)
        self.scheduler: Scheduler
        self.runner: Runner
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()
        self._gate = threading.Lock()
        self._closing = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(make_runner, started), name="rksc-engine", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:  # an interrupt too: the thread ends as soon as what it loads is there
            self._closing = True
            self._thread.join()
            raise
        _open_engines.add(self)

    def submit(self, solve: Callable[[Session], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run `solve` in the engine's thread with a session of its own.

        Cancelling the future cancels the work; its rows and KV are free by the next step.

        Raises
        ------
        EngineClosedError
            If the engine was closed.
        """
        if threading.current_thread() is self._thread:
            raise EngineError("a call from the engine's own thread would wait for itself: await the session's verbs")
        with self._gate:
            if self._closing:
                raise EngineClosedError("the engine is closed: make a new reasoner")
            return asyncio.run_coroutine_threadsafe(self._request(solve), self._loop)

    async def _request(self, solve: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        if self._closing:
            raise EngineClosedError("the engine was closed before this request began")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        session = Session(self.scheduler)
        try:
            return await solve(session)
        except asyncio.CancelledError:
            if task in self._cut:
                raise EngineClosedError("the engine was closed while this request ran") from None
            raise
        finally:
            session.close()
            self._tasks.discard(task)
            self._cut.discard(task)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closing

    def inspect(self, look: Callable[[Scheduler], T]) -> T:
        """Run `look` between two steps in the engine's thread and return what it returns."""

        async def looked(_: Session) -> T:
            return look(self.scheduler)

        return self.submit(looked).result()

    def close(self) -> None:
        """Cancel what runs, free all KV and end the thread. Closing twice does nothing.

        Waits for the step that runs now, and for user code that a request has called.
        """
        with self._gate:
            if not self._closing:
                self._closing = True
                self._loop.call_soon_threadsafe(self._closer)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- in the engine's thread -----------------------------------------------------------------

    def _main(self, make_runner: Callable[[Budget], Runner], started: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self.runner = make_runner(self.budget)
            self.scheduler = Scheduler(self.runner, self.budget, self.codec, self.config, self.context)
        except BaseException as error:
            started.set_exception(error)
            self._loop.close()
            return
        self._stopped = asyncio.Event()
        if self._closing:
            self._stopped.set()
        started.set_result(None)
        try:
            self._loop.run_until_complete(self._run())
        finally:  # also where the loop itself has failed: nobody may wait for ever
            with self._gate:
                self._closing = True
            self._loop.run_until_complete(self._stop())
            self.runner.close()
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _run(self) -> None:
        scheduler = self.scheduler
        while not self._stopped.is_set():
            scheduler.wake.clear()
            if scheduler.busy:
                with self.runner.attached():
                    while scheduler.busy and not self._stopped.is_set():
                        await self._turns()
                        scheduler.step()
                        await asyncio.sleep(0)
            await self._turns()
            if not scheduler.busy:
                await _first(scheduler.wake.wait(), self._stopped.wait())

    async def _turns(self) -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    def _closer(self) -> None:
        self._stopping = self._loop.create_task(self._stop())

    async def _stop(self) -> None:
        for task in list(self._tasks):
            if not task.cancelling():  # one that its caller has cancelled has nobody to tell
                self._cut.add(task)
                task.cancel()
        while self._tasks:
            await asyncio.sleep(0)
        self.scheduler.tree.clear()
        self._stopped.set()


async def _first(*waits: Awaitable[Any]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread that is inside torch when the interpreter goes away can crash the process.
    for engine in list(_open_engines):
        engine.close()
