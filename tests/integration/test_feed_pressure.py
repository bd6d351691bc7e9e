"""Slow, dead and many subscribers: each costs what it may and no more, and none of them costs the others anything."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from walstream.errors import SubscriberTooSlow
from walstream.feed import wal_pb2
from walstream.feed.process import FeedProcess
from walstream.node.process import NodeProcess
from walstream.positions import GlobalLsn

from . import subscriber
from .feed_processes import MakeFeed, create_feed_topic, metric, write
from .support import MakeNode, memory_mb, wait_for

SUBSCRIBE = "/kdb.wal.v1.WalStream/Subscribe"

MEMORY_MB_MAX = 700
"""The budget of docs/feed.md: a hundred subscribers at different positions, none of whom takes anything."""

ENTRIES = 120_000


@contextmanager
def raw(feed: FeedProcess, **request: Any) -> Iterator[Any]:
    """A bare stream on a connection of its own; what it yields is bytes, and only what is asked for is read."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(feed.address, options) as channel:
        metadata = (("authorization", f"Bearer {feed.token('raw', 'admin')}"),)
        call = channel.unary_stream(SUBSCRIBE, wal_pb2.SubscribeRequest.SerializeToString)
        stream = call(wal_pb2.SubscribeRequest(**request), metadata=metadata)
        try:
            yield stream
        finally:
            stream.cancel()


def to_the_end(feed: FeedProcess, **request: Any) -> tuple[list[wal_pb2.WalResponse], Any]:
    found = []
    with raw(feed, **request) as stream:
        try:
            for data in stream:
                found.append(wal_pb2.WalResponse.FromString(data))
        except grpc.RpcError as error:
            return found, error
    raise AssertionError("the stream ended without an error")


def streams(feed: FeedProcess) -> float:
    return metric(feed, "walstream_feed_streams")[""]


@pytest.fixture
def filled(make_node: MakeNode) -> NodeProcess:
    """A node with more entries than any buffer on the way takes."""
    node = make_node()
    create_feed_topic(node, "orders", 3)
    for partition in range(3):
        write(node, "orders", [b"x" * 256] * (ENTRIES // 3), partition=partition)
    return node


def test_one_that_takes_nothing_is_told_and_comes_back(filled: NodeProcess, make_feed: MakeFeed) -> None:
    feed = make_feed(filled, backpressure_timeout_ms=2000)
    with raw(feed, start_lsn="oldest", batch_size_hint=100) as stream:
        responses = [next(stream)]
        wait_for(lambda: streams(feed) == 0, "the stream is ended", 60, 0.2)
        error: Any = None
        try:
            for data in stream:
                responses.append(data)
        except grpc.RpcError as caught:
            error = caught
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    *batches, last = map(wal_pb2.WalResponse.FromString, responses)
    assert last.error == "backpressure_timeout: subscriber too slow"
    trailing = dict(error.trailing_metadata())
    entries = [entry.lsn for response in batches for entry in response.batch.entries]
    with feed.client() as client, client.subscribe(trailing["walstream-resume-lsn"]) as again:
        for entry in again:
            entries.append(str(entry.lsn))
            if len(entries) >= ENTRIES:
                break
    assert len(entries) == len(set(entries)) == ENTRIES
    assert entries == sorted(entries)
    assert trailing["walstream-error"] == SubscriberTooSlow.__name__


def test_the_words_of_the_end_are_the_rfcs(filled: NodeProcess, make_feed: MakeFeed) -> None:
    feed = make_feed(filled, backpressure_timeout_ms=1500, queue_entries_max=200)
    responses, error = to_the_end(feed, start_lsn="oldest", credit_entries=500)
    assert sum(len(one.batch.entries) for one in responses) == 500, "not one beyond the credit"
    assert responses[-1].error == "backpressure_timeout: subscriber too slow"
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_slow_one_costs_the_others_nothing(filled: NodeProcess, make_feed: MakeFeed) -> None:
    """Ten subscribers that take nothing stand at the beginning; one at the head is served as if they were not there."""
    feed = make_feed(filled, backpressure_timeout_ms=600_000)

    def latencies() -> list[float]:
        found = []
        with feed.client() as client, client.subscribe("head") as stream:
            entries = iter(stream)
            for number in range(100):
                text = b"%d" % number
                write(filled, "orders", [text])
                written_at = time.monotonic()
                assert next(entries).value == text
                found.append(time.monotonic() - written_at)
        return found

    alone = statistics.median(latencies())
    with ExitStack() as stalled:
        for _ in range(10):
            next(stalled.enter_context(raw(feed, start_lsn="oldest")))
        wait_for(lambda: streams(feed) == 10, "all are there", 20, 0.1)
        time.sleep(1)  # Their queues fill.
        beside = statistics.median(latencies())
        wait_for(lambda: streams(feed) == 10, "the stalled ones are still there, and nobody else", 10, 0.1)
    print(f"median latency alone {alone * 1000:.1f} ms, beside ten stalled ones {beside * 1000:.1f} ms")
    assert beside < 3 * alone + 0.02


@pytest.mark.timeout(300)
def test_a_hundred_at_different_positions_stay_within_the_budget(filled: NodeProcess, make_feed: MakeFeed) -> None:
    feed = make_feed(filled)
    with feed.client() as client:
        places: list[GlobalLsn] = []
        for batch in client.subscribe("oldest").batches():
            places += [entry.lsn for entry in batch.entries]
            if len(places) == ENTRIES:
                break
    with ExitStack() as all_of_them:
        for number in range(100):
            start = str(places[number * 300])
            next(all_of_them.enter_context(raw(feed, start_lsn=start)))
        wait_for(lambda: streams(feed) == 100, "all are there", 30, 0.2)
        depths = wait_for(lambda: full_queues(feed), "their queues are full", 60, 0.5)
        peak = memory_mb(feed.pid)
        print(f"peak {peak:.0f} MB, {sum(depths):,.0f} entries in queues")
        assert peak < MEMORY_MB_MAX
        assert feed.running
    assert "subscription over" in feed.log_text()


def full_queues(feed: FeedProcess) -> list[float]:
    depths = metric(feed, "walstream_feed_queue_entries")
    # All of them use one subscriber id, whose series has the sum.
    return list(depths.values()) if sum(depths.values()) > 100 * 2000 else []


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("end", "within_s"),
    [
        pytest.param(signal.SIGKILL, 10, id="killed"),
        pytest.param(signal.SIGSTOP, 40, id="frozen", marks=pytest.mark.long),
    ],
)
def test_a_dead_one_is_noticed(
    make_node: MakeNode, make_feed: MakeFeed, tmp_path: Path, end: signal.Signals, within_s: float
) -> None:
    """Killed, it is gone at once; frozen with its connection open, when it answers no ping any more."""
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"1", b"2"])
    feed = make_feed(node)
    root = Path(subscriber.__file__).parents[2]
    command = [sys.executable, subscriber.__file__, feed.address, feed.token("s", "admin"), str(tmp_path)]
    process = subprocess.Popen(command, env={"PYTHONPATH": str(root / "src")})
    try:
        wait_for(lambda: streams(feed) == 1, "it is there", 30, 0.1)
        os.kill(process.pid, end)
        began = time.monotonic()
        wait_for(lambda: streams(feed) == 0, f"it is gone after {end.name}", within_s, 0.2)
        print(f"gone after {time.monotonic() - began:.1f} s")
    finally:
        process.kill()
        process.wait()


def test_one_stream_more_than_there_may_be(make_node: MakeNode, make_feed: MakeFeed) -> None:
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"1"])
    feed = make_feed(node, subscriptions_max=20)
    with ExitStack() as open_ones:
        for _ in range(20):
            next(open_ones.enter_context(raw(feed, start_lsn="oldest")))
        with raw(feed, start_lsn="oldest") as refused:
            told = wal_pb2.WalResponse.FromString(next(refused)).error
            assert told == "too_many_subscriptions: 20 streams are open"
            with pytest.raises(grpc.RpcError) as caught:
                next(refused)
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    wait_for(lambda: streams(feed) == 0, "they have left", 20, 0.1)
    with raw(feed, start_lsn="oldest") as stream:
        assert wal_pb2.WalResponse.FromString(next(stream)).batch.entries


def test_a_hundred_live_ones_get_everything(make_node: MakeNode, make_feed: MakeFeed) -> None:
    node = make_node()
    create_feed_topic(node, "orders", 2)
    feed = make_feed(node)
    counts = [0] * 100
    failed: list[BaseException] = []

    def follow(number: int, stream: Any) -> None:
        last = ""
        try:
            for data in stream:
                for entry in wal_pb2.WalResponse.FromString(data).batch.entries:
                    assert entry.lsn > last
                    last = entry.lsn
                    counts[number] += 1
        except (grpc.RpcError, ValueError):
            pass
        except AssertionError as error:
            failed.append(error)

    with ExitStack() as all_of_them:
        threads = []
        for number in range(100):
            stream = all_of_them.enter_context(raw(feed, start_lsn="oldest"))
            threads.append(threading.Thread(target=follow, args=(number, stream), daemon=True))
            threads[-1].start()
        wait_for(lambda: streams(feed) == 100, "all are there", 30, 0.2)
        for round_number in range(20):
            write(node, "orders", [b"x" * 100] * 50, partition=round_number % 2)
        wait_for(lambda: failed or counts == [1000] * 100, "everybody has everything", 60, 0.1)
    assert not failed
    assert metric(feed, "walstream_feed_shared_batches")[""] > 0
    assert metric(feed, "walstream_feed_sent_entries")[""] == 100_000
