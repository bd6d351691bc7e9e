"""What must live as long as the node survives a failure, or ends the node."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from log.rig import Rig, values
from sim.test_event_loop import World
from walstream.log.driver import ThreadDriver
from walstream.node import supervision
from walstream.node.supervision import RESTART_S_MAX, RESTART_S_MIN, supervise


async def test_a_task_that_fails_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervision, "RESTART_S_MIN", 0.001)
    starts, is_well = 0, asyncio.Event()

    async def work() -> None:
        nonlocal starts
        starts += 1
        if starts <= 3:
            raise RuntimeError("of the same kind")
        is_well.set()
        await asyncio.Event().wait()

    task = supervise("a task", work)
    async with asyncio.timeout(10):
        await is_well.wait()
    assert not task.done()
    written = "".join(capfd.readouterr())
    assert written.count("task failed") == 3
    assert written.count("Traceback") == 1, "once for each kind of failure"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_backoff_grows_until_a_start_has_run_for_long() -> None:
    """By when that start began, not the first one: a task that fails at once must not be restarted in a hot loop."""
    world, starts = World(), list[float]()

    async def work() -> None:
        clock = asyncio.get_running_loop().time
        starts.append(clock())
        if len(starts) in (1, 13):
            await asyncio.sleep(2 * RESTART_S_MAX)
        if len(starts) == 15:
            return
        raise RuntimeError("planted")

    async def supervised() -> None:
        await supervise("a task", work)

    world.play(supervised())
    delays = [after - before for before, after in pairwise(starts)]
    delays[0] -= 2 * RESTART_S_MAX
    delays[12] -= 2 * RESTART_S_MAX
    growing = [min(RESTART_S_MIN * 2**number, RESTART_S_MAX) for number in range(12)]
    assert delays == pytest.approx([*growing, RESTART_S_MIN, 2 * RESTART_S_MIN], abs=0.01)


async def test_work_that_is_done_is_not_started_again() -> None:
    starts = 0

    async def work() -> None:
        nonlocal starts
        starts += 1

    await supervise("a task", work)
    assert starts == 1


def test_a_flush_thread_that_fails_is_told_to_the_node() -> None:
    """It would otherwise leave every write without an answer."""

    class Failing:
        on_gathering = None

        def take(self, *, wait: bool) -> list[object]:
            raise RuntimeError("a bug")

    errors: list[Exception] = []
    heard = threading.Event()

    def failed(error: Exception) -> None:
        errors.append(error)
        heard.set()

    def post(callback: Callable[[], None]) -> None:
        callback()

    ThreadDriver(post, failed=failed).start(Failing())  # type: ignore[arg-type]
    assert heard.wait(10)
    assert str(errors[0]) == "a bug"


def test_a_deleted_topic_whose_folder_stays_stops_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    rig.write(rig.topic("gone"), "a")
    kept = rig.topic("kept")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rig.disk, "rename", full)
        rig.store.delete_topics(["gone"])
        rig.driver.flush()
    rig.write(kept, "b")
    assert values(kept) == ["b"]
    again = rig.again()
    assert [path.name[:4] for path in (tmp_path / "topics").iterdir()] == ["kept"], "removed by the next start"
    assert values(again.store.partition("kept", 0)) == ["b"]
