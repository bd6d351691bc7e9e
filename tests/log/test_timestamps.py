"""Timestamps too far from the leader's clock: refused of producers, and no end of retention where they are stored."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from log.power import PowerRig
from log.rig import Rig, batch, values
from walstream.errors import InvalidTimestamp
from walstream.log.batch import assemble, parse_header
from walstream.log.partition_log import PartitionLog
from walstream.log.records import Record, build_batch
from walstream.log.settings import TIME_MAX, TopicSettings
from walstream.sim.disk import SimDisk

NOW = 1_700_000_000_000
HOUR_MS = 3_600_000


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def times(*moments: int, size: int = 1) -> bytearray:
    """Build a batch with a record at each of the times."""
    return build_batch([Record(number, moment, None, bytes(size)) for number, moment in enumerate(moments)])


def unlimited(rig: Rig, name: str = "t", **config: str) -> PartitionLog:
    return rig.topic(name, message_timestamp_after_max_ms=str(TIME_MAX), **config)


@pytest.mark.parametrize(
    ("config", "moments", "accepted"),
    [
        ({}, [NOW + HOUR_MS], True),
        ({}, [NOW + HOUR_MS + 1], False),
        ({}, [NOW, NOW + HOUR_MS + 1, NOW], False),
        ({}, [NOW + HOUR_MS + 1, NOW], False),
        ({}, [NOW * 1_000], False),  # Microseconds.
        ({}, [0], True),
        ({}, [-1], True),  # No timestamp.
        ({"message_timestamp_after_max_ms": "0"}, [NOW], True),
        ({"message_timestamp_after_max_ms": "0"}, [NOW + 1], False),
        ({"message_timestamp_after_max_ms": str(TIME_MAX)}, [NOW * 1_000], True),
        ({"message_timestamp_before_max_ms": "1000"}, [NOW - 1_000], True),
        ({"message_timestamp_before_max_ms": "1000"}, [NOW - 1_001], False),
        ({"message_timestamp_before_max_ms": "1000"}, [NOW - 1_001, NOW], False),
        ({"message_timestamp_before_max_ms": "1000"}, [NOW, NOW - 1_001], True),  # Only the first record counts.
        ({"message_timestamp_before_max_ms": "1000"}, [-1], True),
        ({"message_timestamp_type": "LogAppendTime"}, [NOW * 1_000], True),
        ({"message_timestamp_type": "LogAppendTime", "message_timestamp_before_max_ms": "0"}, [0], True),
    ],
)
def test_which_timestamps_are_accepted(rig: Rig, config: dict[str, str], moments: list[int], accepted: bool) -> None:
    partition = rig.topic(**config)
    if accepted:
        partition.append(memoryview(times(*moments)), now_ms=NOW)
    else:
        with pytest.raises(InvalidTimestamp, match=r"message\.timestamp\.(after|before)\.max\.ms"):
            partition.append(memoryview(times(*moments)), now_ms=NOW)
    assert partition.log_end == (len(moments) if accepted else 0)


def test_the_limits_of_the_header_hold_whatever_the_records_say(rig: Rig) -> None:
    """Retention reads the header alone, so the header is what must not be too late."""
    sound = times(NOW)
    late = assemble(parse_header(sound)._replace(max_timestamp=NOW * 1_000), sound[61:])
    with pytest.raises(InvalidTimestamp):
        rig.topic().append(memoryview(late), now_ms=NOW)


def test_a_retry_is_answered_although_its_timestamp_has_become_too_old(rig: Rig) -> None:
    partition = rig.topic(message_timestamp_before_max_ms="1000")
    producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0}
    first = rig.write(partition, "once", **producer)
    retry = batch("once", now_ms=rig.now_ms, **producer)
    rig.now_ms += 2_000
    assert partition.append(memoryview(retry), now_ms=rig.now_ms).base_offset == first.base_offset
    with pytest.raises(InvalidTimestamp):
        partition.append(memoryview(times(NOW)), now_ms=rig.now_ms)


def test_a_follower_takes_what_its_leader_has_accepted() -> None:
    leader, other = PowerRig(SimDisk(Random(1))), PowerRig(SimDisk(Random(2)))
    source = leader.topic(message_timestamp_after_max_ms=str(TIME_MAX))
    source.become_leader(1, lambda error: None)
    source.append(memoryview(times(NOW * 1_000)), now_ms=NOW)
    leader.driver.flush()
    follower = other.topic()
    other.follow(follower, 1)
    follower.append_replicated(source.read_replica_blocking(0, 1_000).buffers, offset=0)
    assert follower.log_end == 1


@pytest.mark.parametrize("moment", [NOW * 1_000, -1], ids=["microseconds", "none"])
def test_retention_goes_on_past_a_timestamp_that_means_nothing(rig: Rig, moment: int) -> None:
    """Such a record is as old as its segment's file: an earlier version, or another setting, had accepted it."""
    partition = unlimited(rig, segment_bytes="1024", retention_ms="1000")
    partition.append(memoryview(times(moment, size=1024)), now_ms=NOW)  # Alone in its segment.
    for number in range(40):
        rig.write(partition, f"{number:0100d}")
    rig.store.configure_topic("t", {"segment.bytes": "1024", "retention.ms": "1000"})
    first = partition.segments[0].path
    rig.now_ms += 10_000

    def modified(moment_ms: int) -> None:
        os.utime(first, ns=(moment_ms * 1_000_000, moment_ms * 1_000_000))

    modified(rig.now_ms - 1_000)
    rig.store.enforce_retention()
    assert partition.log_start == 0, "it was appended less than retention.ms ago"
    modified(rig.now_ms - 1_001)
    rig.store.enforce_retention()
    assert partition.log_start == partition.log_end == 41
    assert values(partition) == []


def test_a_timestamp_that_the_topic_accepts_is_believed(rig: Rig) -> None:
    partition = unlimited(rig, segment_bytes="1024", retention_ms="1000")
    partition.append(memoryview(times(NOW + 10 * HOUR_MS)), now_ms=NOW)
    for number in range(40):
        rig.write(partition, f"{number:0100d}")
    os.utime(partition.segments[0].path, (0, 0))
    rig.now_ms += HOUR_MS
    rig.store.enforce_retention()
    assert partition.log_start == 0
    rig.now_ms += 9 * HOUR_MS + 1_001
    rig.store.enforce_retention()
    assert partition.log_start == 41


def test_a_segment_that_is_not_flushed_yet_is_not_expired(rig: Rig) -> None:
    partition = unlimited(rig, segment_bytes="1024", retention_ms="1000")
    partition.append(memoryview(times(-1, size=1024)), now_ms=NOW)
    for number in range(20):
        rig.append(partition, f"{number:0100d}")
    rig.now_ms += 10_000
    rig.store.enforce_retention()
    assert partition.log_start == 0
    rig.driver.flush()


def test_the_settings_have_kafkas_defaults() -> None:
    assert TopicSettings().text("message.timestamp.before.max.ms") == "9223372036854775807"
    assert TopicSettings().text("message.timestamp.after.max.ms") == "3600000"
