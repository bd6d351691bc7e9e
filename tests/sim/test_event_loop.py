"""Coroutines on virtual time: what asyncio promises them, and how they end with their node."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from walstream.node.supervision import supervise
from walstream.sim.checkers import Violation
from walstream.sim.clock import SECOND, Clock
from walstream.sim.disk import PowerLost, SimDisk
from walstream.sim.driver import Pace, SimDriver
from walstream.sim.event_loop import SimLoop


class World:
    """A loop with its clock and its driver."""

    def __init__(self) -> None:
        self.clock = Clock(1)
        self.is_failing = False
        driver = SimDriver(self.clock, SimDisk(self.clock.random), Pace(), self.run)
        self.loop = SimLoop(self.clock, driver, self.run, lambda: self.is_failing)
        self.seen: list[object] = []

    def run(self, callback: Callable[[], None]) -> None:
        with self.loop.running():
            callback()

    def play(self, *coroutines: Coroutine[Any, Any, object]) -> list[asyncio.Task[object]]:
        tasks = [self.loop.create_task(coroutine) for coroutine in coroutines]
        while self.clock.step():
            pass
        return tasks


def test_time_passes_for_who_sleeps_and_for_nobody_else() -> None:
    world = World()

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)
        world.seen.append((seconds, round(asyncio.get_running_loop().time(), 2)))

    world.play(sleep(3_600), sleep(2), sleep(0))
    assert world.seen == [(0, 0.0), (2, 2.0), (3_600, 3_600.0)]


def test_a_timeout_cancels_what_it_bounds_and_nothing_else() -> None:
    world = World()

    async def bounded(seconds: float) -> str:
        try:
            async with asyncio.timeout(1):
                await asyncio.sleep(seconds)
        except TimeoutError:
            return "late"
        return "in time"

    late, in_time = world.play(bounded(2), bounded(0.5))
    assert (late.result(), in_time.result()) == ("late", "in time")


def test_a_job_on_a_thread_returns_or_raises_later() -> None:
    world = World()

    async def job() -> int:
        return await asyncio.to_thread(lambda: 7)

    (done,) = world.play(job())
    assert done.result() == 7
    assert 0 < world.clock.now_us < SECOND
    world.is_failing = True
    with pytest.raises(OSError, match="Input/output") as caught:
        world.play(job())
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("error", [Violation("name", "text"), PowerLost()])
def test_a_lost_power_and_a_violation_pass_through_tasks_and_their_supervisors(error: BaseException) -> None:
    world = World()

    async def fail() -> None:
        raise error

    async def start() -> None:
        await supervise("task", fail)

    with pytest.raises(type(error)):
        world.play(start())


def test_nothing_happens_after_the_end_of_the_process() -> None:
    world = World()

    async def wait() -> None:
        try:
            await asyncio.sleep(1)
            world.seen.append("slept")
        finally:
            world.seen.append("closed")

    world.loop.create_task(wait())
    world.clock.step()
    world.loop.close()
    assert world.seen == ["closed"]
    world.loop.call_soon(world.seen.append, "called")
    while world.clock.step():
        pass
    assert world.seen == ["closed"]
