"""File descriptors: the segments of a node keep few of them open, and running out of them passes."""

import errno
import os
import sys
import weakref
from pathlib import Path
from random import Random
from threading import Event, Thread, current_thread

import pytest

from log.rig import FaultyDisk, FaultyFile, LateDriver, Rig, batch, values
from walstream.errors import InvalidRecord, OutOfFiles, PartitionOffline
from walstream.log.batch import assemble, parse_header, stamp, validate
from walstream.log.compression import Compression
from walstream.log.disk import OsDisk
from walstream.log.index import Index
from walstream.log.records import Record, build_batch
from walstream.log.segment import OpenFiles, Segment
from walstream.log.settings import TopicSettings

MOST = 8


def open_segments(folder):
    """The descriptors of this process that are segments of a folder, deleted ones too."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            path = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if path.startswith(str(folder)) and any(part in path for part in (".log", ".clean", ".swap")):
            found.append(path)
    return found


class Watched(FaultyDisk):
    """A disk that notes which segments were closed between a write and the sync of what was written."""

    def __init__(self):
        super().__init__()
        self.closed_unsynced = []
        self.opened = 0

    def open(self, path, *, create=False):
        self.check("open", path)
        self.opened += 1
        file = WatchedFile(self, path, os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o640))
        if path.suffix == ".log":
            weakref.finalize(file, self._closed, path, file.state)
        return file

    def _closed(self, path: Path, state):
        if state["is_dirty"]:
            self.closed_unsynced.append(path)


class WatchedFile(FaultyFile):
    __slots__ = ("state",)

    def __init__(self, disk, path, fd):
        super().__init__(disk, path, fd)
        self.state = {"is_dirty": False}

    def pwritev(self, buffers, position):
        self.state["is_dirty"] = True
        return super().pwritev(buffers, position)

    def sync(self):
        super().sync()
        self.state["is_dirty"] = False


def test_a_segment_that_is_closed_before_its_last_batches_are_written_keeps_their_index(tmp_path):
    """An index made from the file as it was then would lack them: no search by time would find them again."""
    rig = Rig(tmp_path, driver=LateDriver(), open_files_max=1)
    partition, other = rig.topic(segment_bytes="1024"), rig.topic("other")
    rig.write(other, "o")
    rig.write(partition, "first")
    rig.driver.is_late = True
    rig.now_ms += 1000
    rig.append(partition, "last of its segment")
    rig.append(partition, "x" * 1024)
    sealed = partition.segments[0]
    assert sealed.sealed
    assert sealed.durable_size < sealed.size
    assert values(other) == ["o"], "its file takes the place of the sealed segment's"
    rig.driver.is_late = False
    while rig.driver.run_next():
        pass  # The index is saved beside the flush, and may be before it.
    rig.driver.flush()
    sealed.release()
    assert partition.offset_for_time(rig.now_ms) == (1, rig.now_ms)


@pytest.mark.parametrize("size", [50, 20_000], ids=["journaled", "synced"])
def test_a_log_that_is_written_and_never_read_keeps_few_files_open(tmp_path, size):
    rig = Rig(tmp_path, OsDisk(), open_files_max=MOST)
    partition = rig.topic(segment_bytes="1024")
    most = 0
    for number in range(300):
        rig.write(partition, f"{number}" + "." * size)
        most = max(most, len(open_segments(tmp_path)))
    assert len(partition.segments) > 3 * MOST
    assert most <= 2 * MOST
    assert values(partition) == [f"{number}" + "." * size for number in range(300)]


def test_more_partitions_than_files_are_written_read_and_recovered(tmp_path):
    count = 10 * MOST
    rig = Rig(tmp_path, OsDisk(), open_files_max=MOST)
    rig.topic("wide", partitions=count)
    for turn in range(3):
        for index in range(count):
            rig.append(rig.store.partition("wide", index), f"{turn}-{index}")
        rig.driver.flush()
        assert len(open_segments(tmp_path)) <= 2 * MOST
    for clean in (False, True):
        for index in range(count):
            assert values(rig.store.partition("wide", index)) == [f"{turn}-{index}" for turn in range(3)]
        assert len(open_segments(tmp_path)) <= 2 * MOST
        rig = rig.again(clean=clean, open_files_max=MOST)


@pytest.mark.parametrize("ack_before_fsync", [False, True])
def test_no_segment_is_closed_between_a_write_and_its_sync(tmp_path, ack_before_fsync):
    """The kernel may forget that it could not write pages once no file of them is open."""
    settings = TopicSettings(segment_bytes=2000, ack_before_fsync=ack_before_fsync)
    rig = Rig(tmp_path, Watched(), settings, open_files_max=MOST)
    rig.topic("wide", partitions=5 * MOST)
    random = Random(1)
    for turn in range(300):
        for _ in range(random.choice([1, 1, 3, MOST, 2 * MOST])):
            partition = rig.store.partition("wide", random.randrange(5 * MOST))
            rig.append(partition, f"{turn}" + "." * random.choice([10, 500, 20_000]))
        rig.driver.flush()
        if random.random() < 0.1:
            rig.settle()
    rig.settle()
    assert rig.disk.opened > 10 * MOST, "files are closed and opened again"
    assert rig.disk.closed_unsynced == []


def test_a_deleted_topic_keeps_no_file_open(tmp_path):
    """An open file keeps its space on the disk."""
    rig = Rig(tmp_path, OsDisk())
    partition = rig.topic(segment_bytes="1024")
    for number in range(40):
        rig.write(partition, f"{number}" + "." * 100)
    assert values(partition)
    assert open_segments(tmp_path)
    rig.store.delete_topics(["t"])
    rig.driver.flush()
    assert open_segments(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("part", [".log", ".journal"])
def test_a_partition_that_could_open_no_file_comes_back_by_itself(tmp_path, code, part):
    rig = Rig(tmp_path, Watched())
    partition, other = rig.topic(segment_bytes="1024"), rig.topic("other")
    written = []
    for number in range(5):
        rig.write(partition, f"{number}" + "." * 90)
        written.append(f"{number}" + "." * 90)
    rig.disk.faults["open", part] = code
    if part == ".journal":
        rig.store.commit.ask_settling()  # A new file of the journal is needed.
        rig.driver.flush()
    while partition.write_error is None:
        text = f"{len(written)}" + "." * 90
        rig.write(partition, text)
        if partition.write_error is None:
            written.append(text)
    assert isinstance(partition.write_error, OutOfFiles)
    assert str(partition.write_error).startswith("No more files can be opened for t-0: ")
    for _ in range(3):
        rig.now_ms += 1_000
        rig.store.tick()
        rig.driver.flush()
    with pytest.raises(OutOfFiles):
        rig.write(partition, "x")
    rig.disk.faults.clear()
    rig.now_ms += 1_000
    rig.store.tick()
    rig.driver.flush()
    rig.write(partition, "later")
    rig.write(other, "later")
    found = values(partition)
    assert found[: len(written)] == written
    assert found[-1] == "later"
    assert len(found) <= len(written) + 2, "what was not acknowledged may be there, and nothing else"
    assert values(rig.again().store.partition("t", 0)) == found


def test_a_sync_that_fails_on_the_way_back_keeps_the_journal_for_every_segment(tmp_path):
    """The kernel tells once of pages that it could not write, and settling has the same files open."""
    rig = Rig(tmp_path)
    partition = rig.topic(segment_bytes="1024")
    for number in range(3):
        rig.write(partition, f"{number}" + "." * 90)
    rig.write(partition, "synced" * 5_000)
    written, first = values(partition), partition.segments[0]
    assert [segment.synced_size < segment.size for segment in partition.segments] == [True, False]
    rig.disk.faults["write", ".log"] = errno.EMFILE
    rig.write(partition, "refused")
    assert isinstance(partition.write_error, OutOfFiles)
    rig.disk.faults.clear()
    rig.disk.faults["sync", first.path.name] = errno.EIO
    rig.store.tick()
    rig.driver.flush()
    assert isinstance(partition.write_error, OutOfFiles)
    rig.disk.faults.clear()
    rig.settle()
    os.truncate(first.path, 0)  # As a power cut leaves it.
    again = rig.again().store.partition("t", 0)
    assert (values(again), again.damaged) == (written, [])


def test_a_partition_that_could_open_no_file_waits_for_no_space(tmp_path, monkeypatch):
    """Those that never met the full disk take writes with as little space as there is."""
    rig = Rig(tmp_path)
    partition, other = rig.topic(), rig.topic("other")
    monkeypatch.setattr(rig.disk, "free_bytes", lambda path: 1)
    assert rig.store.resume_bytes > 1
    rig.disk.faults["write", "t@"] = errno.EMFILE
    rig.write(partition, "refused")
    assert isinstance(partition.write_error, OutOfFiles)
    rig.disk.faults.clear()
    rig.store.tick()
    rig.driver.flush()
    rig.write(partition, "later")
    rig.write(other, "later")
    assert values(partition)[-1] == values(other)[-1] == "later"


def test_a_start_that_can_open_no_file_changes_nothing(tmp_path):
    disk = Watched()
    rig = Rig(tmp_path, disk)
    partition = rig.topic(segment_bytes="1024")
    for number in range(20):
        rig.write(partition, f"{number}" + "." * 90)
    expected, saved = values(partition), disk.read(tmp_path / "checkpoint.json")
    disk.faults["open", "t@"] = errno.EMFILE
    for _ in range(2):
        with pytest.raises(OSError, match="EMFILE"):
            rig.again()
        assert disk.read(tmp_path / "checkpoint.json") == saved
    disk.faults.clear()
    again = rig.again().store.partition("t", 0)
    assert values(again) == expected
    assert not again.is_unclean


def test_a_few_bytes_cannot_claim_the_offsets_of_a_whole_segment():
    header = parse_header(batch("x"))
    for attributes in (1, 2, 3, 4):
        for count in (2**31 - 1, 2**20):
            data = assemble(
                header._replace(record_count=count, last_offset_delta=count - 1, attributes=attributes), b"not packed"
            )
            with pytest.raises(InvalidRecord, match="cannot fit in 10 bytes"):
                validate(data)


@pytest.mark.parametrize("compression", [Compression.GZIP, Compression.SNAPPY, Compression.LZ4, Compression.ZSTD])
def test_any_number_of_records_that_were_really_packed_is_taken(compression):
    """Records that compress best: without key or value, all at one time."""
    records = [Record(offset, 1_700_000_000_000, None, None) for offset in range(100_000)]
    data = build_batch(records, compression=compression)
    assert validate(data).record_count == 100_000


def test_files_are_counted_by_several_threads(tmp_path):
    """Readers, flushes and housekeeping touch, close and drop segments at the same time."""
    disk, open_files = OsDisk(), OpenFiles(2)
    segments, contents = [], {}
    for number in range(6):
        data = batch("x")
        stamp(data, number * 10, 0)
        contents[number * 10] = data
        segment = Segment(disk, tmp_path, number * 10, open_files)
        segment.note(parse_header(data))
        segment.file_to_write().pwritev([data], 0)
        segment.durable_size = segment.synced_size = segment.size
        segment.sealed = True
        segment.save_index()
        segments.append(segment)
    failures = []
    interval = sys.getswitchinterval()

    def read(seed):
        random = Random(seed)
        try:
            for _ in range(50_000):
                open_files.touch(random.choice(segments))
                random.choice(segments).index.row_for_offset(0)
            for _ in range(1_000):
                segment = random.choice(segments)
                assert segment.read(segment.base_offset, 100, cached=False, dense=True) == contents[segment.base_offset]
                assert segment.index.covered == segment.size
                if random.random() < 0.1:
                    open_files.forget(random.choice(segments))
                    random.choice(segments).release()
        except Exception as error:  # Whatever it is: it is the finding.
            failures.append(error)

    threads = [Thread(target=read, args=(seed,)) for seed in range(4)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("replicated", [False, True])
def test_an_append_that_cannot_load_the_index_is_refused_and_the_next_succeeds(tmp_path, replicated):
    """An index that the start could not read is read by the first append. It must not fail otherwise: what is not known
    to be the log's error takes a replica out of service."""

    def receive(partition, text):
        data = batch(text)
        stamp(data, partition.log_end, 1)
        if replicated:
            partition.append_replicated([memoryview(data)], offset=partition.log_end)
        else:
            partition.append(memoryview(batch(text)), now_ms=rig.now_ms)
        rig.driver.flush()

    rig = Rig(tmp_path, replicated=replicated)
    rig.topic()
    for text in ("before", "refused", "after"):
        partition = rig.store.partition("t", 0)
        if replicated:
            partition.become_follower(1, lambda error: None)
        if text == "refused":
            with pytest.raises(PartitionOffline):
                receive(partition, text)
            rig.disk.faults.clear()
        else:
            receive(partition, text)
            rig.disk.faults["read", ".index"] = errno.EMFILE
            rig = rig.again(clean=True, replicated=replicated)
    rig.disk.faults.clear()
    partition = rig.store.partition("t", 0)
    partition.advance_high_watermark(2)
    assert values(partition) == ["before", "after"]


def test_a_log_with_append_time_comes_back_when_its_index_can_be_read(tmp_path):
    """The index of the segment before an empty one was read when recovery was done: the log was held for ever."""
    rig = Rig(tmp_path)
    partition = rig.topic(message_timestamp_type="LogAppendTime", segment_bytes="1024")
    while len(partition.segments) < 2:
        rig.write(partition, "x" * 200)
    while len(partition.segments) < 3:
        rig.settle()
        rig.disk.faults["write", f"{partition.log_end:020d}.log"] = errno.EMFILE
        rig.write(partition, "x" * 200)
    assert isinstance(partition.write_error, OutOfFiles)
    end = partition.durable_end
    rig.disk.faults.clear()
    for segment in partition.segments:
        segment.release()
    rig.disk.faults["read", partition.segments[-2].index_path.name] = errno.EMFILE
    rig.store.tick()
    rig.driver.flush()
    assert isinstance(partition.write_error, OutOfFiles)
    rig.disk.faults.clear()
    rig.store.tick()
    rig.driver.flush()
    assert (partition.write_error, partition.is_held, partition.log_end) == (None, False, end)


# ── segments that have lost their place ──────────────────────────────────────────────────────────────────────────────


def several(rig, count=30, **config):
    """Return a log of several segments, all of them synced and open."""
    partition = rig.topic(segment_bytes="1024", **config)
    for number in range(count):
        rig.write(partition, f"{number}" + "." * 90, keys=[f"{number % 3}"])
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    assert values(partition)
    return partition


def deleted_segments(folder):
    return [path for path in open_segments(folder) if path.endswith("(deleted)")]


def test_a_removed_segment_is_opened_by_no_reader_that_found_it_before(tmp_path):
    """It was counted as open again, and its space taken, until as many other segments had been opened."""
    rig = Rig(tmp_path, OsDisk())
    partition = several(rig)
    segment = partition.segments[0]
    file = segment.file
    rig.store.delete_records(partition, partition.high_watermark, lambda error: None)
    rig.driver.flush()
    assert len(deleted_segments(tmp_path)) == 1, "only the file that a reader holds"
    assert file.pread(10, 0), "it reads on"
    for ask in (lambda: segment.file, lambda: segment.read(0, 100, cached=False, dense=True)):
        with pytest.raises(FileNotFoundError):
            ask()
    rig.store.open_files.touch(segment)
    assert id(segment) not in rig.store.open_files._open
    del file
    assert deleted_segments(tmp_path) == []


def reopen(rig, partition):
    partition.stop(OutOfFiles("no files"))
    rig.store.tick()
    rig.driver.flush()
    assert partition.write_error is None


def truncate(rig, partition):
    partition.become_follower(1, lambda error: None)
    partition.truncate(3, lambda error: None)
    rig.driver.flush()


def reset(rig, partition):
    partition.become_follower(1, lambda error: None)
    partition.reset(0, lambda error: None)
    rig.driver.flush()


def undo_a_round(rig, partition):
    rig.disk.faults["rename", ".swap"] = errno.EIO
    rig.store.compact()
    assert not list(partition.folder.glob("*.clean"))
    rig.disk.faults.clear()


class NoRename(FaultyDisk):
    def rename(self, source, target):
        self.check("rename", target)
        super().rename(source, target)


@pytest.mark.parametrize("change", [reopen, truncate, reset, undo_a_round])
def test_a_segment_that_has_lost_its_place_is_closed(tmp_path, change):
    """What replaces it is deleted with a file of its own; this one kept the space."""
    rig = Rig(tmp_path, NoRename(), replicated=True)
    partition = rig.topic(segment_bytes="1024", cleanup_policy="compact", min_cleanable_dirty_ratio="0")
    partition.become_leader(1, lambda error: None)
    for number in range(30):
        rig.write(partition, f"{number}" + "." * 90, keys=[f"{number % 3}"])
    rig.settle()
    partition.advance_high_watermark(30)
    rig.store.save_checkpoint(lambda error: None)
    assert values(partition)
    assert len(open_segments(tmp_path)) == len(partition.segments)
    found = list(partition.segments)
    change(rig, partition)
    assert deleted_segments(tmp_path) == []
    assert len(open_segments(tmp_path)) <= len(partition.segments)
    for segment in found:
        if not any(segment is one for one in partition.segments):
            with pytest.raises(FileNotFoundError):
                segment.file  # noqa: B018 - opens it


@pytest.mark.parametrize("look", ["offset_for_time", "max_timestamp", "sealed_range"])
def test_a_look_up_finds_its_way_when_a_segment_is_removed_meanwhile(tmp_path, monkeypatch, look):
    rig = Rig(tmp_path, OsDisk())
    partition = several(rig)
    headers = Segment.headers

    def removed(segment, *arguments, **options):
        monkeypatch.undo()
        rig.store.delete_records(partition, partition.segments[1].base_offset, lambda error: None)
        assert segment.is_closed
        return headers(segment, *arguments, **options)

    monkeypatch.setattr(Segment, "headers", removed)
    if look == "sealed_range":
        assert partition.sealed_range(0, 1 << 20) is None
    else:
        found = partition.max_timestamp() if look == "max_timestamp" else partition.offset_for_time(rig.now_ms)
        assert found == (partition.log_start, rig.now_ms)


def test_segments_are_removed_once_no_round_reads_them(tmp_path):
    """A round would be undone, and the next one, as long as retention finds something each time."""
    rig = Rig(tmp_path, OsDisk())
    partition = several(rig, cleanup_policy="compact,delete", min_cleanable_dirty_ratio="0")
    execute, made = rig.store._rounds._cleaner.execute, []

    def during(work):
        rig.store.delete_records(partition, partition.segments[2].base_offset, lambda error: None)
        work.segments[0].release()  # As others that are opened make it.
        execute(work)
        made.extend(work.made)

    rig.store._rounds._cleaner.execute = during
    rig.store.compact()
    rig.driver.flush()
    assert made
    assert partition.log_start > 0
    assert [segment.base_offset for segment in partition.segments] == sorted(
        int(path.stem) for path in partition.folder.glob("*.log")
    )
    assert deleted_segments(tmp_path) == []


# ── an index that is loaded by one thread while another adds to it ───────────────────────────────────────────────────


class SlowLoad:
    """Holds back the first load of an index, made from the segment as it was, until `end`."""

    def __init__(self, monkeypatch, segment):
        self._is_made, self._may_end = Event(), Event()
        self._segment = segment
        self._load = Segment._load_index
        self._reader = Thread(target=lambda: segment.index)
        monkeypatch.setattr(Segment, "_load_index", lambda one: self._held_back(one))

    def _held_back(self, segment):
        index = self._load(segment)
        if current_thread() is self._reader:
            self._is_made.set()
            self._may_end.wait(10)
        return index

    def begin(self, seconds=10):
        self._reader.start()
        return self._is_made.wait(seconds)

    def end(self):
        self._may_end.set()
        self._reader.join(10)
        assert not self._reader.is_alive()


def test_an_append_is_in_the_index_that_a_reader_loads_meanwhile(tmp_path, monkeypatch):
    """The start could not open its file. The reader's index would take the place of the one with the batch."""
    rig = Rig(tmp_path)
    rig.write(rig.topic(), "before")
    rig.disk.faults["read", ".index"] = errno.EMFILE
    rig = rig.again(clean=True)
    rig.disk.faults.clear()
    partition = rig.store.partition("t", 0)
    segment = partition.segments[-1]
    assert not segment.is_index_loaded
    rig.now_ms += 1_000
    load = SlowLoad(monkeypatch, segment)
    assert load.begin()
    append = Thread(target=rig.append, args=(partition, "after"))
    append.start()
    append.join(0.2)
    load.end()
    append.join(10)
    rig.driver.flush()
    assert segment.index.covered == segment.size
    assert partition.offset_for_time(rig.now_ms) == (1, rig.now_ms)


def test_a_repair_is_in_the_index_that_a_reader_loads_meanwhile(tmp_path, monkeypatch):
    """The index was dropped, with the least recently used file, just before the batches were added to it."""
    rig = Rig(tmp_path)
    partition = several(rig)
    segment, end = partition.segments[0], partition.segments[1].base_offset
    *_, (position, last) = segment.headers()
    data = bytes(segment.file.pread(last.length, position))
    segment.size = segment.durable_size = segment.synced_size = position
    segment.index.truncate(position)
    segment.save_index()
    load, truncate = SlowLoad(monkeypatch, segment), Index.truncate

    def dropped(index, at):
        segment.release()
        load.begin(0.2)
        truncate(index, at)

    monkeypatch.setattr(Index, "truncate", dropped)
    segment.extend(position, [parse_header(data)])
    load.end()
    assert segment.index.covered == segment.size == position + last.length
    assert values(partition, end - 1)[0] == f"{end - 1}" + "." * 90
