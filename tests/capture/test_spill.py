"""Spill files: what goes in comes out without the aborted, memory stays within the budget, nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture import sender
from walstream.capture.source import Transaction
from walstream.capture.spill import FRAME_BYTES, PREFIX, Budget, SpilledRows, SpillFile, SpillFolder
from walstream.capture.transactions import Assembler
from walstream.errors import StorageError

MIB = 1 << 20


def open_spill_files() -> int:
    """Files without a name that this process holds in a folder of pytest's."""
    gc.collect()
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "(deleted)" in str(descriptor.readlink())
    return found


@pytest.fixture
def no_files_left() -> Iterator[None]:
    before = open_spill_files()
    yield
    assert open_spill_files() == before


@settings(max_examples=100, deadline=None)
@given(
    frames=st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=20)), max_size=20
    ),
    aborted=st.sets(st.integers(1, 5)),
)
def test_rows_come_back_without_the_aborted(
    tmp_path_factory: pytest.TempPathFactory, frames: list[tuple[int, list[bytes]]], aborted: set[int]
) -> None:
    file = SpillFile(tmp_path_factory.getbasetemp())
    for subxid, rows in frames:
        file.append(subxid, rows, 1)
    file.flush()
    kept = [rows for subxid, rows in frames if subxid not in aborted]
    expected = list(itertools.chain.from_iterable(kept))
    assert file.count(aborted) == (len(expected), len(kept))
    spilled = SpilledRows(file, aborted, len(expected), head=[b"head"], tail=[b"tail"])
    for _ in range(2):
        assert list(spilled) == [b"head", *expected, b"tail"]
    assert len(spilled) == len(expected) + 2
    file.close()


@pytest.mark.parametrize("size", [1, 1000, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES])
def test_frames_end_at_their_size(tmp_path: Path, size: int) -> None:
    file = SpillFile(tmp_path)
    rows = [bytes((number,)) * size for number in range(20)]
    file.append(7, rows, 0)
    file.append(8, [b"aborted" * size], 0)
    file.append(7, rows[:1], 0)
    file.flush()
    frames = list(file.frames({8}))
    assert list(itertools.chain.from_iterable(frames)) == [*rows, rows[0]]
    assert all(sum(map(len, frame[:-1])) < FRAME_BYTES for frame in frames)
    assert file.count({8}) == (21, 0)
    file.close()


def test_two_readers_do_not_disturb_each_other(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    rows = [str(number).encode() * 1000 for number in range(2000)]
    file.append(1, rows, 0)
    file.flush()
    spilled = SpilledRows(file, (), len(rows))
    assert list(zip(spilled, spilled, strict=True)) == list(zip(rows, rows, strict=True))
    file.close()


def test_files_have_no_name_and_those_of_other_systems_are_swept(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}left").write_bytes(b"rows")
    (tmp_path / "other").write_bytes(b"not ours")
    # The folder of a capture without capture.spill_directory that was killed.
    (tmp_path / f"{PREFIX}folder").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path)
    folder = SpillFolder(tmp_path)
    file = folder.open()
    file.append(1, [b"row"], 0)
    file.flush()
    assert {entry.name for entry in tmp_path.iterdir()} == {"other", f"{PREFIX}folder"}
    file.close()


def test_the_folder_is_made_when_it_is_missing(tmp_path: Path) -> None:
    SpillFolder(tmp_path / "a" / "b").open().close()
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="memory_bytes_max"):
        SpillFolder(tmp_path / "file").open()


def large_transaction(xid: int, rows: int, *, bytes_each: int = 200) -> list[bytes]:
    value = "x" * bytes_each
    return [sender.insert(1, f"{number}-{value}", xid=xid) for number in range(rows)]


@pytest.mark.usefixtures("no_files_left")
def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """Three transactions of 20 MB each take turns in a budget of 1 MiB."""
    budget = Budget(MIB)
    assembler = Assembler(budget, SpillFolder(tmp_path).open)
    pieces = 100
    piece = {xid: large_transaction(xid, 1000) for xid in (5, 6, 7)}
    tracemalloc.start()
    for number in range(pieces):
        for xid, rows in piece.items():
            described = [sender.relation(1, "t", xid=xid)] if number == 0 else []
            start = [sender.stream_start(xid, first=number == 0), *described]
            assembler.feed([*start, *rows, sender.stream_stop()])
            assert budget.used_bytes <= MIB
    for xid in piece:
        assembler.feed([sender.stream_commit(xid, xid * 100, xid * 100 + 8)])
    taken, _ = assembler.take(1)
    taken += assembler.take(PLENTY)[0]
    for transaction in taken:
        assert transaction.change_count == pieces * 1000
        assert sum(len(data) > 100 for data in transaction.rows) == pieces * 1000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MIB
    for transaction in taken:
        transaction.close()
    assert budget.used_bytes == 0


PLENTY = 1 << 30


@pytest.mark.usefixtures("no_files_left")
def test_a_whole_transaction_spills_too(tmp_path: Path) -> None:
    budget = Budget(10_000)
    assembler = Assembler(budget, SpillFolder(tmp_path).open)
    assembler.feed([sender.begin(5, 100), sender.relation(1, "t")])
    for number in range(100):
        assembler.feed([sender.insert(1, f"{number}" * 100) for _ in range(10)])
        assert budget.used_bytes <= 10_000
    assembler.feed([sender.commit(100, 108)])
    (transaction,) = assembler.take(PLENTY)[0]
    assert isinstance(transaction.rows, SpilledRows)
    assert (len(transaction.rows), transaction.change_count) == (1001, 1000)
    transaction.close()


@pytest.mark.usefixtures("no_files_left")
def test_no_file_outlives_its_transaction(tmp_path: Path) -> None:
    assembler = Assembler(Budget(0), SpillFolder(tmp_path).open)
    before = open_spill_files()

    def stream(xid: int) -> None:
        start = [sender.stream_start(xid, first=True), sender.relation(1, "t", xid=xid)]
        assembler.feed([*start, *large_transaction(xid, 10), sender.stream_stop()])

    for xid in (1, 2, 3, 4):
        stream(xid)
    assert open_spill_files() == before + 4
    assembler.feed([sender.stream_abort(1, 1)])
    assert open_spill_files() == before + 3
    assembler.feed([sender.stream_commit(2, 200, 208), sender.stream_commit(3, 300, 308)])
    first, second = assembler.take(PLENTY)[0]
    first.close()
    first.close()
    assert list(first.rows) == []
    assert open_spill_files() == before + 2
    del second
    assert open_spill_files() == before + 1
    assembler.close()
    assert open_spill_files() == before


def test_what_was_handed_out_counts_until_it_is_closed(tmp_path: Path) -> None:
    budget = Budget(50_000)
    assembler = Assembler(budget, SpillFolder(tmp_path).open)

    def whole(xid: int) -> Transaction:
        assembler.feed([sender.begin(xid, xid), sender.relation(1, "t"), *large_transaction(0, 100)])
        assembler.feed([sender.commit(xid, xid + 1)])
        return assembler.take(PLENTY)[0][0]

    first = whole(1)
    assert isinstance(first.rows, list)
    held = budget.used_bytes
    assert held > 20_000
    second = whole(3)
    assert isinstance(second.rows, SpilledRows)
    first.close()
    second.close()
    assert budget.used_bytes == 0


def test_many_aborted_subtransactions_take_little(tmp_path: Path) -> None:
    """20,000 savepoints, half of them rolled back, in a budget of 100 kB."""
    budget = Budget(100_000)
    assembler = Assembler(budget, SpillFolder(tmp_path).open)
    assembler.feed([sender.stream_start(1, first=True), sender.relation(1, "t", xid=1), sender.stream_stop()])
    for subxid in range(2, 20_002):
        rows = [sender.insert(1, f"{subxid}", xid=subxid)]
        assembler.feed([sender.stream_start(1, first=False), *rows, sender.stream_stop()])
        if subxid % 2:
            assembler.feed([sender.stream_abort(1, subxid)])
    assembler.feed([sender.stream_commit(1, 100, 108)])
    (transaction,) = assembler.take(1)[0]
    assert transaction.change_count == 10_000
    assert [data[13:] for data in transaction.rows if data[:1] == b"I"] == [b"%d" % n for n in range(2, 20_002, 2)]
    transaction.close()
