"""Who does the log's blocking work: threads in a node, the caller itself in tests and tools.

The log never starts a thread: it hands flushes and background jobs to a `Driver`, and gets their completions back on
the thread that owns its state. A simulator is a third driver.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from walstream.log.group_commit import FlushThread, GroupCommit

T = TypeVar("T")
Done = Callable[[T | None, Exception | None], None]


class Driver(Protocol):
    """Runs what blocks, and brings the result back to the event-loop thread."""

    def start(self, commit: GroupCommit) -> None:
        """Begin to flush what group commit is given."""

    def run(self, job: Callable[[], T], done: Done[T]) -> None:
        """Run a job beside the loop, one at a time and in order, then call `done` on the loop."""

    def run_long(self, job: Callable[[], T], done: Done[T]) -> None:
        """Run a job like `run`, without holding up other jobs; it may take minutes."""

    def post(self, callback: Callable[[], None]) -> None:
        """Call back on the loop. May be called on any thread."""

    def stop(self) -> None:
        """Finish everything that was given. Blocks."""


class ThreadDriver:
    """Threads for flushes, for housekeeping and for what takes long; completions go through `post`.

    In a node `post` brings a callback to the event loop, and `mark_writes` sees to it that the writes of a turn of the
    loop are released at its end.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        mark_writes: Callable[[GroupCommit], None] | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """`failed` is called, on its thread, when a flush ends with an error that is not the disk's: nothing is written
        after that, so the process has to end."""
        self.post = post
        self._failed = failed
        self._mark_writes = mark_writes
        self._jobs = ThreadPoolExecutor(1, "walstream-housekeeping")
        self._long_jobs = ThreadPoolExecutor(1, "walstream-compaction")
        self._flush: FlushThread | None = None
        self._is_stopped = False

    def start(self, commit: GroupCommit) -> None:
        """Start the flush thread."""
        if self._mark_writes is not None:
            commit.on_gathering = partial(self._mark_writes, commit)
        self._flush = FlushThread(commit, self.post, self._failed)

    def run(self, job: Callable[[], T], done: Done[T]) -> None:
        """Run a job on the housekeeping thread."""
        self._submit(self._jobs, job, done)

    def run_long(self, job: Callable[[], T], done: Done[T]) -> None:
        """Run a job on the thread for those that take long."""
        self._submit(self._long_jobs, job, done)

    def _submit(self, executor: ThreadPoolExecutor, job: Callable[[], T], done: Done[T]) -> None:
        if self._is_stopped:
            return  # What is left to tidy up, the next start tidies up.

        def work() -> None:
            try:
                result = job()
            except Exception as error:
                self.post(lambda error=error: done(None, error))  # type: ignore[misc]
            else:
                self.post(lambda: done(result, None))

        executor.submit(work)

    def stop(self) -> None:
        """Flush what is queued, finish the jobs and end the threads."""
        if self._flush is not None:
            self._flush.stop()
        self._long_jobs.shutdown()
        self._is_stopped = True
        self._jobs.shutdown()


class InlineDriver:
    """Does everything at once on the calling thread; flushes wait for `flush`."""

    def __init__(self) -> None:
        self._commit: GroupCommit | None = None

    def start(self, commit: GroupCommit) -> None:
        """Remember what to flush."""
        self._commit = commit

    def run(self, job: Callable[[], T], done: Done[T]) -> None:
        """Run a job now."""
        try:
            result = job()
        except Exception as error:
            done(None, error)
        else:
            done(result, None)

    def run_long(self, job: Callable[[], T], done: Done[T]) -> None:
        """Run a job now."""
        self.run(job, done)

    def post(self, callback: Callable[[], None]) -> None:
        """Call back now."""
        callback()

    def flush(self) -> None:
        """Do what is queued."""
        commit = self._commit
        assert commit is not None
        while taken := commit.take(wait=False):
            if isinstance(taken, list):
                commit.complete(commit.execute(taken))
            else:
                taken()
            if commit.begin_settling():
                commit.complete_settling(commit.settle())

    def stop(self) -> None:
        """Flush what is queued and sync what is behind."""
        assert self._commit is not None
        self._commit.ask_settling()
        self.flush()
