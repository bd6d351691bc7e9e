"""What runs for as long as the feed does goes on after a bug: nothing would be told of it otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from walstream.feed.reading import ends, topics
from walstream.feed.reading.ends import Ends
from walstream.feed.reading.metrics import ReadingMetrics
from walstream.feed.reading.topics import Topics


@pytest.mark.parametrize("kind", ["topics", "ends"])
async def test_a_loop_goes_on_after_a_bug(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "REFRESH_S", 0.01)
    monkeypatch.setattr(ends, "QUIET_S", 0.02)
    nothing: Any = None
    rounds, has_gone_on = 0, asyncio.Event()

    def fails() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            has_gone_on.set()
        raise RuntimeError("a bug")

    async def fails_later() -> None:
        fails()

    if kind == "topics":
        looking = Topics(nothing, nothing, ReadingMetrics(), "c", (), ())
        monkeypatch.setattr(looking, "refresh", fails_later)
        loop = looking._look()
    else:
        noting = Ends(nothing, nothing, nothing)
        monkeypatch.setattr(noting, "_apply", fails)
        loop = noting._run()
    task = asyncio.create_task(loop)
    await asyncio.wait_for(has_gone_on.wait(), 5)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
