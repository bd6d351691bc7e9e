"""An asyncio event loop over virtual time, for the coroutines of one life of a simulated node.

Each iteration is one turn of the node: it waits while the process is paused and ends with the process. Threads are the
simulated driver's. Only what the node's request handlers and group coordinator use is implemented; sockets are not.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from walstream.sim.clock import SECOND, Timer

if TYPE_CHECKING:
    from walstream.sim.clock import Clock
    from walstream.sim.driver import SimDriver

T = TypeVar("T")

ITERATION_US = (1, 30)
"""Between a callback being scheduled and the iteration that runs it."""


class Handle:
    """A scheduled callback, as asyncio's own: it can be cancelled."""

    __slots__ = ("callback", "timer")

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback
        self.timer: Timer | None = None

    def cancel(self) -> None:
        """Never run the callback."""
        self.callback = None
        if self.timer is not None:
            self.timer.cancel()


class SimLoop:
    """The event loop of one life of a node."""

    def __init__(
        self,
        clock: Clock,
        driver: SimDriver,
        run_on_node: Callable[[Callable[[], None]], None],
        fails: Callable[[], bool],
    ) -> None:
        """`fails` decides for each job on a thread whether it fails with EIO before it has begun."""
        self._clock = clock
        self._driver = driver
        self._run_on_node = run_on_node
        self._ready: deque[Handle] = deque()
        self._tasks: list[tuple[asyncio.Task[Any], Coroutine[Any, Any, Any]]] = []
        self._is_closed = False
        self._fails = fails
        self._self = cast("asyncio.AbstractEventLoop", self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the running loop for a while."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._self)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)

    def close(self) -> None:
        """End with the process: nothing that was scheduled happens any more."""
        self._is_closed = True
        self._ready.clear()
        tasks, self._tasks = self._tasks, []
        with self.running():
            for task, coroutine in tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine.close()

    # ── the interface of asyncio ─────────────────────────────────────────────────────────────────────────────────

    def time(self) -> float:
        """Return the monotonic clock in seconds."""
        return self._clock.now_us / SECOND

    def is_running(self) -> bool:
        """Return whether callbacks still run."""
        return not self._is_closed

    def is_closed(self) -> bool:
        """Return whether the process has ended."""
        return self._is_closed

    def get_debug(self) -> bool:
        """Return False: debug mode reads the real clock."""
        return False

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Handle:
        """Run a callback in the next iteration."""
        handle = Handle(partial(callback, *args) if context is None else partial(context.run, callback, *args))
        self._add(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Run a callback after so many seconds."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Run a callback at a time of this loop."""
        handle = Handle(partial(callback, *args) if context is None else partial(context.run, callback, *args))
        delay_us = round(when * SECOND) - self._clock.now_us
        handle.timer = self._clock.after(delay_us, partial(self._run_on_node, partial(self._add, handle)))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self._self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        """Start a coroutine in the next iteration."""
        task = asyncio.Task(coro, loop=self._self, name=name, context=context)
        self._tasks.append((task, coro))
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # noqa: ARG002
        """Run a job on a simulated thread; the driver has one for all long jobs."""
        future = self.create_future()

        def job() -> T:
            if self._fails():
                raise OSError(errno.EIO, "Input/output error")
            return func(*args)

        def done(result: T | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._driver.run_long(job, done)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raise what nobody has waited for: in a simulation it is a finding."""
        error = context.get("exception")
        if isinstance(error, Exception) and not self._is_closed:
            raise error

    # ── iterations ───────────────────────────────────────────────────────────────────────────────────────────────

    def _add(self, handle: Handle) -> None:
        """Run a callback in the next iteration, unless it is cancelled before."""
        if not self._is_closed:
            if not self._ready:
                self._clock.after(self._clock.between(*ITERATION_US), partial(self._run_on_node, self._iterate))
            self._ready.append(handle)

    def _iterate(self) -> None:
        if self._is_closed:
            return  # Scheduled in an earlier life of the node.
        ready, self._ready = self._ready, deque()
        while ready:
            callback = ready.popleft().callback
            if callback is not None:
                callback()
                self._raise_failures()

    def _raise_failures(self) -> None:
        """Raise what a task ended with: a lost power or a violation does not stop at the task's boundary."""
        if not any(task.done() for task, _ in self._tasks):
            return
        ended = [task for task, _ in self._tasks if task.done()]
        self._tasks = [(task, coroutine) for task, coroutine in self._tasks if not task.done()]
        for task in ended:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                raise error
