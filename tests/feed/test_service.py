"""The service over real gRPC, on a log in memory: what each call is answered with, and how streams end."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from feed.frames import Written
from feed.memory import MemoryLog, Served, advance_clock, served, until
from walstream.errors import UnreachableError
from walstream.feed import wal_pb2
from walstream.feed.service import service as service_module
from walstream.feed.service import subscription as subscription_module
from walstream.feed.service.batching import batch_response, decompress
from walstream.feed.service.resume import position_of, resume_token
from walstream.positions import GlobalLsn

BASE = int(GlobalLsn.at_time(1_700_000_000_000))


def lsn(number: int) -> int:
    return BASE + number


def text(number: int) -> str:
    return str(GlobalLsn(lsn(number)))


def entries(first: int, end: int, **more: Any) -> list[Written]:
    return [Written(lsn(number), **more) for number in range(first, end)]


def numbers(batch: wal_pb2.WalBatch) -> list[int]:
    return [int(GlobalLsn.parse(entry.lsn)) - BASE for entry in batch.entries]


async def read(call: Any, count: int) -> list[int]:
    """Read until so many entries have come."""
    found: list[int] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += numbers((await call.read()).batch)
    return found


async def ended(call: Any) -> tuple[list[wal_pb2.WalResponse], grpc.aio.AioRpcError]:
    """Read to the end of the stream, which must be an error."""
    found = []
    async with asyncio.timeout(30):
        while True:
            try:
                found.append(await call.read())
            except grpc.aio.AioRpcError as error:
                return found, error


def trailing(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    return dict(error.trailing_metadata() or ())


async def memory(count: int, **more: Any) -> MemoryLog:
    log = MemoryLog()
    await log.append(*entries(1, count + 1, **more))
    return log


async def have_one_among_many(feed: Served, log: MemoryLog) -> Any:
    """A tenant gets and acknowledges its only entry, and the log loses that and others' behind it."""
    await log.append(*entries(5, 6, tenant="acme"), *entries(6, 60, tenant="other"))
    metadata = feed.metadata(role="replication", tenant="acme", sub="quiet")
    call = feed.subscribe(metadata, start_lsn="oldest")
    assert await read(call, 1) == [5]
    await feed.ack(lsn(5), metadata)
    assert (await call.read()).heartbeat.resolved_lsn == text(59)
    call.cancel()
    await until(lambda: not feed.service.streams)
    log.remove_before(lsn(30))
    return metadata


class TestWhereItBegins:
    async def test_at_the_lsn_itself(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(10)) as feed:
            assert await read(feed.subscribe(start_lsn=text(4)), 7) == list(range(4, 11))

    async def test_behind_a_batch_by_its_token(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(10)) as feed:
            first = await feed.subscribe(start_lsn="oldest", batch_size_hint=3).read()
            assert numbers(first.batch) == [1, 2, 3]
            assert await read(feed.subscribe(resume_token=first.batch.resume_token), 7) == list(range(4, 11))

    async def test_at_the_last_acknowledged_or_the_oldest(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(10)) as feed:
            assert await read(feed.subscribe(), 10) == list(range(1, 11))
            await feed.ack(lsn(6))
            assert await read(feed.subscribe(), 5) == list(range(6, 11))
            assert await read(feed.subscribe(subscriber_id="another"), 10) == list(range(1, 11))
            feed.log.remove_before(lsn(3))
            assert await read(feed.subscribe(subscriber_id="another"), 8) == list(range(3, 11))

    async def test_who_has_acknowledged_all_that_came_misses_nothing(self, tmp_path: Path) -> None:
        """Nothing is kept for it where others' entries were: neither its last one, nor the place behind it."""
        log = await memory(4, tenant="other")
        async with served(tmp_path, log, heartbeat_ms=20) as feed:
            metadata = await have_one_among_many(feed, log)
            await log.append(*entries(60, 61, tenant="acme"))
            for start in ("", text(5), text(6), text(20)):
                assert await read(feed.subscribe(metadata, start_lsn=start), 1) == [60]
            _, error = await ended(feed.subscribe(metadata, start_lsn=text(4)))
            assert error.code() is grpc.StatusCode.OUT_OF_RANGE, "it was asked for once more, and is gone"
            _, error = await ended(feed.subscribe(feed.admin(), start_lsn=text(6)))
            assert error.code() is grpc.StatusCode.OUT_OF_RANGE

    async def test_who_chooses_other_entries_is_not_taken_to_have_had_them(self, tmp_path: Path) -> None:
        log = await memory(4, tenant="other")
        async with served(tmp_path, log, heartbeat_ms=20) as feed:
            metadata = await have_one_among_many(feed, log)
            for start in ("", text(6)):
                _, error = await ended(feed.subscribe(metadata, start_lsn=start, key_prefix_filter="x"))
                assert error.code() is grpc.StatusCode.OUT_OF_RANGE

    async def test_with_what_comes_now(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(10)) as feed:
            call = feed.subscribe(start_lsn="head")
            await call.wait_for_connection()
            await until(lambda: feed.service.streams)
            await feed.log.append(*entries(11, 13))
            assert await read(call, 2) == [11, 12]

    @pytest.mark.parametrize(
        ("request_", "said"),
        [
            ({"start_lsn": "7"}, "is not an LSN"),
            ({"resume_token": b"x"}, "resume token"),
            ({"resume_token": resume_token(7), "start_lsn": text(1)}, "contradict"),
            ({"credit_entries": 10**9}, "credit_entries"),
            ({"message_bytes_max": 10}, "message_bytes_max"),
            ({"subscriber_id": "a\nb"}, "subscriber id"),
            ({"key_prefix_filter": "x" * 5000}, "key_prefix_filter"),
            ({"topics": ["x" * 200] * 100}, "topics"),
        ],
    )
    async def test_what_cannot_be(self, tmp_path: Path, request_: dict[str, Any], said: str) -> None:
        async with served(tmp_path, await memory(1)) as feed:
            found, error = await ended(feed.subscribe(**request_))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in error.details()
            assert [one.WhichOneof("payload") for one in found] == ["error"]

    async def test_a_framing_that_nobody_knows(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(1)) as feed:
            _, error = await ended(feed.subscribe(framing=17))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED


class TestBatches:
    async def test_catching_up_comes_in_full_batches(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(2500), batch_entries_max=1000) as feed:
            feed.log.frame_entries = 10_000
            call = feed.subscribe(start_lsn="oldest")
            assert [len((await call.read()).batch.entries) for _ in range(3)] == [1000, 1000, 500]

    async def test_a_smaller_hint_is_heeded_and_a_larger_one_is_not(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(100), batch_entries_max=20) as feed:
            assert len((await feed.subscribe(start_lsn="oldest", batch_size_hint=7).read()).batch.entries) == 7
            assert len((await feed.subscribe(start_lsn="oldest", batch_size_hint=70).read()).batch.entries) == 20

    async def test_each_kind_of_compression_when_it_is_accepted(self, tmp_path: Path) -> None:
        log = await memory(1000, value=b"some words " * 20)
        async with served(tmp_path, log) as feed:
            for count, accepted, expected in (
                (1000, [wal_pb2.SNAPPY, wal_pb2.ZSTD], wal_pb2.ZSTD),
                (1000, [wal_pb2.SNAPPY], wal_pb2.SNAPPY),
                (50, [wal_pb2.SNAPPY, wal_pb2.ZSTD], wal_pb2.SNAPPY),
                (5, [wal_pb2.SNAPPY, wal_pb2.ZSTD], wal_pb2.NONE),
                (1000, [], wal_pb2.NONE),
            ):
                log.frame_entries = 1000
                call = feed.subscribe(start_lsn="oldest", batch_size_hint=count, accept_compression=accepted)
                batch = (await call.read()).batch
                assert batch.compression == expected
                if expected:
                    assert not batch.entries
                    batch = wal_pb2.WalBatch.FromString(decompress(expected, batch.compressed))
                assert numbers(batch) == list(range(1, count + 1))
                call.cancel()

    async def test_a_giant_goes_alone(self, tmp_path: Path) -> None:
        log = MemoryLog()
        await log.append(*entries(1, 4), Written(lsn(4), bytes(3_000_000)), *entries(5, 8))
        async with served(tmp_path, log) as feed:
            call = feed.subscribe(start_lsn="oldest")
            assert [numbers((await call.read()).batch) for _ in range(3)] == [[1, 2, 3], [4], [5, 6, 7]]

    async def test_an_entry_that_the_channel_does_not_take(self, tmp_path: Path) -> None:
        log = MemoryLog()
        await log.append(*entries(1, 4), Written(lsn(4), bytes(100_000)), *entries(5, 8))
        async with served(tmp_path, log) as feed:
            found, error = await ended(feed.subscribe(start_lsn="oldest", message_bytes_max=50_000))
            assert numbers(found[0].batch) == [1, 2, 3]
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert f"entry_too_large: the entry at {text(4)}" in error.details()
            assert trailing(error)["walstream-resume-lsn"] == text(4)

    async def test_one_entry_is_sent_at_once(self, tmp_path: Path) -> None:
        async with served(tmp_path, coalesce_ms=5000) as feed:
            call = feed.subscribe(start_lsn="oldest")
            await until(lambda: feed.service.streams)
            for number in range(1, 20):
                began = time.monotonic()
                await feed.log.append(*entries(number, number + 1))
                assert await read(call, 1) == [number]
                assert time.monotonic() - began < 2.0

    async def test_equal_filters_share_their_batches(self, tmp_path: Path) -> None:
        async with served(tmp_path) as feed:
            calls = [feed.subscribe(start_lsn="oldest") for _ in range(5)]
            await until(lambda: len(feed.service.streams) == 5)
            await feed.log.append(*entries(1, 11))
            for call in calls:
                assert await read(call, 10) == list(range(1, 11))
            assert (feed.service.cuts.hits, feed.service.cuts.misses) == (4, 1)


class TestHeartbeats:
    async def test_an_idle_stream_says_how_far_it_is(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(3), heartbeat_ms=50) as feed:
            call = feed.subscribe(start_lsn="oldest")
            assert await read(call, 3) == [1, 2, 3]
            beat = (await call.read()).heartbeat
            assert (beat.current_lsn, beat.resolved_lsn, beat.held_back_by) == (text(3), text(3), "t-0")
            metadata = feed.metadata(sub="somebody", role="replication", tenant="acme")
            beat = (await feed.subscribe(metadata, start_lsn="head").read()).heartbeat
            assert (beat.current_lsn, beat.held_back_by) == (text(3), ""), "no tenant is told which topics there are"

    async def test_who_is_sent_nothing_hears_how_far_it_is(self, tmp_path: Path) -> None:
        log = await memory(5000, tenant="other")
        async with served(tmp_path, log, heartbeat_ms=50) as feed:
            call = feed.subscribe(start_lsn="oldest", tenant_filter="acme")
            beats = [(await call.read()).heartbeat for _ in range(3)]
            assert beats[-1].resolved_lsn == text(5000)

    async def test_none_while_entries_flow(self, tmp_path: Path) -> None:
        async with served(tmp_path, heartbeat_ms=300) as feed:
            call = feed.subscribe(start_lsn="oldest")
            await until(lambda: feed.service.streams)
            for number in range(1, 15):
                await feed.log.append(*entries(number, number + 1))
                await asyncio.sleep(0.05)
            assert feed.service.sent.heartbeats == 0
            assert await read(call, 14) == list(range(1, 15))

    async def test_the_watermark_is_told_when_it_moves(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(9), heartbeat_ms=60_000) as feed:
            call = feed.subscribe(start_lsn="oldest", accept_watermarks=True)
            assert await read(call, 9) == list(range(1, 10))
            await feed.ack(lsn(5))
            async with asyncio.timeout(10):
                told = ""
                while told != text(5):
                    told = (await call.read()).watermark.watermark_lsn
            await feed.ack(lsn(7))
            assert (await call.read()).watermark.watermark_lsn == text(7)


class TestEnds:
    async def test_what_is_gone_is_said_in_the_words_of_the_rfc(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(10)) as feed:
            feed.log.remove_before(lsn(5))
            found, error = await ended(feed.subscribe(start_lsn=text(2)))
            words = (
                f"lsn_not_available: start_lsn={text(2)} older than oldest_lsn={text(5)}; "
                f"perform a base snapshot and restart from head_lsn={text(10)}"
            )
            assert [one.error for one in found] == [words]
            assert error.code() is grpc.StatusCode.OUT_OF_RANGE
            assert words in error.details()
            assert trailing(error)["walstream-oldest-lsn"] == text(5)
            assert trailing(error)["walstream-head-lsn"] == text(10)

    async def test_what_is_removed_under_a_stream_ends_it(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(10)) as feed:
            call = feed.subscribe(start_lsn="oldest")
            assert await read(call, 10) == list(range(1, 11))
            feed.log.remove_before(lsn(20))
            await feed.log.append(*entries(20, 22))
            found, error = await ended(call)
            assert found[-1].error.startswith("lsn_not_available: ")
            assert error.code() is grpc.StatusCode.OUT_OF_RANGE
            assert feed.log.open_sources == 0

    async def test_a_subscriber_that_takes_nothing(self, tmp_path: Path) -> None:
        log = await memory(4000, value=bytes(10_000))
        settings = {"backpressure_timeout_ms": 500, "queue_entries_max": 100}
        async with served(tmp_path, log, **settings) as feed:
            call = feed.subscribe(start_lsn="oldest", batch_size_hint=10)
            await call.read()
            await until(lambda: not feed.service.streams, 20)
            assert feed.log.open_sources == 0
            reads = feed.log.reads
            found, error = await ended(call)
            assert found[-1].error == "backpressure_timeout: subscriber too slow"
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            got = [number for one in found for number in numbers(one.batch)]
            assert got == list(range(got[0], got[-1] + 1))
            assert trailing(error)["walstream-resume-lsn"] == text(got[-1] + 1)
            assert position_of(trailing(error)["walstream-resume-token-bin"]) == lsn(got[-1] + 1)
            assert log.reads == reads < 40, "nothing was read ahead of what it takes"

    async def test_a_slow_one_that_moves_lives(self, tmp_path: Path) -> None:
        log = await memory(300, value=bytes(100_000))
        # Longer than a busy machine stands still, and much shorter than all of it takes.
        settings = {"backpressure_timeout_ms": 4000, "queue_entries_max": 20}
        async with served(tmp_path, log, **settings) as feed:
            call = feed.subscribe(start_lsn="oldest", batch_size_hint=10)
            found: list[int] = []
            while len(found) < 300:
                found += numbers((await call.read()).batch)
                await asyncio.sleep(0.2)
            assert found == list(range(1, 301))

    async def test_without_credit_nothing_comes(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(100), backpressure_timeout_ms=1500) as feed:
            call = feed.subscribe(start_lsn="oldest", credit_entries=30)
            assert await read(call, 30) == list(range(1, 31))
            await feed.ack(lsn(10))
            assert await read(call, 10) == list(range(31, 41))
            _, error = await ended(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert trailing(error)["walstream-resume-lsn"] == text(41)

    async def test_what_is_acknowledged_while_a_stream_begins_takes_no_credit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = await memory(100)
        begin, may_begin, subscribe = asyncio.Event(), asyncio.Event(), log.subscribe

        async def subscribe_later(*arguments: Any, **more: Any) -> Any:
            begin.set()
            await may_begin.wait()
            return await subscribe(*arguments, **more)

        monkeypatch.setattr(log, "subscribe", subscribe_later)
        async with served(tmp_path, log, backpressure_timeout_ms=1500) as feed:
            call = feed.subscribe(start_lsn="oldest", credit_entries=10)
            reading = asyncio.create_task(read(call, 100))
            await begin.wait()
            await feed.ack(lsn(90))
            may_begin.set()
            assert await reading == list(range(1, 101))
            call.cancel()

    async def test_what_was_acknowledged_before_takes_no_credit(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(100), backpressure_timeout_ms=1500) as feed:
            await feed.ack(lsn(90))
            call = feed.subscribe(start_lsn="oldest", credit_entries=10)
            assert await read(call, 100) == list(range(1, 101))
            await feed.log.append(*entries(101, 110))
            _, error = await ended(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert trailing(error)["walstream-resume-lsn"] == text(101)

    async def test_the_stop_of_the_feed(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(5)) as feed:
            call = feed.subscribe(start_lsn="oldest")
            assert await read(call, 5) == list(range(1, 6))
            feed.service.stop(UnreachableError("feed_stopping: the feed is being stopped"))
            _, error = await ended(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert trailing(error)["walstream-resume-lsn"] == text(6)
            _, error = await ended(feed.subscribe())
            assert error.code() is grpc.StatusCode.UNAVAILABLE

    async def test_the_stop_while_a_batch_is_compressed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """That batch is never sent, so whoever resumes where the error says gets it then."""
        begun, may_go_on = threading.Event(), threading.Event()

        def slow(slices: Any, compression: int) -> bytes:
            if slices[0].first > lsn(1):
                begun.set()
                assert may_go_on.wait(10)
            return batch_response(slices, compression)

        monkeypatch.setattr(subscription_module, "batch_response", slow)
        log = await memory(3000, value=b"some words " * 20)
        log.frame_entries = 1000
        async with served(tmp_path, log) as feed:
            call = feed.subscribe(start_lsn="oldest", accept_compression=[wal_pb2.ZSTD])
            assert (await call.read()).batch.last_lsn == text(1000)
            await until(begun.is_set)
            feed.service.stop(UnreachableError("feed_stopping: the feed is being stopped"))
            await until(lambda: not feed.service.streams)
            may_go_on.set()
            found, error = await ended(call)
            assert [one.WhichOneof("payload") for one in found] == ["error"]
            assert trailing(error)["walstream-resume-lsn"] == text(1001)
            assert feed.service.sent.entries == 1000

    async def test_a_bug_ends_the_stream_that_meets_it_and_no_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with served(tmp_path, await memory(5), auth=auth(tmp_path, clock_skew_s=0)) as feed:
            call = feed.subscribe(start_lsn="oldest")
            assert await read(call, 5) == list(range(1, 6))
            [stream] = feed.service.streams.values()
            monkeypatch.setattr(stream.queue, "deadline", lambda: "a bug")
            brief = feed.metadata(role="admin", tenant=None, exp=int(time.time()) + 60)
            other = feed.subscribe(brief, start_lsn="oldest")
            _, error = await ended(call)
            assert error.code() is grpc.StatusCode.UNKNOWN
            assert "The feed failed." in error.details()
            assert await read(other, 5) == list(range(1, 6))
            advance_clock(monkeypatch, 60)
            _, error = await ended(other)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED, "others are looked at all the same"

    async def test_one_stream_too_many(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(1), subscriptions_max=3) as feed:
            calls = [feed.subscribe(start_lsn="oldest") for _ in range(3)]
            for call in calls:
                assert await read(call, 1) == [1]
            _, error = await ended(feed.subscribe())
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "too_many_subscriptions: 3 streams are open" in error.details()
            calls[0].cancel()
            await until(lambda: len(feed.service.streams) == 2)
            assert await read(feed.subscribe(start_lsn="oldest"), 1) == [1]

    async def test_one_tenant_cannot_take_the_places_of_others(self, tmp_path: Path) -> None:
        limits = {"tenant_subscriptions_max": 2, "subscriptions_max": 5}
        async with served(tmp_path, await memory(1, tenant="acme"), **limits) as feed:

            def subscribe(tenant: str, subject: str) -> Any:
                metadata = feed.metadata(role="replication", tenant=tenant, sub=subject)
                return feed.subscribe(metadata, start_lsn="oldest")

            calls = [subscribe("acme", subject) for subject in ("ann", "bob")]
            for call in calls:
                assert await read(call, 1) == [1]
            for subject in ("ann", "cid"):
                responses, error = await ended(subscribe("acme", subject))
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "too_many_subscriptions: 2 streams of the tenant acme are open" in error.details()
                assert "feed.tenant_subscriptions_max" in error.details()
                assert responses[-1].error.startswith("too_many_subscriptions: 2 streams of the tenant acme")
            admins = [feed.subscribe(start_lsn="oldest") for _ in range(3)]
            for call in admins:
                assert await read(call, 1) == [1], "admins count only among all"
            _, error = await ended(subscribe("umbrella", "ann"))
            assert "too_many_subscriptions: 5 streams are open" in error.details()
            calls[0].cancel()
            await until(lambda: len(feed.service.streams) == 4)
            assert await read(subscribe("acme", "cid"), 1) == [1]

    async def test_a_place_is_given_back_by_who_was_refused_for_another_reason(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(9), tenant_subscriptions_max=1) as feed:
            feed.log.remove_before(lsn(5))
            metadata = feed.metadata(role="replication", tenant="acme", sub="ann")
            for _ in range(3):
                _, error = await ended(feed.subscribe(metadata, start_lsn=text(2)))
                assert error.code() is grpc.StatusCode.OUT_OF_RANGE

    async def test_a_client_that_leaves(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        log = await memory(5000, value=bytes(10_000))
        async with served(tmp_path, log) as feed:
            for number in range(10):
                call = feed.subscribe(start_lsn="oldest", batch_size_hint=50)
                if number % 2:
                    await call.read()
                await asyncio.sleep(0.01 * number)
                call.cancel()
            await until(lambda: not feed.service.streams)
            assert feed.log.open_sources == 0
            assert set(feed.service.ends) == {"CANCELLED"}


class TestTokens:
    @pytest.mark.parametrize(
        ("metadata", "said"),
        [
            ((), "no token"),
            ((("authorization", "Basic eA=="),), "no bearer token"),
            ((("authorization", "Bearer x.y.z"),), "no JSON Web Token"),
        ],
    )
    async def test_nobody_gets_in_without_one(self, tmp_path: Path, metadata: Any, said: str) -> None:
        async with served(tmp_path, await memory(3)) as feed:
            _, error = await ended(feed.subscribe(metadata))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert said in error.details()
            for call in (feed.ack(lsn(1), metadata), feed.lsn(metadata)):
                with pytest.raises(grpc.aio.AioRpcError, match=said) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    async def test_its_end_is_that_of_the_stream(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async with served(tmp_path, await memory(3), auth=auth(tmp_path, clock_skew_s=0)) as feed:
            call = feed.subscribe(
                feed.metadata(role="admin", tenant=None, exp=int(time.time()) + 60), start_lsn="oldest"
            )
            assert await read(call, 3) == [1, 2, 3]
            advance_clock(monkeypatch, 60)
            found, error = await ended(call)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "expired" in found[-1].error
            assert trailing(error)["walstream-resume-lsn"] == text(4)

    async def test_a_newer_one_in_an_ack_lets_it_go_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async with served(tmp_path, await memory(3), heartbeat_ms=200, auth=auth(tmp_path, clock_skew_s=0)) as feed:
            old = feed.metadata(sub="ann", role="admin", tenant=None, exp=int(time.time()) + 60)
            call = feed.subscribe(old, start_lsn="oldest")
            assert await read(call, 3) == [1, 2, 3]
            await feed.ack(lsn(3), feed.metadata(sub="ann", role="admin", tenant=None))
            advance_clock(monkeypatch, 60)
            await asyncio.sleep(3 * service_module.CHECK_S)
            await feed.log.append(*entries(4, 5))
            assert await read(call, 1) == [4]

    async def test_another_ones_does_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async with served(tmp_path, await memory(3), auth=auth(tmp_path, clock_skew_s=0)) as feed:
            old = feed.metadata(sub="ann", role="admin", tenant=None, exp=int(time.time()) + 60)
            call = feed.subscribe(old, start_lsn="oldest")
            assert await read(call, 3) == [1, 2, 3]
            await feed.ack(lsn(3), feed.metadata(sub="bob", role="admin", tenant=None), subscriber_id="ann")
            advance_clock(monkeypatch, 60)
            _, error = await ended(call)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED


class TestAcks:
    async def test_it_is_answered_with_where_everybody_is(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(10)) as feed:
            answer = await feed.ack(lsn(6))
            assert (answer.acked_lsn, answer.watermark_lsn) == (text(6), text(6))
            answer = await feed.ack(lsn(4))
            assert answer.acked_lsn == text(6), "never back"
            answer = await feed.ack(lsn(2), subscriber_id="slow")
            assert (answer.acked_lsn, answer.watermark_lsn) == (text(2), text(2))
            assert (await feed.ack(lsn(9))).watermark_lsn == text(2)

    async def test_a_tenant_is_told_its_own_watermark(self, tmp_path: Path) -> None:
        async with served(tmp_path, await memory(10, tenant="acme")) as feed:
            await feed.ack(lsn(1))
            await feed.ack(lsn(2), feed.metadata(tenant="other"))
            answer = await feed.ack(lsn(8), feed.metadata(tenant="acme"))
            assert answer.watermark_lsn == text(8)
            assert (await feed.lsn(feed.metadata(tenant="acme"))).watermark_lsn == text(8)
            assert (await feed.lsn()).watermark_lsn == text(1)

    async def test_what_was_not_sent_cannot_be_acknowledged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(service_module, "HEAD_WAIT_S", 0.1)
        async with served(tmp_path, await memory(10)) as feed:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await feed.ack(lsn(11))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert f"ack_refused: {text(11)} was not sent" in caught.value.details()
            call = feed.subscribe(start_lsn="oldest", credit_entries=5)
            assert await read(call, 5) == [1, 2, 3, 4, 5]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await feed.ack(lsn(6))
            assert f"up to {text(5)}" in caught.value.details()
            await feed.ack(lsn(5))

    async def test_what_a_heartbeat_told_may_be_acknowledged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also at a feed where the stream is not, and though nothing is there with that LSN."""
        monkeypatch.setattr(service_module, "HEAD_WAIT_S", 0.1)
        async with served(tmp_path, await memory(10)) as feed:
            monkeypatch.setattr(feed.log, "resolved", lambda: lsn(500))
            assert (await feed.ack(lsn(500))).acked_lsn == text(500)
            with pytest.raises(grpc.aio.AioRpcError, match="was not sent"):
                await feed.ack(lsn(501))

    async def test_what_an_entry_says_may_be_acknowledged_when_it_arrives(self, tmp_path: Path) -> None:
        async with served(tmp_path) as feed:
            call = feed.subscribe(start_lsn="oldest")
            await until(lambda: feed.service.streams)
            for number in range(1, 50):
                await feed.log.append(*entries(number, number + 1))
                assert await read(call, 1) == [number]
                await feed.ack(lsn(number))

    @pytest.mark.parametrize(("ack_lsn", "said"), [("", "ack_lsn is empty"), ("17", "is not an LSN")])
    async def test_what_is_no_lsn(self, tmp_path: Path, ack_lsn: str, said: str) -> None:
        async with served(tmp_path, await memory(1)) as feed:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await feed.ack(ack_lsn)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in caught.value.details()


async def test_where_the_log_begins_and_ends(tmp_path: Path) -> None:
    async with served(tmp_path, await memory(10)) as feed:
        answer = await feed.lsn()
        assert (answer.head_lsn, answer.oldest_lsn, answer.watermark_lsn) == (text(10), str(GlobalLsn(0)), "")
        feed.log.remove_before(lsn(4))
        answer = await feed.lsn()
        assert (answer.oldest_lsn, answer.resolved_lsn) == (text(4), text(10))


def auth(folder: Path, **more: Any) -> dict[str, Any]:
    return {"jwks": str(folder / "jwks.json"), **more}
