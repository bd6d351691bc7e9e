"""What retention and compaction remove, and what a hold keeps from them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from log.rig import LateDriver, Rig, values
from walstream.cluster.local import Catalogue
from walstream.log.index import Index
from walstream.log.partition_log import PartitionLog
from walstream.log.retention import held_from, holds_more, retained_from
from walstream.log.segment import OpenFiles, Segment
from walstream.log.settings import DAY_MS, TopicSettings
from walstream.sim.disk import SimDisk

NOW = 1_700_000_000_000
FILES = OpenFiles()
DISK = SimDisk(Random(1))


def segments(*sizes_and_times: tuple[int, int]) -> list[Segment]:
    """Make sealed segments of ten offsets each, from (size, newest time), and an empty one to be written to."""
    found = []
    for number, (size, time_ms) in enumerate((*sizes_and_times, (0, -1))):
        segment = Segment(DISK, Path("/data"), number * 10, FILES, size=size)
        segment.index = Index()
        segment.index.max_timestamp = time_ms
        found.append(segment)
    return found


FIVE = [(100, NOW - 5_000 + number * 1_000) for number in range(5)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (TopicSettings(retention_ms=0), 50),
        (TopicSettings(retention_ms=0, hold_from_ms=NOW - 2_999), 30),
        (TopicSettings(retention_ms=0, hold_from_ms=NOW - 3_000), 20),
        (TopicSettings(retention_ms=0, hold_from_ms=0), 0),
        (TopicSettings(retention_ms=0, hold_from_ms=NOW), 50),
        (TopicSettings(retention_bytes=0, retention_ms=-1, hold_from_ms=NOW - 3_000), 20),
        (TopicSettings(retention_bytes=0, retention_ms=0, hold_from_ms=NOW - 3_000), 20),
        (TopicSettings(retention_ms=DAY_MS, hold_from_ms=NOW - 1_000), 0),  # It never removes anything by itself.
        (TopicSettings(retention_ms=0, hold_from_ms=0, hold_bytes_max=499), 10),
        (TopicSettings(retention_ms=0, hold_from_ms=0, hold_bytes_max=200), 30),
        (TopicSettings(retention_ms=0, hold_from_ms=0, hold_bytes_max=0), 50),
        (TopicSettings(retention_ms=2_500, hold_from_ms=0, hold_bytes_max=200), 10),  # Beyond what is kept anyway.
        (TopicSettings(compacted=True, deleted=False, retention_ms=0), 0),
        (TopicSettings(retention_ms=-1, retention_bytes=300), 20),
        (TopicSettings(retention_ms=-1, retention_bytes=301), 10),
        (TopicSettings(retention_ms=-1, retention_bytes=299), 20),
        (TopicSettings(retention_ms=-1, retention_bytes=500), 0),
        (TopicSettings(retention_ms=-1, retention_bytes=0), 50),
        (TopicSettings(retention_ms=3_000), 20),
        (TopicSettings(retention_ms=2_999), 30),
    ],
)
def test_where_the_log_starts(settings: TopicSettings, expected: int) -> None:
    assert retained_from(segments(*FIVE), settings, NOW) == expected


def test_one_record_holds_its_segment_and_all_after_it() -> None:
    out_of_order = segments((100, NOW - 9_000), (100, NOW), (100, NOW - 9_000), (100, NOW - 9_000))
    assert held_from(out_of_order, TopicSettings(hold_from_ms=NOW - 1), 4) == 1


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 50)), max_size=8),
    st.integers(-1, 60),
    st.integers(0, 1_000),
    st.data(),
)
def test_a_hold_keeps_what_it_may_and_nothing_more(
    sizes_and_times: list[tuple[int, int]], hold_from_ms: int, hold_bytes_max: int, data: st.DataObject
) -> None:
    every = segments(*sizes_and_times)
    end = data.draw(st.integers(0, len(sizes_and_times)))
    found = held_from(every, TopicSettings(hold_from_ms=hold_from_ms, hold_bytes_max=hold_bytes_max), end)
    assert 0 <= found <= end
    held_bytes = sum(segment.size for segment in every[found:end])
    assert held_bytes <= hold_bytes_max
    wanted = [
        number
        for number, segment in enumerate(every[:end])
        if hold_from_ms != -1 and segment.index.max_timestamp >= hold_from_ms
    ]
    if not wanted:
        assert found == end
    elif found > wanted[0]:
        assert held_bytes + every[found - 1].size > hold_bytes_max, "there was room for one more"
    else:
        assert found == wanted[0]


def test_whether_more_is_held() -> None:
    none, early, late = TopicSettings(), TopicSettings(hold_from_ms=10), TopicSettings(hold_from_ms=20)
    assert holds_more(early, none)
    assert holds_more(early, late)
    assert holds_more(
        TopicSettings(hold_from_ms=10, hold_bytes_max=11), TopicSettings(hold_from_ms=10, hold_bytes_max=10)
    )
    for settings, before in ((none, early), (late, early), (early, early), (none, none)):
        assert not holds_more(settings, before)


# ── in a store ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(tmp_path)


def hold(rig: Rig, from_ms: int, **more: str) -> None:
    config = dict(rig.catalogue.topic("t").config)
    more = {key.replace("_", "."): value for key, value in more.items()}
    rig.store.configure_topic("t", config | {"walstream.hold.from.ms": str(from_ms)} | more)


def fill(rig: Rig, partition: PartitionLog, count: int, keys: int = 0) -> list[int]:
    """Write records a millisecond apart, and return their append times."""
    stamps = []
    for number in range(count):
        names = [f"k{number % keys}"] if keys else None
        stamps.append(rig.write(partition, f"{number:0100d}", keys=names).append_time_ms)
        rig.now_ms += 1
    return stamps


def test_a_hold_gates_retention_until_it_is_moved_or_taken_away(rig: Rig) -> None:
    partition = rig.topic(
        message_timestamp_type="LogAppendTime", segment_bytes="2048", retention_ms="1000", retention_bytes="4096"
    )
    stamps = fill(rig, partition, 200)
    hold(rig, stamps[50])
    rig.now_ms += 60_000
    rig.store.enforce_retention()
    assert 35 < partition.log_start <= 50
    assert [int(value) for value in values(partition, 50)] == list(range(50, 200))
    again = rig.again()  # The hold is as durable as any setting.
    again.now_ms = rig.now_ms
    partition = again.store.partition("t", 0)
    again.store.enforce_retention()
    assert 35 < partition.log_start <= 50
    hold(again, stamps[150])
    again.store.enforce_retention()
    assert 135 < partition.log_start <= 150
    hold(again, -1)
    again.store.enforce_retention()
    assert partition.log_start == 200


def test_a_hold_whose_owner_is_gone_keeps_so_much_and_no_more(rig: Rig) -> None:
    partition = rig.topic(message_timestamp_type="LogAppendTime", segment_bytes="2048", retention_bytes="4096")
    hold(rig, 0, walstream_hold_bytes_max="20000")
    for _ in range(5):
        fill(rig, partition, 100)
        rig.store.enforce_retention()
        assert partition.size_bytes < 4096 + 2048 + 20000 + 2048
    assert partition.size_bytes > 20000


def test_records_that_are_held_can_still_be_deleted(rig: Rig) -> None:
    partition = rig.topic(message_timestamp_type="LogAppendTime", segment_bytes="2048")
    fill(rig, partition, 100)
    hold(rig, 0)
    heard: list[Exception | None] = []
    rig.store.delete_records(partition, 60, heard.append)
    assert heard == [None]
    assert partition.log_start == 60


def compacted(rig: Rig) -> PartitionLog:
    return rig.topic(
        cleanup_policy="compact", message_timestamp_type="LogAppendTime", segment_bytes="2048",
        min_cleanable_dirty_ratio="0", delete_retention_ms="0",
    )  # fmt: skip


def compact(rig: Rig) -> None:
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    rig.store.compact()


def test_compaction_stops_below_a_hold(rig: Rig) -> None:
    partition = compacted(rig)
    stamps = fill(rig, partition, 200, keys=5)
    hold(rig, stamps[120])
    compact(rig)
    found = [int(value) for value in values(partition)]
    assert found[-80:] == list(range(120, 200))
    assert len(found) < 5 + 20 + 80  # One of each key, and what shares a segment with the first that is held.
    hold(rig, stamps[199])
    compact(rig)
    assert len(values(partition)) < 5 + 25
    assert [int(value) for value in values(partition)][-5:] == list(range(195, 200))


def test_compaction_of_a_topic_that_is_held_for_ever_goes_on_beyond_the_limit(rig: Rig) -> None:
    partition = compacted(rig)
    hold(rig, 0)
    fill(rig, partition, 200, keys=5)
    compact(rig)
    assert len(values(partition)) == 200
    hold(rig, 0, walstream_hold_bytes_max="8192")
    compact(rig)
    assert partition.size_bytes < 8192 + 2 * 2048 + 1024
    assert [int(value) for value in values(partition)][-30:] == list(range(170, 200))


@pytest.mark.parametrize(("from_number", "is_given_up"), [(10, True), (90, False)])
def test_a_round_gives_way_to_a_hold_that_comes_meanwhile(rig: Rig, from_number: int, is_given_up: bool) -> None:
    partition = compacted(rig)
    stamps = fill(rig, partition, 100, keys=5)
    hold(rig, stamps[50])
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    cleaner = rig.store._rounds._cleaner
    execute = cleaner.execute

    def interrupted(work) -> None:
        execute(work)
        hold(rig, stamps[from_number])

    cleaner.execute = interrupted
    rig.store.compact()
    assert (len(values(partition)) == 100) is is_given_up
    assert {path.suffix for path in partition.folder.iterdir()} == {".log", ".index", ".producers"}


def test_a_hold_is_a_setting_like_any_other(rig: Rig) -> None:
    rig.topic()
    hold(rig, 17, walstream_hold_bytes_max="18")
    catalogue = Catalogue(rig.disk, rig.folder, node_id=1, defaults=TopicSettings())
    settings = catalogue.settings(catalogue.topic("t"))
    assert (settings.hold_from_ms, settings.hold_bytes_max) == (17, 18)
    assert settings.text("walstream.hold.from.ms") == "17"
    assert TopicSettings().text("walstream.hold.bytes.max") == str(10 * 1024**3)


@pytest.mark.parametrize("change", ["nothing", "hold", "deletion", "another round"])
def test_what_changes_while_retention_looks_counts(tmp_path: Path, change: str) -> None:
    driver = LateDriver()
    rig = Rig(tmp_path, driver=driver)
    partition = rig.topic(segment_bytes="1024", retention_ms="1000")
    for _ in range(10):
        rig.write(partition, "x" * 900)
    rig.now_ms += 60_000
    driver.is_late = True
    rig.store.enforce_retention()
    if change == "hold":
        rig.store.configure_topic("t", {**rig.catalogue.topic("t").config, "walstream.hold.from.ms": "0"})
    elif change == "deletion":
        rig.store.delete_topics(["t"])
    elif change == "another round":
        rig.store.enforce_retention()
    driver.is_late = False
    while driver.run_next():
        pass
    assert partition.log_start == {"nothing": 10, "hold": 0, "deletion": 0, "another round": 10}[change]


def test_a_segment_whose_times_cannot_be_read_is_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for name in ("broken", "sound"):
        partition = rig.topic(name, segment_bytes="1024", retention_ms="1000")
        for _ in range(4):
            rig.write(partition, "x" * 900)
    rig = rig.again(clean=True)
    broken, sound = (rig.store.partition(name, 0) for name in ("broken", "sound"))
    rig.now_ms += 60_000
    broken.segments[0].index_path.unlink()
    broken.segments[0].path.unlink()
    rig.store.enforce_retention()
    assert (broken.log_start, sound.log_start) == (0, 4)
