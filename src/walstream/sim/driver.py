"""The log's `Driver` over virtual time: flushes and jobs take a while, finish later, or vanish in a crash.

A lane stands for a thread: it does one thing at a time, in order. The work of a lane happens at the moment it ends,
on the disk as it is then; a crash before that moment lets a random part of it happen, as a crash in the middle would.
Completions come back to the node a little later, so a crash may also fall between a sync and the news of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from walstream.log.driver import Done
from walstream.log.group_commit import Flush, GroupCommit, Write
from walstream.sim.clock import Clock, Timer
from walstream.sim.disk import PowerLost, SimDisk

T = TypeVar("T")
Work = Callable[[], Callable[[], None] | None]
"""What a lane does at the end of its time; it returns what the node is to be told."""

OPERATIONS_IN_FLIGHT_MAX = 12
"""How far a lane may have come when the power went: operations drawn from 0 to this, and at times all of them."""


@dataclass(slots=True)
class Pace:
    """How long things take on this disk, in microseconds. Faults change it."""

    flush_us: tuple[int, int] = (100, 2_000)
    job_us: tuple[int, int] = (100, 5_000)
    post_us: tuple[int, int] = (1, 200)
    is_hanging: bool = False
    """Nothing ends until this is over."""


class _Lane:
    """One thread: work in order, one at a time."""

    __slots__ = ("current", "queue", "timer")

    def __init__(self) -> None:
        self.queue: deque[tuple[Work, int]] = deque()
        self.current: Work | None = None
        self.timer: Timer | None = None


class SimDriver:
    """Runs what blocks, in virtual time. One per start of a node."""

    def __init__(
        self, clock: Clock, disk: SimDisk, pace: Pace, run_on_node: Callable[[Callable[[], None]], None]
    ) -> None:
        self._clock = clock
        self._disk = disk
        self._pace = pace
        self._run_on_node = run_on_node
        self._commit: GroupCommit | None = None
        self._lanes = {name: _Lane() for name in ("flush", "jobs", "long", "settle")}
        self._held: list[_Lane] = []
        self._posted: deque[Callable[[], None]] = deque()
        """What the loop is to be told, in this order."""
        self._told_us = 0
        """When the last of it is."""
        self._is_dead = False

    # ── the interface of log.driver ──────────────────────────────────────────────────────────────────────────────

    def start(self, commit: GroupCommit) -> None:
        """Begin to flush what group commit is given."""
        self._commit = commit

    def run(self, job: Callable[[], T], done: Done[T]) -> None:
        """Run a job beside the loop, one at a time and in order, then call `done` on the loop."""
        self._give("jobs", partial(_job, job, done), self._pace.job_us)

    def run_long(self, job: Callable[[], T], done: Done[T]) -> None:
        """Run a job like `run`, without holding up other jobs."""
        self._give("long", partial(_job, job, done), self._pace.job_us)

    def post(self, callback: Callable[[], None]) -> None:
        """Call back on the loop, after everything that was posted before."""
        if not self._is_dead:
            now_us = self._clock.now_us
            self._told_us = max(self._told_us, now_us + self._clock.between(*self._pace.post_us))
            self._posted.append(callback)
            self._clock.after(self._told_us - now_us, self._tell)

    def stop(self) -> None:
        """Finish everything that was given, as a clean stop does. What it completes is told at once."""
        commit = self._commit
        assert commit is not None
        while self._posted:
            self._posted.popleft()()
        while not self.is_idle:
            for lane in self._lanes.values():
                while lane.current is not None or lane.queue:
                    work = lane.current or lane.queue.popleft()[0]
                    lane.current = None
                    if (told := work()) is not None:
                        told()
            self._flush_all(commit)
        commit.ask_settling()
        self._flush_all(commit)
        self._is_dead = True

    # ── what the node and the simulation call ────────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Let the flush lane take what has gathered. Called after everything that happens on the node."""
        lane = self._lanes["flush"]
        commit = self._commit
        if commit is None or lane.current is not None or self._is_dead or commit.is_idle:
            return
        taken = commit.take(wait=False)
        if taken:
            self._begin(lane, partial(self._flush, commit, taken), self._clock.between(*self._pace.flush_us))

    def resume(self) -> None:
        """Let end what a hanging disk held up."""
        held, self._held = self._held, []
        for lane in held:
            lane.timer = self._clock.after(self._clock.between(*self._pace.flush_us), partial(self._end, lane))

    def crash(self) -> None:
        """Stop everything; what was under way may have come some of the way."""
        self._is_dead = True
        random = self._clock.random
        for lane in self._lanes.values():
            if lane.timer is not None:
                lane.timer.cancel()
            if lane.current is None:
                continue
            self._disk.fuse = None if random.random() < 0.2 else random.randrange(OPERATIONS_IN_FLIGHT_MAX + 1)
            with suppress(PowerLost):
                lane.current()
            self._disk.fuse = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return all(lane.current is None and not lane.queue for lane in self._lanes.values())

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _give(self, name: str, work: Work, pace_us: tuple[int, int]) -> None:
        if self._is_dead:
            return  # What is left to tidy up, the next start tidies up.
        lane, takes_us = self._lanes[name], self._clock.between(*pace_us)
        if lane.current is None:
            self._begin(lane, work, takes_us)
        else:
            lane.queue.append((work, takes_us))

    def _begin(self, lane: _Lane, work: Work, takes_us: int) -> None:
        lane.current = work
        lane.timer = self._clock.after(takes_us, partial(self._end, lane))

    def _end(self, lane: _Lane) -> None:
        if self._is_dead:
            return
        if self._pace.is_hanging:
            lane.timer = None
            self._held.append(lane)
            return
        work = lane.current
        assert work is not None
        lane.timer = None

        def happen() -> None:
            # Not before: a process that stands still begins nothing else on the same thread.
            lane.current = None
            if (told := work()) is not None:
                self.post(told)
            if lane.queue and lane.current is None:
                # What was queued for a slow disk is done by the disk there is now.
                following, takes_us = lane.queue.popleft()
                self._begin(lane, following, min(takes_us, max(self._pace.job_us[1], self._pace.flush_us[1])))

        self._run_on_node(happen)

    def _tell(self) -> None:
        if not self._is_dead and self._posted:
            self._run_on_node(self._posted.popleft())

    # ── flushing, as group commit's own thread does it ───────────────────────────────────────────────────────────

    def _flush(self, commit: GroupCommit, taken: list[Write] | Callable[[], None]) -> Callable[[], None] | None:
        told: Callable[[], None] | None = None
        if isinstance(taken, list):
            flush: Flush = commit.execute(taken)
            told = partial(commit.complete, flush)
        else:
            taken()
        if commit.begin_settling():
            self._give("settle", partial(_settle, commit), self._pace.flush_us)
        return told

    def _flush_all(self, commit: GroupCommit) -> None:
        while taken := commit.take(wait=False):
            if isinstance(taken, list):
                commit.complete(commit.execute(taken))
            else:
                taken()
            if commit.begin_settling():
                commit.complete_settling(commit.settle())


def _job(job: Callable[[], T], done: Done[T]) -> Callable[[], None]:
    try:
        result = job()
    except Exception as error:
        return partial(done, None, error)
    return partial(done, result, None)


def _settle(commit: GroupCommit) -> Callable[[], None]:
    return partial(commit.complete_settling, commit.settle())
