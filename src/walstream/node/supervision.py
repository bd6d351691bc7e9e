"""Tasks that live as long as the node.

Invariant: such a task ends only when its work is done or it is cancelled. One that raises is logged, with its traceback
unless it failed the same way before, and started again with backoff.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from walstream import logs

log = logs.get(__name__)

RESTART_S_MIN = 0.1
RESTART_S_MAX = 30.0
"""Between a failure and the next start. A task that has run for longer than this begins with the shortest again."""


def supervise(name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Start a task that outlives the failures of its work."""
    return asyncio.get_running_loop().create_task(_keep(name, work), name=name)


async def _keep(name: str, work: Callable[[], Awaitable[None]]) -> None:
    clock = asyncio.get_running_loop().time
    delay_s, known = RESTART_S_MIN, ""
    while True:
        began = clock()
        try:
            await work()
            return
        except Exception as error:
            if clock() - began > RESTART_S_MAX:
                delay_s = RESTART_S_MIN
            failure = repr(error)
            log.error(
                "task failed", task=name, restart_s=delay_s, error=failure,
                exc_info=error if failure != known else None,
            )  # fmt: skip
            known = failure
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, RESTART_S_MAX)
