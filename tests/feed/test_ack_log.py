"""What the log of acknowledgements does when something in it fails; the rest is tested with a real log."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from walstream.capture.kafka import LogAddress
from walstream.feed.service import ack_log as module
from walstream.feed.service.ack_log import AckLog
from walstream.feed.service.watermarks import Subscriber, Watermarks

ANN = Subscriber("replication", "acme", "ann")


async def test_a_record_that_cannot_be_taken_in_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    marks, changed = Watermarks(60_000), []
    acks = AckLog(LogAddress("127.0.0.1:1"), marks, changed.append)
    fold = marks.fold

    def fails(key: bytes, value: bytes | None) -> Subscriber | None:
        if key == b"strange":
            raise RuntimeError("a bug")
        return fold(key, value)

    monkeypatch.setattr(marks, "fold", fails)
    waiting = asyncio.create_task(acks._wait_until_folded(1))
    await asyncio.sleep(0)
    acks._fold([(b"strange", b""), (ANN.key("ack"), Watermarks.record(7, 0))], 2)
    await asyncio.wait_for(waiting, 5)
    assert (marks.acked(ANN), changed) == (7, [ANN])


@pytest.mark.parametrize("work", ["_read", "_serve_deliveries"])
async def test_a_thread_goes_on_after_a_bug(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    acks = AckLog(LogAddress("127.0.0.1:1"), Watermarks(60_000), lambda _: None)
    rounds = 0

    def fails(_: object) -> None:
        nonlocal rounds
        rounds += 1
        if rounds < 3:
            raise RuntimeError("a bug")
        acks._is_closing.set()

    monkeypatch.setattr(acks, "_take", fails)
    acks._producer = SimpleNamespace(poll=fails, flush=lambda _: None)  # type: ignore[assignment]
    await asyncio.wait_for(asyncio.to_thread(getattr(acks, work)), 10)
    assert rounds == 3
