"""A static cluster of three real nodes and a stock client: what is acknowledged is on every in-sync disk, and every
replica comes back by itself.

Whatever happened, at the end of each test the replicas hold the same bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import NewTopic

from walstream.log.batch import parse_header
from walstream.node.api.offsets import RESOLVED_TIMESTAMP

from .bare import Bare, one_record, produce_request
from .clients import configure_topic, read_messages, watermarks
from .replicating import TIMEOUT_S, Cluster, producer_of, running, write
from .support import MakeNode, memory_mb, rounds, seeded, topic_folders, wait_for

NOT_ENOUGH_REPLICAS, NOT_ENOUGH_REPLICAS_AFTER_APPEND, NOT_LEADER, TIMED_OUT = 19, 20, 6, 7
OFFSET_OUT_OF_RANGE, OFFSET_NOT_AVAILABLE = 1, 78

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def cluster(make_node: MakeNode) -> Iterator[Cluster]:
    with running(make_node) as cluster:
        yield cluster


class Writer:
    """Writes numbered records to one partition until it is told to stop, and knows what was acknowledged."""

    def __init__(self, address: str, topic: str, **settings: object) -> None:
        self.topic = topic
        self.sent = 0
        self.acknowledged: list[int] = []
        self.failures: list[str] = []
        self._ended = threading.Event()
        self._producer = producer_of(address, **{"batch.num.messages": 50, "message.timeout.ms": 120_000, **settings})
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.is_set():
            if len(self._producer) > 500:
                self._producer.poll(0.01)
                continue
            for _ in range(20):
                value = str(self.sent).encode().rjust(50 + self.sent % 200)
                self._producer.produce(self.topic, value, partition=0, on_delivery=self._delivered)
                self.sent += 1
            self._producer.poll(0.002)
        left = self._producer.flush(120)
        if left:
            self.failures.append(f"{left} records were never acknowledged")

    def _delivered(self, error: KafkaError | None, message: object) -> None:
        if error is not None:
            self.failures.append(str(error))
        else:
            self.acknowledged.append(int(message.value()))

    def wait_for_more(self, count: int = 100) -> None:
        goal = len(self.acknowledged) + count
        wait_for(lambda: len(self.acknowledged) >= goal, "records are acknowledged", 60)

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()

    def check(self, address: str) -> None:
        """Everything sent was acknowledged, and is there once and in order."""
        assert not self.failures, self.failures[:3]
        assert self.acknowledged == list(range(self.sent))
        assert values(address, self.topic) == list(range(self.sent))


def values(address: str, topic: str, partition: int = 0) -> list[int]:
    return [int(message.value()) for message in read_messages(address, topic, partition, log_level=0)]


def test_what_is_written_is_on_every_disk(cluster: Cluster) -> None:
    cluster.create("t", partitions=3)
    for partition in range(3):
        write(cluster.address, "t", 0, 2000, partition=partition, **{"compression.type": "lz4"})
    for partition in range(3):
        assert values(cluster.address, "t", partition) == list(range(2000))
    assert cluster.compare("t", 3) > 3


def test_only_the_leader_serves(cluster: Cluster) -> None:
    cluster.create("t")
    with Bare(cluster[2].address) as follower, Bare(cluster[1].address) as leader:
        assert follower.produce("t", one_record(b"x")).error == NOT_LEADER
        assert follower.fetch("t", 0).error == NOT_LEADER
        assert leader.produce("t", one_record(b"x"), acks=-1).error == 0
        assert leader.fetch("t", 0).high_watermark == 1
    cluster.compare("t")


def test_leaders_by_topic(make_node: MakeNode) -> None:
    with running(make_node, leaders={"b.*": 2, "c": 3, "__consumer_offsets": 2}) as cluster:
        for topic in ("a", "b.1", "c"):
            cluster.create(topic)
            write(cluster.address, topic, 0, 500)
            assert values(cluster.address, topic) == list(range(500))
        topics = cluster.admin().list_topics(timeout=TIMEOUT_S).topics
        assert [topics[name].partitions[0].leader for name in ("a", "b.1", "c")] == [1, 2, 3]
        consumer = Consumer(
            {"bootstrap.servers": cluster.address, "group.id": "g", "auto.offset.reset": "earliest", "log_level": 0}
        )
        consumer.subscribe(["a", "b.1", "c"])
        found: list[object] = []
        wait_for(lambda: found.extend(consumer.consume(500, 0.5)) or len(found) == 1500, "the group reads", 60)
        consumer.commit(asynchronous=False)
        consumer.close()
        for topic in ("a", "b.1", "c", "__consumer_offsets"):
            cluster.compare(topic)


def test_groups_survive_the_restart_of_their_coordinator(cluster: Cluster) -> None:
    cluster.create("t")
    write(cluster.address, "t", 0, 300)
    settings = {"bootstrap.servers": cluster.address, "group.id": "g", "auto.offset.reset": "earliest", "log_level": 0}
    consumer = Consumer({**settings, "enable.auto.commit": False})
    consumer.subscribe(["t"])
    found: list[object] = []
    wait_for(lambda: found.extend(consumer.consume(100, 0.5)) or len(found) >= 200, "the group reads", 60)
    consumer.commit(asynchronous=False)
    consumer.close()
    cluster[1].kill()
    cluster[1].start()
    again = Consumer(settings)
    again.subscribe(["t"])
    rest: list[int] = []
    wait_for(
        lambda: (
            rest.extend(int(one.value()) for one in again.consume(100, 0.5) if not one.error())
            or len(found) + len(rest) >= 300
        ),
        "the group goes on",
        60,
    )
    again.close()
    assert rest == list(range(len(found), 300))


def test_topics_change_everywhere(cluster: Cluster) -> None:
    cluster.create("t", partitions=1)
    cluster.create("gone")
    write(cluster.address, "gone", 0, 10)
    admin = cluster.admin()
    admin.delete_topics(["gone"])["gone"].result(TIMEOUT_S)
    from confluent_kafka.admin import NewPartitions

    admin.create_partitions([NewPartitions("t", 3)])["t"].result(TIMEOUT_S)
    for partition in range(3):
        cluster.wait_in_sync("t", 3, partition)
        write(cluster.address, "t", 0, 100, partition=partition)
    cluster.compare("t", 3)
    for number in (1, 2, 3):
        data = cluster[number].data
        wait_for(lambda data=data: not topic_folders(data, "gone"), "the topic is gone from every disk")


def test_a_held_topic_keeps_its_append_time_everywhere(cluster: Cluster) -> None:
    """Settings change by the controller alone, whomever a client asks first, so that nobody gets round the hold."""
    cluster.create("t", message_timestamp_type="LogAppendTime", walstream_hold_from_ms=17)
    for number in (1, 2, 3):
        with pytest.raises(KafkaException, match="t is held by a feed"):
            configure_topic(cluster[number].address, "t", message_timestamp_type="CreateTime")
    configure_topic(cluster[2].address, "t", walstream_hold_from_ms=-1)
    configure_topic(cluster[3].address, "t", message_timestamp_type="CreateTime")


def test_the_replication_factor_is_the_topics(cluster: Cluster) -> None:
    cluster.create("one", factor=1)
    cluster.create("two", factor=2)
    write(cluster.address, "one", 0, 100)
    write(cluster.address, "two", 0, 100)
    cluster.compare("two", nodes=[1, 2])
    assert not topic_folders(cluster[3].data, "two")
    assert not topic_folders(cluster[2].data, "one")
    admin = cluster.admin()
    with pytest.raises(KafkaException, match="3 nodes"):
        admin.create_topics([NewTopic("four", 1, 4)])["four"].result(TIMEOUT_S)


def test_a_follower_is_killed_and_comes_back(cluster: Cluster) -> None:
    cluster.create("t", min_insync_replicas=2)
    writer = Writer(cluster.address, "t")
    _, generator = seeded()
    with writer.writing():
        for number in range(rounds(full=10, part=2)):
            writer.wait_for_more()
            follower = 2 + number % 2
            cluster[follower].kill()
            writer.wait_for_more()
            time.sleep(generator.uniform(0, 0.5))
            cluster[follower].start()
            cluster.wait_in_sync("t", 3)
    writer.check(cluster.address)
    cluster.compare("t")


def test_the_leader_is_killed_and_leads_again_in_a_new_epoch(cluster: Cluster) -> None:
    cluster.create("t", min_insync_replicas=2)
    writer = Writer(cluster.address, "t")
    _, generator = seeded()
    with writer.writing():
        for _ in range(rounds(full=10, part=3)):
            writer.wait_for_more()
            time.sleep(generator.uniform(0, 0.3))
            cluster[1].kill()
            cluster[1].start()
    writer.check(cluster.address)
    cluster.wait_in_sync("t", 3)
    cluster.compare("t")
    epochs = [(cluster.held(number, "t") or {})["epoch"] for number in (1, 2, 3)]
    assert epochs == [rounds(full=10, part=3)] * 3, "one epoch for each life of the leader, known to all"


def test_everybody_is_killed_at_random(cluster: Cluster) -> None:
    cluster.create("t", min_insync_replicas=2)
    writer = Writer(cluster.address, "t")
    _, generator = seeded()
    with writer.writing():
        for _ in range(rounds(full=20, part=3)):
            time.sleep(generator.uniform(0, 0.6))
            victims = generator.sample([1, 2, 3], generator.choice([1, 2, 3]))
            for number in victims:
                cluster[number].kill()
            for number in generator.sample(victims, len(victims)):
                cluster[number].start()
            writer.wait_for_more(20)
    writer.check(cluster.address)
    cluster.wait_in_sync("t", 3)
    cluster.compare("t")


def test_a_slow_follower_leaves_the_isr_and_rejoins(cluster: Cluster) -> None:
    cluster.create("t", min_insync_replicas=2)
    writer = Writer(cluster.address, "t")
    with writer.writing():
        writer.wait_for_more()
        cluster.pause(3)
        try:
            cluster.wait_in_sync("t", 2)
            writer.wait_for_more(500)
        finally:
            cluster.resume(3)
        cluster.wait_in_sync("t", 3)
    writer.check(cluster.address)
    cluster.compare("t")


@pytest.mark.parametrize("fault", ["stall", "cut"])
def test_a_network_that_stops_and_starts_again(cluster: Cluster, fault: str) -> None:
    cluster.create("t", min_insync_replicas=2)
    writer = Writer(cluster.address, "t")
    with writer.writing():
        writer.wait_for_more()
        for proxy in cluster.links(1, 2):
            getattr(proxy, fault)()
        cluster.wait_in_sync("t", 2)
        writer.wait_for_more(300)
        for proxy in cluster.links(1, 2):
            proxy.mend()
        cluster.wait_in_sync("t", 3)
    writer.check(cluster.address)
    cluster.compare("t")


def test_a_follower_with_a_wiped_disk_gets_everything_again(cluster: Cluster) -> None:
    cluster.create("t", min_insync_replicas=2, segment_bytes=100_000)
    writer = Writer(cluster.address, "t")
    with writer.writing():
        writer.wait_for_more(2000)
        cluster[2].kill()
        cluster.wipe(2)
        writer.wait_for_more()
        cluster[2].start()
        cluster.wait_in_sync("t", 3)
    writer.check(cluster.address)
    assert cluster.compare("t") > 10


def test_a_wiped_controller_is_refused(cluster: Cluster) -> None:
    cluster.create("t")
    write(cluster.address, "t", 0, 100)
    before = cluster.compare("t")
    cluster[1].kill()
    cluster.wipe(1)
    cluster[1].start()
    wait_for(lambda: "belongs to cluster" in cluster[2].log_text(), "the followers refuse")
    assert len(cluster.batches(2, "t")) == len(cluster.batches(3, "t")) == before


def test_a_wiped_leader_does_not_empty_its_followers(make_node: MakeNode) -> None:
    with running(make_node, leaders={"t": 2}) as cluster:
        cluster.create("t")
        write(cluster.address, "t", 0, 100)
        before = cluster.compare("t")
        cluster[2].kill()
        cluster.wipe(2)
        cluster[2].start()
        wait_for(lambda: "leads no more" in cluster[2].log_text(), "the node sees that its disk is new")
        assert len(cluster.batches(1, "t")) == len(cluster.batches(3, "t")) == before


def test_too_few_in_sync(cluster: Cluster) -> None:
    cluster.create("t", min_insync_replicas=3)
    with Bare(cluster[1].address, timeout_s=30) as leader:
        assert leader.produce("t", one_record(b"0"), acks=-1).error == 0
        cluster.pause(3)
        try:
            # Nobody knows yet that the follower is slow: the batch is appended, and not kept by enough.
            late = leader.produce("t", one_record(b"1"), acks=-1, timeout_ms=20_000)
            assert late.error == NOT_ENOUGH_REPLICAS_AFTER_APPEND
            cluster.wait_in_sync("t", 2)
            assert leader.produce("t", one_record(b"2"), acks=-1).error == NOT_ENOUGH_REPLICAS
            assert leader.produce("t", one_record(b"3"), acks=1).error == 0
            assert leader.fetch("t", 0).high_watermark == 1, "what too few hold is not visible"
        finally:
            cluster.resume(3)
        cluster.wait_in_sync("t", 3)
        wait_for(lambda: leader.fetch("t", 0).high_watermark == 3, "what was written is visible")
        assert leader.produce("t", one_record(b"4"), acks=-1).error == 0
    cluster.compare("t")


def test_a_leader_that_does_not_know_what_is_committed_does_not_say(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    cluster.create("t", min_insync_replicas=2)
    settings = {"group.id": "reader", "auto.offset.reset": "error", "enable.partition.eof": True}
    reader = Consumer({"bootstrap.servers": cluster[1].address, **settings})
    request.addfinalizer(reader.close)
    with Bare(cluster[1].address) as leader:
        assert leader.produce("t", one_record(b"0"), acks=-1).error == 0
        cluster[2].stop()
        cluster[3].stop()
        # Both go on when all followers are gone; nobody is shown what they write.
        leader.send(produce_request("t", one_record(b"1"), acks=0))
        assert leader.produce("t", one_record(b"2"), acks=1).error == 0
        assert leader.list_offsets("t", -1, 0)[0].offset == 1
    cluster[1].kill()
    cluster[1].start()
    with Bare(cluster[1].address) as leader:
        wait_for(lambda: leader.list_offsets("t", -1, 0)[0].error != NOT_LEADER, "it leads again")
        for timestamp in (-1, RESOLVED_TIMESTAMP):
            assert leader.list_offsets("t", timestamp, 0)[0].error == OFFSET_NOT_AVAILABLE
        assert leader.list_offsets("t", -2, 0)[0].error == 0, "where it begins is known"
        # A reader that has read what was committed is neither sent elsewhere nor told that this is the end.
        assert leader.fetch("t", 1).error == OFFSET_NOT_AVAILABLE
        assert leader.fetch("t", 4).error == OFFSET_OUT_OF_RANGE
        reader.assign([TopicPartition("t", 0, 1)])
        assert reader.poll(1.5) is None
        cluster[2].start()
        cluster[3].start()
        cluster.wait_in_sync("t", 3)
        wait_for(lambda: leader.list_offsets("t", -1, 0)[0].error == 0, "the leader knows")
        assert leader.list_offsets("t", -1, 0)[0].offset == 3
        for value in (b"1", b"2"):
            message = reader.poll(TIMEOUT_S)
            assert message is not None
            assert message.value() == value
    cluster.compare("t")


def test_a_request_waits_no_longer_than_it_says(cluster: Cluster) -> None:
    cluster.create("t", min_insync_replicas=2)
    cluster.pause(2)
    cluster.pause(3)
    try:
        with Bare(cluster[1].address) as leader:
            started = time.monotonic()
            assert leader.produce("t", one_record(b"x"), acks=-1, timeout_ms=300).error == TIMED_OUT
            assert time.monotonic() - started < 5
    finally:
        cluster.resume(2)
        cluster.resume(3)
    cluster.wait_in_sync("t", 3)
    wait_for(lambda: watermarks(cluster[1].address, "t")[1] == 1, "the record becomes visible all the same")
    cluster.compare("t")


def test_mode_sync_waits_for_followers(make_node: MakeNode) -> None:
    with running(make_node, replication__mode="sync", replication__sync_followers=2) as cluster:
        cluster.create("t", min_insync_replicas=1)
        with Bare(cluster[1].address) as leader:
            assert leader.produce("t", one_record(b"0"), acks=1).error == 0
            cluster.pause(3)
            try:
                assert leader.produce("t", one_record(b"1"), acks=1, timeout_ms=500).error == TIMED_OUT
            finally:
                cluster.resume(3)
            assert leader.produce("t", one_record(b"2"), acks=1).error == 0
        cluster.compare("t")


def test_compacted_topics(make_node: MakeNode) -> None:
    with running(make_node, log__retention_check_interval_ms=200, log__checkpoint_interval_ms=500) as cluster:
        cluster.create("t", cleanup_policy="compact", segment_bytes=20_000, min_cleanable_dirty_ratio="0.1")
        producer = producer_of(cluster.address)
        for number in range(6000):
            producer.produce("t", f"{number}".encode().rjust(60), key=f"{number % 50}".encode(), partition=0)
            producer.poll(0)
            if number % 100 == 99:
                producer.flush(TIMEOUT_S)  # Small batches, of which compaction takes whole ones away.
        assert producer.flush(TIMEOUT_S) == 0
        cluster[3].kill()
        cluster.wipe(3)
        cluster[3].start()
        cluster.wait_in_sync("t", 3)

        def last_of(number: int) -> dict[bytes, int]:
            from walstream.log.records import iter_records

            batches = cluster.batches(number, "t")
            return {bytes(one.key or b""): one.offset for batch in batches for one in iter_records(memoryview(batch))}

        # Each compacts by itself, so what is left between may differ for a while; the last record of each key never.
        wait_for(lambda: last_of(1) == last_of(2) == last_of(3), "the last records are the same", 30, 0.5)
        wait_for(lambda: len(cluster.batches(1, "t")) < 3000, "the log is compacted")
        found = {
            int(message.key()): int(message.value()) for message in read_messages(cluster.address, "t", log_level=0)
        }
        assert found == {key: 5950 + key for key in range(50)}

        # The gaps are there, whatever the topic's settings say: a follower takes them from its leader.
        wait_for(
            lambda: parse_header(cluster.batches(1, "t")[0]).base_offset > 0, "the first batches are compacted away"
        )
        configure_topic(cluster.address, "t", cleanup_policy="delete")
        cluster[3].kill()
        cluster.wipe(3)
        cluster[3].start()
        cluster.wait_in_sync("t", 3)
        wait_for(lambda: last_of(1) == last_of(3), "the last records are the same", 30, 0.5)


def test_a_follower_behind_retention_begins_anew(make_node: MakeNode) -> None:
    with running(make_node, log__retention_check_interval_ms=200) as cluster:
        cluster.create("t", segment_bytes=20_000, retention_bytes=60_000, min_insync_replicas=2)
        write(cluster.address, "t", 0, 500)
        cluster[2].kill()
        write(cluster.address, "t", 500, 3000)
        wait_for(lambda: watermarks(cluster[1].address, "t")[0] > 600, "the leader has dropped what the follower had")
        cluster[2].start()
        cluster.wait_in_sync("t", 3)
        write(cluster.address, "t", 3500, 10)

        def starts() -> set[int]:
            return {
                cluster.health(number)["replication"]["partitions_held"]["t-0"]["log_start"] for number in (1, 2, 3)
            }

        wait_for(lambda: len(starts()) == 1, "the followers keep what the leader keeps", 30, 0.2)
        low = starts().pop()

        def kept(number: int) -> bytes:
            return b"".join(one for one in cluster.batches(number, "t") if parse_header(one).last_offset >= low)

        wait_for(lambda: kept(1) == kept(2) == kept(3), "the replicas are equal", 30, 0.5)
        assert values_from(cluster.address, "t", low)[-1] == 3509


def values_from(address: str, topic: str, offset: int) -> list[int]:
    return [int(message.value()) for message in read_messages(address, topic, 0, offset, log_level=0)]


def test_the_leaders_memory_does_not_grow_with_the_lag(make_node: MakeNode) -> None:
    with running(make_node, replication__credit_bytes=1024 * 1024) as cluster:
        cluster.create("t", min_insync_replicas=2)
        write(cluster.address, "t", 0, 20_000, size=1000)
        cluster[3].kill()
        grown = []
        for lag in range(2):
            before = memory_mb(cluster[1].pid, "RssAnon")
            write(cluster.address, "t", 20_000 + lag * 60_000, 60_000, size=1000)
            grown.append(memory_mb(cluster[1].pid, "RssAnon") - before)
        # The first 60 MB of lag warm things up; the next 60 MB must cost nothing.
        assert grown[1] < 10, grown
        cluster[3].start()
        cluster.wait_in_sync("t", 3)
        assert memory_mb(cluster[1].pid, "RssAnon") - before < 20
        cluster.compare("t")
