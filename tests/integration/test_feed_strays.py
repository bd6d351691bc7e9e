"""Records that came while a topic in the feed had no append time: whoever could lack them is told, at once or later.

The topic is switched away and back within moments, far quicker than anybody looks at its settings: only the batches
themselves tell. On a node the hold is ended first, as its error says; Apache Kafka has none (`test_feed_kafka`).
"""

from __future__ import annotations

from itertools import islice

import pytest
from confluent_kafka import KafkaException, Producer

from integration.clients import configure_topic
from integration.feed_processes import MakeFeed, create_feed_topic, write
from integration.support import MakeNode, wait_for
from integration.test_feed_retention import settings_of
from walstream.errors import LogUnfit
from walstream.feed.process import FeedProcess
from walstream.feed.received import Heartbeat
from walstream.node.process import NodeProcess
from walstream.positions import GlobalLsn

pytestmark = pytest.mark.timeout(120)

HOLD = "walstream.hold.from.ms"


def stray(node: NodeProcess, topic: str, *values: bytes, created_ms: int = 0) -> None:
    """Write records without append time, made now or then: switch the topic away, write, switch it back."""
    configure_topic(node.address, topic, walstream_hold_from_ms=-1)
    configure_topic(node.address, topic, message_timestamp_type="CreateTime")
    producer = Producer({"bootstrap.servers": node.address, "linger.ms": 5, "log_level": 0})
    for value in values:
        producer.produce(topic, value, partition=0, timestamp=created_ms)
    assert producer.flush(60) == 0
    configure_topic(node.address, topic, message_timestamp_type="LogAppendTime")


def resolved(feed: FeedProcess) -> GlobalLsn:
    """Return where a subscriber stands that has been sent everything there is, some time after the last of it."""
    with feed.client("standing") as client, client.subscribe("oldest") as stream:
        return next(GlobalLsn(event.resolved + 1) for event in stream.events() if is_quiet(event))


def is_quiet(event: object) -> bool:
    """Tell whether the log is resolved beyond the time of its head: until then a stray would still be in order."""
    return isinstance(event, Heartbeat) and event.resolved.time_ms > event.head.time_ms > 0


def values_from(feed: FeedProcess, start: GlobalLsn | str, count: int) -> list[bytes | None]:
    with feed.client("reader") as client:
        return [entry.value for entry in islice(client.subscribe(start), count)]


def refused(feed: FeedProcess, start: GlobalLsn) -> LogUnfit:
    with feed.client("resumed") as client, pytest.raises(LogUnfit, match="Begin at") as caught:
        next(iter(client.subscribe(start)))
    return caught.value


def told_of(error: LogUnfit) -> GlobalLsn:
    """Return where to begin, as the error says it."""
    return GlobalLsn.parse(str(error).partition("Begin at ")[2].partition(" ")[0])


def test_a_topic_of_the_feed_is_guarded(make_node: MakeNode, make_feed: MakeFeed) -> None:
    node = make_node()
    create_feed_topic(node, "orders")
    make_feed(node)
    wait_for(lambda: settings_of(node, "orders")[HOLD] != "-1", "the feed holds it", 30, 0.1)
    with pytest.raises(KafkaException, match="orders is held by a feed"):
        configure_topic(node.address, "orders", message_timestamp_type="CreateTime")
    assert settings_of(node, "orders")["message.timestamp.type"] == "LogAppendTime"


@pytest.mark.parametrize("first", [(), (b"1",)], ids=["nothing before", "something before"])
def test_live_ones_are_told_at_once(make_node: MakeNode, make_feed: MakeFeed, first: tuple[bytes, ...]) -> None:
    """Also by a topic that was quiet for as long as the feed runs: what comes there is below where all others stand."""
    node = make_node()
    create_feed_topic(node, "quiet")
    create_feed_topic(node, "busy")
    write(node, "quiet", first)
    write(node, "busy", [b"2"])
    feed = make_feed(node, heartbeat_ms=50)
    start = resolved(feed)
    with feed.client("live") as client, client.subscribe(start) as stream:
        events = stream.events()
        assert isinstance(next(events), Heartbeat)
        stray(node, "quiet", b"stray")
        with pytest.raises(LogUnfit, match="quiet-0 has a record with the LSN") as caught:
            list(islice(events, 200))
    write(node, "quiet", [b"3"])
    begin = told_of(caught.value)
    assert begin < start
    assert told_of(refused(feed, start)) == begin
    assert values_from(feed, begin, 3)[0] == b"stray"
    assert sorted(values_from(feed, "oldest", 3 + len(first))) == sorted([*first, b"stray", b"2", b"3"])  # type: ignore[type-var]


@pytest.mark.parametrize("after", [(), (b"3",)], ids=["nothing behind", "something behind"])
@pytest.mark.parametrize("created_ms", [0, 1_000], ids=["made now", "made long ago"])
def test_who_was_away_with_the_feed_is_told(
    make_node: MakeNode, make_feed: MakeFeed, after: tuple[bytes, ...], created_ms: int
) -> None:
    """Nobody saw the records come, the topic's settings are as they were, and their own times may lead past them."""
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"1", b"2"])
    feed = make_feed(node, heartbeat_ms=50)
    start = resolved(feed)
    feed.stop()
    stray(node, "orders", b"stray one", created_ms=created_ms)
    stray(node, "orders", b"stray two", created_ms=created_ms)
    write(node, "orders", after)
    again = make_feed(node, share=feed, heartbeat_ms=50)
    error = refused(again, start)
    begin = told_of(error)
    expected = [b"stray one", b"stray two", *after]
    assert values_from(again, begin, len(expected)) == expected
    assert values_from(again, "oldest", 2 + len(expected)) == [b"1", b"2", *expected]
    # To go on without is possible, too: behind what the error says.
    bound = GlobalLsn.parse(str(error).partition("or behind ")[2].partition(" ")[0])
    with again.client("on") as client, client.subscribe(GlobalLsn(bound + 1)) as stream:
        write(node, "orders", [b"4"])
        assert [entry.value for entry in islice(stream, len(after) + 1)] == [*after, b"4"]


def test_who_comes_from_elsewhere_is_not_disturbed(make_node: MakeNode, make_feed: MakeFeed) -> None:
    """Strays are a question only to who stands between the records around them."""
    node = make_node()
    create_feed_topic(node, "orders")
    create_feed_topic(node, "users")
    write(node, "orders", [b"1"])
    feed = make_feed(node, heartbeat_ms=50)
    feed.stop()
    stray(node, "orders", b"stray")
    write(node, "orders", [b"2"])
    write(node, "orders", [b"3"])
    write(node, "users", [b"4"])
    feed = make_feed(node, share=feed, heartbeat_ms=50)
    with feed.client() as client:
        entries = list(islice(client.subscribe("oldest"), 5))
        assert [entry.value for entry in entries] == [b"1", b"stray", b"2", b"3", b"4"]
        for number, entry in enumerate(entries[:-1]):
            # Both by its LSN and by the one behind it, from a feed that has nothing of it in memory.
            for start in (entry.lsn, GlobalLsn(entry.lsn + 1)):
                first = next(iter(client.subscribe(start)))
                assert first == entries[number + (start > entry.lsn)]
        with pytest.raises(LogUnfit, match="orders-0 has a record"):
            next(iter(client.subscribe(GlobalLsn(entries[2].lsn - 1))))
        assert next(iter(client.subscribe(GlobalLsn(entries[2].lsn - 1), topics=["users"]))) == entries[4]
