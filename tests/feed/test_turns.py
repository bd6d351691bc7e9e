"""One subscriber's work does not keep the others waiting: it is done in pieces, between which they have their turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

from feed.frames import Written
from feed.memory import MemoryLog, served, until
from walstream.feed.service.subscription import TURN_FRAMES
from walstream.positions import GlobalLsn

BASE = int(GlobalLsn.at_time(1_700_000_000_000))
FRAMES = 640


async def test_frames_with_nothing_for_a_subscriber(tmp_path: Path) -> None:
    log = MemoryLog(frame_entries=1)
    await log.append(*(Written(BASE + number, tenant="other") for number in range(FRAMES)))
    places: set[int] = set()

    async def look() -> None:
        while True:
            places.update(stream.source.position for stream in feed.service.streams.values())
            await asyncio.sleep(0)

    async with served(tmp_path, log) as feed:
        looking = asyncio.create_task(look())
        call = feed.subscribe(feed.metadata(tenant="acme"), start_lsn="oldest")
        await until(lambda: log.reads == FRAMES)
        looking.cancel()
        call.cancel()
    assert len(places) >= FRAMES // TURN_FRAMES
