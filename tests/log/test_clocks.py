"""A wall clock that is set forth or back: intervals are measured on the monotonic clock, which is never set."""

from __future__ import annotations

from pathlib import Path

import pytest

from log.rig import Rig, values
from walstream.log.settings import DAY_MS, TopicSettings

HOUR_MS = 3_600_000


@pytest.mark.parametrize("step_ms", [-HOUR_MS, 25 * HOUR_MS])
def test_a_step_of_the_clock_makes_no_retry_a_new_batch(tmp_path: Path, step_ms: int) -> None:
    rig = Rig(tmp_path)
    partition = rig.topic(retention_ms="-1")
    first = rig.write(partition, "once", producer_id=7, producer_epoch=0, base_sequence=0)
    rig.step_clock(step_ms)
    rig.store.enforce_retention()
    again = rig.write(partition, "once", producer_id=7, producer_epoch=0, base_sequence=0)
    assert again.base_offset == first.base_offset
    assert values(partition) == ["once"]


def test_a_producer_counts_as_seen_at_a_restart_whatever_the_clock_says(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.write(rig.topic(retention_ms="-1"), "once", producer_id=7, producer_epoch=0, base_sequence=0)
    rig = rig.again(clean=True)
    rig.step_clock(25 * HOUR_MS)
    rig.store.enforce_retention()
    partition = rig.store.partition("t", 0)
    rig.write(partition, "once", producer_id=7, producer_epoch=0, base_sequence=0)
    assert values(partition) == ["once"]
    rig.now_ms += DAY_MS + 1
    rig.store.enforce_retention()
    assert 7 not in partition.producers


@pytest.mark.parametrize("step_ms", [-HOUR_MS, -1_000 * HOUR_MS])
def test_a_clock_set_back_does_not_stop_retention(tmp_path: Path, step_ms: int) -> None:
    rig = Rig(tmp_path, defaults=TopicSettings(segment_bytes=300, retention_bytes=600))
    partition = rig.topic()
    rig.step_clock(step_ms)
    for _ in range(60):
        rig.write(partition, "x" * 100)
        rig.now_ms += 1_000
        rig.store.tick()
    assert partition.log_start > 30
    assert len(list(partition.folder.glob("*.log"))) == len(partition.segments)


def test_a_clock_set_back_stops_neither_checkpoints_nor_settling(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.topic()
    rig.step_clock(-HOUR_MS)
    for _ in range(70):
        rig.write(partition, "x")
        rig.now_ms += 1_000
        rig.store.tick()
        rig.driver.flush()
    saved = rig.store._saver.saved.partition(partition.key)
    assert saved is not None
    assert saved.offset >= 30
    assert partition.segments[-1].synced_offset >= 60


def test_a_clock_set_back_stops_no_compaction(tmp_path: Path) -> None:
    rig = Rig(tmp_path, defaults=TopicSettings(segment_bytes=300))
    partition = rig.topic(cleanup_policy="compact")
    rig.step_clock(-HOUR_MS)
    for number in range(60):
        rig.write(partition, f"{number:0100d}", keys=["k"])
        rig.now_ms += 1_000
        rig.store.tick()
        rig.driver.flush()
    assert partition.cleaned_until > 0
    assert len(values(partition)) < 60


def test_a_clock_set_back_does_not_keep_the_journal_cold(tmp_path: Path) -> None:
    rig = Rig(tmp_path, journal_prepared_bytes=70_000)
    partition = rig.topic()
    for step_ms in (0, -HOUR_MS):
        rig.step_clock(step_ms)
        rig.write(partition, "x" * 8_000)
        assert rig.store.commit.wants_settling
        rig.now_ms += 6_000
        rig.store.tick()
        rig.driver.flush()
        assert not rig.store.commit.wants_settling
