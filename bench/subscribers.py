"""Subscribers of the feed in a process of their own: streams that count what comes and keep none of it.

A client that makes an object of every entry spends more time on it than the feed does, so what the feed sends is
counted here by the framing of a batch alone: tag and length of each entry, and the LSNs of the first and the last one.
Nothing is taken on trust all the same: entries of one partition must follow each other without a gap or a repetition,
and a stream ends when it has as many as were written.

Reads what to do as a line of JSON from standard input, answers a line when it is connected, begins with the next line,
says so when every stream has brought something, and ends with a line that tells what came and when. Times are those of
the clock that all processes of a machine share.

    count    so many entries on each stream, as fast as they come
    times    so many marked entries on each stream, and when each of them came
    hold     one response on each stream, and no more: subscribers that stand in the way
    parse    `walstream.feed.Client` on one stream, every entry an object that was proved by its checksum
"""

from __future__ import annotations

import array
import asyncio
import base64
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

SUBSCRIBE = "/kdb.wal.v1.WalStream/Subscribe"
RESPONSE_BATCH, RESPONSE_ERROR, ENTRY, FIRST_LSN, LAST_LSN = 0x0A, 0x1A, 0x0A, 0x12, 0x1A
MARK = re.compile(rb"<(\d{10})>")
"""What the value of a marked entry begins with: its number."""
PLACES = 1_000
"""LSNs at which a stream could begin, of all batches that came: no more than these are told."""


def length(data: bytes, at: int) -> tuple[int, int]:
    """Return a length and the place behind it."""
    size = shift = 0
    while (byte := data[at]) >= 0x80:
        size |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return size | byte << shift, at + 1


class Stream:
    """What one stream has brought so far."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.entries = self.batches = self.size_bytes = 0
        self.first_at = self.last_at = 0.0
        self.places: list[str] = []
        self._next: tuple[int, int] | None = None

    def take(self, data: bytes, now: float) -> None:
        """Count a response."""
        if data[0] == RESPONSE_ERROR:
            raise RuntimeError(data[2:].decode(errors="replace"))
        if data[0] != RESPONSE_BATCH:
            return
        _, at = length(data, 1)
        count = 0
        while data[at] == ENTRY:
            # Two bytes say how long most entries are.
            size = data[at + 1]
            if size < 0x80:
                at += 2 + size
            elif (high := data[at + 2]) < 0x80:
                at += 3 + (size & 0x7F | high << 7)
            else:
                size, at = length(data, at + 1)
                at += size
            count += 1
        assert data[at] == FIRST_LSN, "behind the entries stands the LSN of the first"
        assert data[at + 40] == LAST_LSN, "and that of the last"
        self._follow(data[at + 2 : at + 40], data[at + 42 : at + 80], count)
        self.first_at = self.first_at or now
        self.last_at = now
        self.entries += count
        self.batches += 1
        self.size_bytes += len(data)

    def _follow(self, first: bytes, last: bytes, count: int) -> None:
        """Look whether a batch is whole and follows the one before, when it is of one partition."""
        self.places.append(first.decode())
        region, index = int(first[17:27]), int(first[28:])
        if region == int(last[17:27]) and int(last[28:]) - index + 1 != count:
            raise RuntimeError(f"{count} entries came from {first.decode()} to {last.decode()}")
        if self._next is not None and self._next[0] == region and self._next[1] != index:
            raise RuntimeError(f"{first.decode()} came where the index {self._next[1]} was due")
        self._next = (int(last[17:27]), int(last[28:]) + 1)


class TimedStream(Stream):
    """Also notes when each marked entry came. A stream over several partitions is proved by the marks."""

    def __init__(self, wanted: int) -> None:
        super().__init__(wanted)
        self.at = array.array("d", bytes(8 * wanted))

    def take(self, data: bytes, now: float) -> None:
        if data[0] == RESPONSE_ERROR:
            raise RuntimeError(data[2:].decode(errors="replace"))
        for number in MARK.findall(data):
            if self.at[int(number)]:
                raise RuntimeError(f"the entry {int(number)} came twice")
            self.at[int(number)] = now
            self.entries += 1
        self.first_at = self.first_at or now
        self.last_at = now
        self.batches += 1
        self.size_bytes += len(data)


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


class Subscriber:
    """One stream over a connection of its own."""

    def __init__(self, address: str, token: str, request: bytes, stream: Stream, *, is_held: bool) -> None:
        # Channels to the same address would share one connection otherwise.
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 * 1024 * 1024))
        self.channel = grpc.aio.insecure_channel(address, options)
        self.metadata = (("authorization", f"Bearer {token}"),)
        self.request = request
        self.stream = stream
        self.has_begun = asyncio.Event()
        self.go_on = asyncio.Event()
        if not is_held:
            self.go_on.set()

    async def follow(self) -> None:
        """Read until the stream has brought everything."""
        stream, clock = self.stream, time.perf_counter
        subscribe: Any = self.channel.unary_stream(SUBSCRIBE)
        call = subscribe(self.request, metadata=self.metadata)
        while stream.entries < stream.wanted:
            data = await call.read()
            if data is grpc.aio.EOF:
                raise RuntimeError(f"the stream has ended: {await call.details()}")
            stream.take(data, clock())
            if stream.entries:
                self.has_begun.set()
                await self.go_on.wait()
        call.cancel()


def save(path: Path, streams: Sequence[Stream]) -> None:
    """Write when each entry came, stream by stream."""
    with path.open("wb") as file:
        for stream in streams:
            assert isinstance(stream, TimedStream), "asked for times"
            stream.at.tofile(file)


async def count(task: dict[str, Any]) -> None:
    kind, is_held = TimedStream if task["mode"] == "times" else Stream, task["mode"] == "hold"
    subscribers = [
        Subscriber(task["address"], task["token"], base64.b64decode(request), kind(task["entries"]), is_held=is_held)
        for request in task["requests"]
    ]
    await asyncio.gather(*(one.channel.channel_ready() for one in subscribers))
    say(ready=True)
    await asyncio.to_thread(sys.stdin.readline)
    begun, busy = time.perf_counter(), time.process_time()
    running: asyncio.Future[Any] = asyncio.gather(*(one.follow() for one in subscribers))
    beginning: asyncio.Future[Any] = asyncio.gather(*(one.has_begun.wait() for one in subscribers))
    await asyncio.wait({running, beginning}, return_when=asyncio.FIRST_COMPLETED)
    if beginning.done():
        say(first=True)
    await running
    busy = time.process_time() - busy
    await asyncio.gather(*(one.channel.close() for one in subscribers))
    streams = [one.stream for one in subscribers]
    if task["mode"] == "times":
        save(Path(task["path"]), streams)
    places = streams[0].places
    say(
        begun=begun,
        ended=max(stream.last_at for stream in streams),
        entries=sum(stream.entries for stream in streams),
        batches=sum(stream.batches for stream in streams),
        size_bytes=sum(stream.size_bytes for stream in streams),
        busy_s=busy,
        places=places[:: max(1, len(places) // PLACES)],
    )


def parse(task: dict[str, Any]) -> None:
    from walstream.feed import Client

    with Client(task["address"], token=task["token"]) as client:
        client.lsn()
        say(ready=True)
        sys.stdin.readline()
        begun, busy = time.perf_counter(), time.process_time()
        entries = 0
        with client.subscribe("oldest", topics=task["topics"], compression=task["compression"]) as stream:
            for batch in stream.batches():
                if not entries:
                    say(first=True)
                entries += len(batch.entries)
                if entries >= task["entries"]:
                    break
        ended = time.perf_counter()
    busy = time.process_time() - busy
    say(begun=begun, ended=ended, entries=entries, batches=0, size_bytes=0, busy_s=busy, places=[])


def main() -> None:
    task = json.loads(sys.stdin.readline())
    if task["mode"] == "parse":
        parse(task)
    else:
        uvloop.run(count(task))


if __name__ == "__main__":
    main()
