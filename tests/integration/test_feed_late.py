"""An entry that comes though the log had promised that none would: nobody goes past it without being told.

A walstream node keeps its promises, so here it is made to look as if it did not: a topic loses its append time while it
is in the feed. Apache Kafka promises nothing, and what the feed makes of its clocks can be wrong (`reading.resolved`).
"""

from __future__ import annotations

from itertools import islice

import pytest

from integration.clients import configure_topic
from integration.feed_processes import MakeFeed, create_feed_topic, write
from integration.support import MakeNode
from walstream.errors import LogUnfit
from walstream.feed.received import Heartbeat
from walstream.positions import GlobalLsn

pytestmark = pytest.mark.timeout(120)


def test_whoever_went_past_an_entry_that_is_late_is_told(make_node: MakeNode, make_feed: MakeFeed) -> None:
    node = make_node()
    create_feed_topic(node, "late", 2)
    feed = make_feed(node, heartbeat_ms=50)
    write(node, "late", [b"early"], partition=1)
    with feed.client("live") as client, client.subscribe("oldest", topics=["late"]) as stream:
        entries = iter(stream)
        (early,) = islice(entries, 1)
        write(node, "late", [b"one", b"two"], partition=0)
        *_, two = islice(entries, 2)
        # From here on it is given the stamp of the record before it. The feed's hold would forbid it.
        configure_topic(node.address, "late", walstream_hold_from_ms=-1)
        configure_topic(node.address, "late", message_timestamp_type="CreateTime")
        write(node, "late", [b"late"], partition=1)
        with pytest.raises(LogUnfit, match="late-1 has a record with the LSN"):
            next(entries)
    configure_topic(node.address, "late", message_timestamp_type="LogAppendTime")
    missed = GlobalLsn(early.lsn + 1)
    with feed.client("resumed") as client:
        with pytest.raises(LogUnfit, match=f"Begin at {missed} to have it"):
            next(iter(client.subscribe(GlobalLsn(two.lsn + 1), topics=["late"])))
        again = list(islice(client.subscribe(missed, topics=["late"]), 3))
        assert [entry.value for entry in again] == [b"late", b"one", b"two"]
        other = client.subscribe(GlobalLsn(two.lsn + 1), topics=["others"]).events()
        assert isinstance(next(other), Heartbeat), "who does not read that partition lacks nothing"
