"""Changes of the catalogue, awaited: they are durable, and the log has their partitions, before they return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from walstream.cluster.local import Change
    from walstream.log.store import LogStore


async def change_catalogue(store: LogStore, plan: Callable[[], Change | None]) -> Change | None:
    """Plan a change behind those before it and have it; raises what `plan` raises, or what the disk refuses.

    A change that has been planned is carried out even if the caller is cancelled.
    """
    future: asyncio.Future[Change | None] = asyncio.get_running_loop().create_future()

    def done(made: Change | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(made)
        else:
            future.set_exception(error)

    store.changes.submit(plan, done)
    return await future
