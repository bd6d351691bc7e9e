import errno
import random

import pytest
import structlog

from log.power import PowerRig, after_every_crash, contents
from log.rig import FaultyDisk, Rig, batch, values
from walstream.errors import CorruptLog
from walstream.log.batch import parse_header
from walstream.log.scanning import Scan
from walstream.log.settings import TopicSettings


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def fill(rig, partition, count, size=100):
    for number in range(count):
        rig.write(partition, f"{number:0{size}d}")


@pytest.mark.parametrize("clean", [True, False])
def test_everything_is_there_after_a_stop(rig, clean):
    partition = rig.topic(segment_bytes="2048")
    fill(rig, partition, 100)
    again = rig.again(clean=clean)
    reopened = again.store.partition("t", 0)
    assert [int(value) for value in values(reopened)] == list(range(100))
    assert again.write(reopened, "next").base_offset == 100


def test_a_clean_stop_reads_no_batch_again(rig, monkeypatch):
    fill(rig, rig.topic(segment_bytes="2048"), 50)
    scanned = []
    original = Scan.run
    monkeypatch.setattr(Scan, "run", lambda *a: scanned.append(a) or original(*a))
    again = rig.again(clean=True)
    assert scanned == []
    assert len(values(again.store.partition("t", 0))) == 50


def test_a_start_reports_all_recovered_partitions_in_one_line(rig):
    rig.topic("many", partitions=50)
    for index in range(40):
        fill(rig, rig.store.partition("many", index), 2)
    with structlog.testing.capture_logs() as said:
        again = rig.again()
    (line,) = [entry for entry in said if entry["log_level"] != "debug"]
    assert (line["event"], line["partitions"]) == ("partitions recovered", 40)
    assert line["checked_bytes"] == sum(partition.size_bytes for partition in again.store.partitions.values())
    assert {entry["partition"] for entry in said if entry["event"] == "partition recovered"} == {
        f"many-{index}" for index in range(40)
    }
    with structlog.testing.capture_logs() as said:
        again.again(clean=True)
    assert said == []


def test_every_start_takes_a_new_epoch(rig):
    partition = rig.topic()
    rig.write(partition, "a")
    second = rig.again()
    third = second.again()
    reopened = third.store.partition("t", 0)
    third.write(reopened, "b")
    assert (rig.store.epoch, second.store.epoch, third.store.epoch) == (1, 2, 3)
    assert reopened.leader_epoch == 3
    assert reopened.epochs.to_list() == [[1, 0], [3, 1]]
    assert reopened.end_offset_for(1) == (1, 1)
    fourth = third.again(clean=True)
    assert fourth.store.partition("t", 0).epochs.to_list()[:2] == [[1, 0], [3, 1]]


@pytest.mark.parametrize("cut", [1, 30, 61, 100])
def test_a_torn_tail_is_cut(rig, cut):
    partition = rig.topic()
    fill(rig, partition, 10)
    path = partition.segments[0].path
    data = path.read_bytes()
    path.write_bytes(data + bytes(batch("torn" * 50))[:cut])
    again = rig.again()
    reopened = again.store.partition("t", 0)
    assert reopened.log_end == 10
    assert path.read_bytes() == data
    assert again.write(reopened, "next").base_offset == 10
    assert values(reopened)[-1] == "next"


def tear(rig, start, end, *, values=None):
    """Fill a log in one flush, and take the bytes from `start` on (in batches) as pages that never came."""
    partition = rig.topic()
    for number in range(10):
        rig.append(partition, values or f"{number:0100d}")
    rig.driver.flush()
    rig.settle()
    path = partition.segments[0].path
    return path, leave_out(path, 10, start, end)


def leave_out(path, batches, start, end):
    """Put zeros into a file of so many equal batches, from one place to another; return the size of a batch."""
    data = path.read_bytes()
    size = len(data) // batches
    start, end = int(start * size), int(end * size)
    path.write_bytes(data[:start] + bytes(end - start) + data[end:])
    return size


@pytest.mark.parametrize(("start", "end"), [(4, 5), (4, 7.5), (4.5, 6), (4.9, 5.9), (0, 1)])
def test_a_hole_in_a_torn_flush_is_cut_with_all_behind_it(rig, start, end):
    """Nobody was told of it: the flush had not ended, and no other begins before. Nobody could repair it, either."""
    path, size = tear(rig, start, end)
    again = rig.again()
    reopened = again.store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged) == (int(start), [])
    assert not reopened.is_unclean
    assert path.stat().st_size == int(start) * size
    assert again.write(reopened, "next").base_offset == int(start)
    assert values(again.again().store.partition("t", 0))[-1] == "next"


def test_a_hole_in_what_was_known_to_be_durable_is_damage(rig):
    """The journal had it, when the checkpoint was made, and is gone."""
    partition = rig.topic()
    fill(rig, partition, 10)
    rig.store.save_checkpoint(lambda error: None)
    for name in (rig.folder / "journal").iterdir():
        name.unlink()
    leave_out(partition.segments[0].path, 10, 4, 5)
    reopened = rig.again().store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged) == (10, [(4, 5)])


def test_a_hole_is_damage_if_the_next_segment_was_begun(rig):
    """A flush ends before the next segment is written to, whatever the checkpoint knows of it."""
    partition = rig.topic(segment_bytes="1024")
    checkpoint = (rig.folder / "checkpoint.json").read_bytes()
    fill(rig, partition, 30)
    rig.settle()
    (rig.folder / "checkpoint.json").write_bytes(checkpoint)
    leave_out(partition.segments[0].path, partition.segments[1].base_offset, 1, 2)
    reopened = rig.again().store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged) == (30, [(1, 2)])


def test_a_hole_is_damage_if_the_journal_has_what_comes_later(rig):
    partition = rig.topic()
    checkpoint = (rig.folder / "checkpoint.json").read_bytes()
    fill(rig, partition, 5)
    rig.settle()
    fill(rig, partition, 5)
    (rig.folder / "checkpoint.json").write_bytes(checkpoint)
    leave_out(partition.segments[0].path, 10, 3, 4)
    reopened = rig.again().store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged) == (10, [(3, 4)])


@pytest.mark.parametrize(("position", "mask"), [(8, 0x01), (9, 0x01), (10, 0x01), (10, 0x08), (11, 0x01), (11, 0x40)])
def test_a_length_that_leads_to_zeros_inside_a_record_is_no_hole(rig, position, mask):
    path, size = tear(rig, 0, 0, values="\0" * 2_100)
    data = bytearray(path.read_bytes())
    data[4 * size + position] ^= mask
    path.write_bytes(data)
    reopened = rig.again().store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged) == (10, [(4, 5)])


def test_zeros_after_a_power_cut_are_cut(rig):
    partition = rig.topic()
    fill(rig, partition, 10)
    path = partition.segments[0].path
    data = path.read_bytes()
    path.write_bytes(data + bytes(8192))
    assert rig.again().store.partition("t", 0).log_end == 10
    assert path.read_bytes() == data


def test_damage_before_sound_batches_is_kept_aside_not_cut(rig):
    partition = rig.topic()
    fill(rig, partition, 10)
    rig.settle()
    path = partition.segments[0].path
    data = bytearray(path.read_bytes())
    data[len(data) // 10 * 4 + 5] ^= 0xFF
    path.write_bytes(data)
    again = rig.again()
    reopened = again.store.partition("t", 0)
    assert reopened.log_end == 10
    assert reopened.damaged == [(4, 5)]
    assert [int(value) for value in values(reopened, 5)] == list(range(5, 10))
    with pytest.raises(CorruptLog):
        reopened.read_blocking(4, 1)
    assert path.read_bytes() == data


def test_a_vanished_segment_takes_only_its_partition_offline(rig):
    lost, kept = rig.topic("lost"), rig.topic("kept")
    fill(rig, lost, 5)
    fill(rig, kept, 5)
    again = rig.again(clean=True)
    lost.segments[0].path.unlink()
    again = again.again(clean=True)
    with pytest.raises(Exception, match="is gone"):
        again.append(again.store.partition("lost", 0), "x")
    assert len(values(again.store.partition("kept", 0))) == 5


def test_a_missing_or_wrong_index_is_made_again(rig):
    partition = rig.topic(segment_bytes="2048")
    fill(rig, partition, 100)
    again = rig.again(clean=True)
    for number, path in enumerate(sorted(partition.folder.glob("*.index"))):
        path.unlink() if number % 2 else path.write_bytes(b"garbage")
    again = again.again(clean=True)
    assert [int(value) for value in values(again.store.partition("t", 0))] == list(range(100))


def wide(rig, partitions=20, rounds=3):
    rig.topic("wide", partitions=partitions)
    logs = [rig.store.partition("wide", index) for index in range(partitions)]
    for number in range(rounds):
        for log in logs:
            rig.append(log, f"{number}")
        rig.driver.flush()
    assert rig.disk.syncs
    assert all(path.suffix == ".journal" for path in rig.disk.syncs)
    return logs


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.5, 0.9])
def test_the_journal_restores_what_the_segments_lost(rig, kept):
    """A power cut: the journal was synced, the segments were not, so any part of them may be missing."""
    logs = wide(rig)
    for log in logs:
        path = log.segments[0].path
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * kept)])
    again = rig.again()
    for index in range(len(logs)):
        assert values(again.store.partition("wide", index)) == ["0", "1", "2"]
    assert len(rig.disk.list(rig.folder / "journal")) == 2  # The one that was begun since, and the spare one.


@pytest.mark.parametrize("kept", [0.0, 0.4, 0.7])
def test_the_journal_restores_the_tail_of_a_segment_with_others_after_it(tmp_path, kept):
    """The first segment was sealed before it was synced, and a power cut took its tail but not the second one."""
    rig = Rig(tmp_path, defaults=TopicSettings(segment_bytes=250))
    partition = rig.topic()
    for number in range(5):
        rig.write(partition, f"{number:030d}")
    first, second, *_ = partition.segments
    assert first.synced_size == 0, "only the journal has it"
    assert second.size
    data = first.path.read_bytes()
    first.path.write_bytes(data[: int(len(data) * kept)])
    reopened = rig.again(defaults=TopicSettings(segment_bytes=250)).store.partition("t", 0)
    assert values(reopened) == [f"{number:030d}" for number in range(5)]
    assert reopened.damaged == []


def test_the_journal_restores_segments_whose_pages_were_written_out_of_order(rig):
    logs = wide(rig)
    for log in logs:
        path = log.segments[0].path
        data = bytearray(path.read_bytes())
        third = len(data) // 3
        data[third : 2 * third] = bytes(third)
        path.write_bytes(data)
    again = rig.again()
    for index in range(len(logs)):
        reopened = again.store.partition("wide", index)
        assert values(reopened) == ["0", "1", "2"]
        assert reopened.damaged == []


def test_the_journal_restores_segments_whose_files_never_got_a_name(rig):
    logs = wide(rig)
    for log in logs:
        log.segments[0].path.unlink()
    again = rig.again()
    assert all(values(again.store.partition("wide", index)) == ["0", "1", "2"] for index in range(len(logs)))


def test_a_torn_journal_record_was_never_acknowledged(rig):
    logs = wide(rig, rounds=1)
    name, _ = rig.disk.list(rig.folder / "journal")
    path = rig.folder / "journal" / name
    data = bytearray(path.read_bytes())
    end = rig.store._journal.size
    data[end : end + 50] = b"\x01" * 50
    path.write_bytes(data)
    for log in logs:
        log.segments[0].path.unlink()
    again = rig.again()
    assert all(values(again.store.partition("wide", index)) == ["0"] for index in range(len(logs)))


def test_producers_survive_a_crash_without_the_batches_that_did_not(rig):
    partition = rig.topic()
    rig.write(partition, "a", producer_id=7, producer_epoch=0, base_sequence=0)
    rig.store.save_checkpoint(lambda error: None)
    rig.write(partition, "b", producer_id=7, producer_epoch=0, base_sequence=1)
    rig.append(partition, "never written", producer_id=7, producer_epoch=0, base_sequence=2)
    rig.store.save_checkpoint(lambda error: None)
    again = rig.again()
    reopened = again.store.partition("t", 0)
    duplicate = again.append(reopened, "b", producer_id=7, producer_epoch=0, base_sequence=1)
    assert duplicate.base_offset == 1
    assert again.write(reopened, "never written", producer_id=7, producer_epoch=0, base_sequence=2).base_offset == 2
    assert values(reopened) == ["a", "b", "never written"]


def test_a_crash_at_any_moment_keeps_what_was_flushed(tmp_path):
    """Random appends, flushes, checkpoints, rolls and deletions; then the process is gone and comes back."""
    for seed in range(25):
        chance = random.Random(seed)
        folder = tmp_path / str(seed)
        rig = Rig(folder, defaults=TopicSettings(segment_bytes=1024))
        rig.topic("x", partitions=6)
        promised: dict[int, list[str]] = {index: [] for index in range(6)}
        started = dict.fromkeys(range(6), 0)
        count = 0
        for _ in range(6):
            for _ in range(chance.randrange(40)):
                index = chance.randrange(6)
                partition = rig.store.partition("x", index)
                queued: list[tuple[int, str]] = []
                for _ in range(chance.randrange(1, 4)):
                    count += 1
                    rig.append(partition, f"{count}" * chance.randrange(1, 40))
                    queued.append((index, ""))
                step = chance.random()
                if step < 0.8:
                    rig.driver.flush()
                if step < 0.1:
                    rig.store.save_checkpoint(lambda error: None)
                if step < 0.05:
                    rig.store.commit.ask_settling()
                    rig.driver.flush()
                if step > 0.95:
                    before = chance.randrange(partition.log_start, partition.high_watermark + 1)
                    rig.store.delete_records(partition, before, lambda error: None)
            for index in range(6):
                partition = rig.store.partition("x", index)
                promised[index] = values(partition)
                started[index] = partition.log_start
            rig = rig.again(clean=chance.random() < 0.3)
            for index in range(6):
                partition = rig.store.partition("x", index)
                assert partition.log_start == started[index], seed
                assert values(partition)[: len(promised[index])] == promised[index], seed
                assert not partition.damaged, seed


def test_a_start_at_the_end_of_the_checkpointed_segment_takes_nothing_after_it(tmp_path):
    """The log was trimmed to its end, and then a new segment began there: the checkpoint still names the old one."""
    rig = Rig(tmp_path, defaults=TopicSettings(segment_bytes=250))
    partition = rig.topic()
    rig.write(partition, "x" * 30)
    rig.settle()
    rig.write(partition, "y" * 30)
    ended = []
    rig.store.delete_records(partition, partition.log_end, ended.append)
    assert ended == [None]
    rig.write(partition, "z" * 30)
    assert [segment.base_offset for segment in partition.segments] == [0, 2]
    reopened = rig.again(defaults=TopicSettings(segment_bytes=250)).store.partition("t", 0)
    assert reopened.write_error is None
    assert values(reopened) == ["z" * 30]


@pytest.mark.parametrize("is_journaled", [False, True])
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_power_cut_in_a_flush_over_several_segments_leaves_a_beginning_of_it(partitions, is_journaled):
    """A segment is written only when the one before it is durable: what is left of a flush has no hole."""
    ends = set()

    def prepare(disk):
        rig = PowerRig(disk, replicated=False)
        rig.topic(partitions=partitions)
        logs = prepare.logs = [rig.store.partition("t", index) for index in range(partitions)]
        for log in logs:
            rig.write(log, "before")
        if not is_journaled:
            rig.settle()
        prepare.expected = [[crc for _, _, crc in contents(log)] for log in logs]
        assert len(prepare.expected[0]) == 1

        def flush():
            for number in range(9):
                for log, expected in zip(logs, prepare.expected, strict=True):
                    data = batch(f"{number:0120d}", now_ms=rig.now_ms)
                    expected.append(parse_header(data).crc)
                    log.append(memoryview(data), now_ms=rig.now_ms)
            assert len(logs[0].segments) > 3
            rig.driver.flush()

        return flush

    for disk, is_over in after_every_crash(prepare, range(12)):
        again = PowerRig(disk, replicated=False)
        for index, (before, expected) in enumerate(zip(prepare.logs, prepare.expected, strict=True)):
            log = again.store.partition("t", index)
            assert not log.damaged
            assert not log.is_unclean
            assert log.durable_end >= (10 if is_over else before.durable_end)
            assert [crc for _, _, crc in contents(log)] == expected[: log.log_end]
            ends.add(log.log_end)
    assert {1, 10} <= ends
    assert len(ends) > 4


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_segment_is_not_written_when_the_one_before_it_failed_in_the_same_flush(tmp_path, call):
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition = rig.topic(segment_bytes="1024")
    for number in range(30):
        rig.append(partition, f"{number:0100d}")
    first, second, *_ = partition.segments
    disk.faults = {(call, first.path.name): errno.EIO, ("write", "journal"): errno.EIO}
    rig.driver.flush()
    assert partition.write_error is not None
    assert partition.durable_end == 0
    assert not second.path.exists()
