"""Where the frames of a subscription come from: one way for each framing, behind one interface.

Owns the choice, and from which LSN a demand begins. A framing tells where it begins and ends, and makes a source of
frames from an LSN on, with the filter that is left to be applied to them: everything behind it is the same for all of
them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from walstream.errors import LsnNotAvailable, NotAuthorized, UnsupportedVersion
from walstream.feed import wal_pb2
from walstream.feed.reading.frames import Filter
from walstream.feed.service.demand import Demand
from walstream.feed.service.watermarks import Covered
from walstream.positions import GlobalLsn

if TYPE_CHECKING:
    from walstream.feed.reading.reading import FrameSource, Reading

OLDEST_ATTEMPTS: Final = 5
"""The log may lose its oldest entries between being asked for them and being read."""

AHEAD_MS: Final = 60_000
"""How far a start may be ahead of the clock and of everything that is known here. A few seconds are ordinary: resolved
positions run ahead, clocks differ, another feed knows more. No LSN of this log is further ahead, so who names one has
it from elsewhere, and would wait in silence while everything that is written passes it by."""

AHEAD_WAIT_S: Final = 1.0
AHEAD_LOOK_S: Final = 0.05


class Opened(NamedTuple):
    """A source that stands at its beginning."""

    source: FrameSource
    entries: Filter
    """Which entries of its frames the subscriber gets."""
    start: int


class Framing(NamedTuple):
    """One way to have the log."""

    open: Callable[[Reading, Demand, int], Awaitable[Opened]]
    """Raises LsnNotAvailable."""
    oldest: Callable[[Reading, Demand], Awaitable[int]]
    """The LSN from which on everything is there."""
    coming: Callable[[Reading, Demand], Awaitable[int]]
    """The first LSN that what comes now can have."""


async def _records(reading: Reading, demand: Demand, start: int) -> Opened:
    if demand.subscriber.role != "admin" and (own := reading.own_topics(demand.entries.topics)):
        raise NotAuthorized(f"{own[0][:100]} is a topic of walstream's own.", "Those belong to no tenant.")
    is_new = demand.begin in ("oldest", "head")
    return Opened(await reading.subscribe(start, demand.entries.topics, is_new=is_new), demand.entries, start)


async def _oldest_record(reading: Reading, demand: Demand) -> int:
    return await reading.oldest(demand.entries.topics)


async def _coming_record(reading: Reading, _: Demand) -> int:
    """Return what is right behind the head: what is not resolved yet may still come below it."""
    head, resolved = reading.head(), reading.resolved()
    return (min(head, resolved) if resolved else head) + 1


async def _transactions(reading: Reading, demand: Demand, start: int) -> Opened:
    capture = await reading.transactions.of(demand.capture)
    source = await capture.subscribe(start, demand.entries, demand.limits.entry_bytes_max)
    # What the subscriber gets was chosen row by row.
    return Opened(source, Filter(), start)


async def _oldest_transaction(reading: Reading, demand: Demand) -> int:
    return await (await reading.transactions.of(demand.capture)).oldest()


async def _coming_transaction(reading: Reading, demand: Demand) -> int:
    return await (await reading.transactions.of(demand.capture)).head() + 1


FRAMINGS: Final[Mapping[int, Framing]] = {
    wal_pb2.RECORDS: Framing(_records, _oldest_record, _coming_record),
    wal_pb2.TRANSACTIONS: Framing(_transactions, _oldest_transaction, _coming_transaction),
}


class Extent(NamedTuple):
    """Where a framing begins and ends; 0: nothing is there, or was removed."""

    oldest: int
    head: int
    resolved: int
    """No entry with an LSN up to here will come any more; 0: nothing is known yet."""


async def extent(reading: Reading, framing: int, capture: str) -> Extent:
    """Return where a framing begins and ends now. Raises what `Transactions.of` does."""
    if framing == wal_pb2.TRANSACTIONS:
        transactions = await reading.transactions.of(capture)
        head = await transactions.head()
        return Extent(await transactions.oldest(), head, head)
    return Extent(await reading.oldest(), reading.head(), reading.resolved())


async def open_source(reading: Reading, demand: Demand, acked: int, covered: Covered) -> Opened:
    """Return the source of a demand whose subscriber has acknowledged this LSN. Raises LsnNotAvailable, LogUnfit.

    Of what is `covered` nothing was kept for it, because it has had everything: when a place in there, at or after the
    one that it acknowledged, is not there any more, it misses nothing and begins behind.
    """
    framing = FRAMINGS.get(demand.framing)
    if framing is None:
        raise UnsupportedVersion(
            f"This feed does not know the framing {demand.framing}.", "RECORDS is 0, TRANSACTIONS is 1."
        )
    if demand.subscriber.role == "admin":
        await reading.look_again(demand.entries.topics)
        reading.check_is_fit(demand.entries.topics)
    if demand.begin == "acked" and not acked:
        demand = replace(demand, begin="oldest")
    begin = acked if demand.begin == "acked" else demand.begin
    if begin == "head":
        begin = await framing.coming(reading, demand)
    if isinstance(begin, int):
        await _check_is_no_future(reading, begin)
        try:
            return await framing.open(reading, demand, begin)
        except LsnNotAvailable:
            if not acked or covered.choice != demand.choice or not max(acked, covered.start) <= begin <= covered.end:
                raise
            return await framing.open(reading, demand, covered.end + 1)
    for attempt in range(OLDEST_ATTEMPTS):
        try:
            return await framing.open(reading, demand, await framing.oldest(reading, demand))
        except LsnNotAvailable:
            if attempt == OLDEST_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


async def _check_is_no_future(reading: Reading, start: int) -> None:
    """Refuse what no log can have reached, unless it is there in a moment: a feed that has just started learns it."""
    deadline_s = time.monotonic() + AHEAD_WAIT_S
    while _is_ahead(reading, start):
        if time.monotonic() > deadline_s:
            raise LsnNotAvailable.beyond(GlobalLsn(start), GlobalLsn(reading.head()))
        await asyncio.sleep(AHEAD_LOOK_S)


def _is_ahead(reading: Reading, start: int) -> bool:
    known_ms = max(GlobalLsn(max(reading.head(), reading.resolved())).time_ms, time.time_ns() // 1_000_000)
    return GlobalLsn(start).time_ms > known_ms + AHEAD_MS
