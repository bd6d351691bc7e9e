"""The typed client against a service on a log in memory: resuming, tokens, errors in our words."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from feed.frames import Written
from feed.memory import MemoryLog, Served, advance_clock, served, until
from walstream import feed as feed_package
from walstream.errors import (
    AckRefused,
    AuthenticationFailed,
    EntryTooLarge,
    LsnNotAvailable,
    NotAuthorized,
    OperationUnknown,
    SubscriberTooSlow,
    TokenExpired,
    UnreachableError,
    UsageError,
)
from walstream.feed import Client
from walstream.feed.client import Batch, Heartbeat, Op, Watermark
from walstream.feed.service.resume import resume_token
from walstream.positions import GlobalLsn

BASE = int(GlobalLsn.at_time(1_700_000_000_000))
T = TypeVar("T")


def lsn(number: int) -> GlobalLsn:
    return GlobalLsn(BASE + number)


async def memory(count: int, **more: Any) -> MemoryLog:
    log = MemoryLog()
    await log.append(*(Written(lsn(number), **more) for number in range(1, count + 1)))
    return log


async def using(feed: Served, act: Callable[[Client], T], **more: Any) -> T:
    """Run what a user of the client does, in a thread of its own."""

    def run() -> T:
        given = {"token": feed.token(role="admin", tenant=None, sub="root"), **more}
        with Client(f"127.0.0.1:{feed.port}", **given) as client:
            return act(client)

    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def work() -> None:
        try:
            result, error = run(), None
        except BaseException as caught:
            result, error = None, caught
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set_exception if error else done.set_result, error or result)

    # A thread that nobody waits for: a client that hangs fails its own test and no other.
    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wait_for(done, 30)


def first(stream: Any, count: int) -> list[int]:
    with stream:
        return [entry.lsn - BASE for entry in itertools.islice(stream, count)]


async def test_an_operation_of_a_newer_feed_is_told(tmp_path: Path) -> None:
    """With what came before it in hand, and where to go on with a newer client; a retry would find the same."""
    log = MemoryLog(frame_entries=1)
    await log.append(Written(lsn(1)), Written(lsn(2), op_type=99), Written(lsn(3)))
    async with served(tmp_path, log) as feed:

        def read(client: Client) -> list[GlobalLsn]:
            found: list[GlobalLsn] = []
            stream = client.subscribe("oldest", batch_size=1)
            with pytest.raises(OperationUnknown, match="has the operation 99") as caught:
                found.extend(entry.lsn for entry in stream)
            assert f"resume at {lsn(2)}" in str(caught.value)
            assert not caught.value.retryable
            assert stream.resume == lsn(2)
            return found

        found = await using(feed, read)
    assert found == [lsn(1)]


async def test_entries_come_in_order_from_where_one_asks(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(2500, value=b"words " * 50)) as feed:
        assert await using(feed, lambda c: first(c.subscribe(), 2500)) == list(range(1, 2501))
        for start in (lsn(2000), str(lsn(2000))):
            assert await using(feed, lambda c, start=start: first(c.subscribe(start), 3)) == [2000, 2001, 2002]
        await using(feed, lambda c: c.ack(lsn(7)))
        assert await using(feed, lambda c: first(c.subscribe(), 2)) == [7, 8]
        assert await using(feed, lambda c: first(c.subscribe("oldest"), 2)) == [1, 2]


async def test_the_lsn_0_is_a_place_of_its_own(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(20)) as feed:
        await using(feed, lambda c: c.ack(lsn(15)))
        assert await using(feed, lambda c: first(c.subscribe(c.lsn().oldest), 2)) == [1, 2]
        for start in (str(GlobalLsn(0)), resume_token(0)):
            assert await using(feed, lambda c, start=start: first(c.subscribe(start), 2)) == [1, 2]


async def test_an_entry_is_typed(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(1, tenant="acme", key=b"k")) as feed:
        [entry] = await using(feed, lambda c: list(itertools.islice(c.subscribe(), 1)))
        assert (entry.lsn, entry.op, entry.tenant, entry.topic) == (lsn(1), Op.PUT, "acme", "t")
        assert (entry.key, entry.value, entry.key_prefix) == (b"k", b"value", "walstream:acme:t:")


async def test_head_is_a_place_that_a_broken_stream_comes_back_to(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(5)) as feed:

        def act(client: Client) -> list[int]:
            stream = client.subscribe("head")
            loop.call_soon_threadsafe(lambda: asyncio.ensure_future(feed.log.append(Written(lsn(6)))))
            return first(stream, 1)

        loop = asyncio.get_running_loop()
        assert await using(feed, act) == [6]


async def test_resume_is_behind_what_was_handed_out(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(100)) as feed:

        def act(client: Client) -> list[int]:
            found: list[int] = []
            start: GlobalLsn | None = None
            while len(found) < 100:
                with client.subscribe(start, batch_size=20) as stream:
                    found += first(stream, min(7, 100 - len(found)))
                    start = stream.resume
            return found

        assert await using(feed, act) == list(range(1, 101))


async def test_iterated_again_it_goes_on_behind_the_last(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(100)) as feed:

        def act(client: Client) -> list[int]:
            with client.subscribe() as stream:
                return [entry.lsn - BASE for _ in range(5) for entry in itertools.islice(stream, 20)]

        assert await using(feed, act) == list(range(1, 101))


async def test_batches_heartbeats_and_watermarks(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(5), heartbeat_ms=100) as feed:

        def act(client: Client) -> list[Any]:
            found: list[Any] = []
            with client.subscribe(watermarks=True) as stream:
                for event in stream.events():
                    found.append(event)
                    if {type(one) for one in found} == {Batch, Heartbeat, Watermark}:
                        return found
            return found

        found = await using(feed, act)
        [batch] = [one for one in found if isinstance(one, Batch)]
        assert batch.resume == lsn(6)
        beats = [one for one in found if isinstance(one, Heartbeat)]
        assert beats[0] == Heartbeat(lsn(5), lsn(5), "t-0")


async def test_a_stream_goes_on_by_itself_when_the_feed_is_back(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(10)) as feed:
        found: list[int] = []

        def act(client: Client) -> None:
            found.extend(first(client.subscribe(), 20))

        reading = asyncio.create_task(using(feed, act))
        for number in range(11, 21):
            await until(lambda: feed.service.streams)
            await asyncio.sleep(0.05)
            for stream in list(feed.service.streams.values()):
                stream.end(UnreachableError("feed_stopping: the feed is being stopped"))
            await feed.log.append(Written(lsn(number)))
        await reading
        assert found == list(range(1, 21))


async def test_without_reconnecting_the_error_is_raised(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(10)) as feed:

        def act(client: Client) -> None:
            for _ in client.subscribe(reconnect=False):
                for stream in list(feed.service.streams.values()):
                    loop.call_soon_threadsafe(stream.end, UnreachableError("feed_stopping: it stops"))

        loop = asyncio.get_running_loop()
        with pytest.raises(UnreachableError, match=f"feed_stopping: it stops Resume at {lsn(11)}"):
            await using(feed, act)


async def test_a_newer_token_is_fetched_when_the_old_one_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = {"jwks": str(tmp_path / "jwks.json"), "clock_skew_s": 0}
    async with served(tmp_path, await memory(3), auth=auth) as feed:
        asked: list[str] = []

        def token() -> str:
            asked.append(feed.token(role="admin", tenant=None, sub="root", exp=int(time.time()) + 60))
            return asked[-1]

        reading = asyncio.create_task(using(feed, lambda c: first(c.subscribe(), 5), token=token))
        await until(lambda: feed.service.streams)
        advance_clock(monkeypatch, 60)
        await until(lambda: feed.service.ends["UNAUTHENTICATED"])
        await feed.log.append(Written(lsn(4)), Written(lsn(5)))
        assert await reading == [1, 2, 3, 4, 5]
        assert feed.service.ends["UNAUTHENTICATED"] >= 1


async def test_the_same_token_again_would_not_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auth = {"jwks": str(tmp_path / "jwks.json"), "clock_skew_s": 0}
    async with served(tmp_path, await memory(3), auth=auth) as feed:
        token = feed.token(role="admin", tenant=None, exp=int(time.time()) + 60)
        reading = asyncio.create_task(using(feed, lambda c: first(c.subscribe(), 5), token=token))
        await until(lambda: feed.service.streams)
        advance_clock(monkeypatch, 60)
        with pytest.raises(TokenExpired):
            await reading


async def test_a_token_file_is_read_for_each_call(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(3)) as feed:
        file = tmp_path / "token"
        file.write_text(feed.token(role="admin", tenant=None) + "\n")
        assert (await using(feed, lambda c: c.lsn(), token=None, token_file=file)).head == lsn(3)
        with pytest.raises(UsageError, match="cannot be read"):
            await using(feed, lambda c: c.lsn(), token=None, token_file=tmp_path / "missing")


@pytest.mark.parametrize(
    ("act", "kind", "said"),
    [
        (lambda c: first(c.subscribe(lsn(0)), 1), LsnNotAvailable, "perform a base snapshot"),
        (lambda c: c.ack(lsn(99)), AckRefused, "was not sent"),
        (lambda c: c.ack("x"), UsageError, "is not an LSN"),
        (lambda c: first(c.subscribe("x"), 1), UsageError, "is not an LSN"),
        (lambda c: c.subscribe(framing="x"), UsageError, "no framing"),
        (lambda c: first(c.subscribe(subscriber_id="a\n"), 1), UsageError, "subscriber id"),
    ],
)
async def test_errors_are_ours(tmp_path: Path, act: Any, kind: type[Exception], said: str) -> None:
    async with served(tmp_path, await memory(9)) as feed:
        feed.log.remove_before(lsn(3))
        with pytest.raises(kind, match=said) as caught:
            await using(feed, act)
        if isinstance(caught.value, LsnNotAvailable):
            assert (caught.value.oldest, caught.value.head) == (lsn(3), lsn(9))


async def test_errors_of_tokens_are_ours(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(9)) as feed:
        with pytest.raises(AuthenticationFailed, match="no JSON Web Token"):
            await using(feed, lambda c: c.lsn(), token="x")
        with pytest.raises(NotAuthorized, match="this tenant"):
            await using(feed, lambda c: first(c.subscribe(tenant="evil"), 1), token=feed.token())


async def test_an_entry_that_does_not_fit_is_told(tmp_path: Path) -> None:
    log = await memory(2)
    await log.append(Written(lsn(3), bytes(200_000)))
    async with served(tmp_path, log) as feed:
        with pytest.raises(EntryTooLarge, match="entry_too_large"):
            await using(feed, lambda c: first(c.subscribe(), 3), message_bytes_max=100_000)


async def test_one_that_is_too_slow_comes_back_where_it_was(tmp_path: Path) -> None:
    # More than sockets and channels take in by themselves.
    log = await memory(600, value=bytes(100_000))
    async with served(tmp_path, log, backpressure_timeout_ms=300, queue_entries_max=10) as feed:

        def act(client: Client) -> list[int]:
            found = []
            with client.subscribe(batch_size=10, compression=False) as stream:
                for entry in itertools.islice(stream, 600):
                    found.append(entry.lsn - BASE)
                    if entry.lsn - BASE == 30:
                        deadline = time.monotonic() + 10
                        while not feed.service.ends["RESOURCE_EXHAUSTED"] and time.monotonic() < deadline:
                            time.sleep(0.02)
            return found

        assert await using(feed, act) == list(range(1, 601))
        assert feed.service.ends["RESOURCE_EXHAUSTED"] >= 1
        assert SubscriberTooSlow.retryable


async def test_nobody_there() -> None:
    with Client("127.0.0.1:1", token="x") as client, pytest.raises(UnreachableError, match="No feed answers"):
        await asyncio.to_thread(lambda: first(client.subscribe(), 1))


def test_a_client_needs_a_token() -> None:
    with pytest.raises(UsageError, match="needs a token"):
        Client("127.0.0.1:1")


def test_the_package_brings_the_client() -> None:
    assert feed_package.Client is Client
    with pytest.raises(AttributeError):
        feed_package.Nothing  # noqa: B018
