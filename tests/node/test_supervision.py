"""What must live as long as the node survives a failure, or ends the node."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from log.rig import Rig, values
from walstream.log.driver import ThreadDriver
from walstream.node import supervision
from walstream.node.supervision import supervise


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
