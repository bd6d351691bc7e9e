from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from walstream.sim.disk import PowerLost, SimDisk, SimFile

FOLDER = Path("/data")
FILE = FOLDER / "file"


def disk_with_file(seed: int = 1) -> SimDisk:
    """A disk with an empty file whose name is durable."""
    disk = SimDisk(Random(seed))
    disk.make_directory(FOLDER)
    disk.open(FILE, create=True)
    disk.sync_directory(FOLDER)
    return disk


def test_what_was_synced_survives_every_crash() -> None:
    for seed in range(50):
        disk = disk_with_file(seed)
        file = disk.open(FILE)
        file.pwritev([b"kept ", b"for good"], 0)
        file.sync()
        file.pwritev([b"x" * 2000], 13)
        disk.crash()
        assert (disk.read(FILE) or b"").startswith(b"kept for good")


def test_a_crash_keeps_loses_and_tears_what_was_not_synced() -> None:
    outcomes = set()
    for seed in range(200):
        disk = disk_with_file(seed)
        disk.open(FILE).pwritev([b"x" * 1500], 0)
        assert disk.read(FILE) == b"x" * 1500
        disk.crash()
        content = disk.read(FILE) or b""
        outcomes.add("all" if content == b"x" * 1500 else "none" if not content else "torn")
        if b"\0" in content:
            outcomes.add("holes")
    assert outcomes == {"all", "none", "torn", "holes"}


def test_a_name_is_durable_only_with_its_folder() -> None:
    found = set()
    for seed in range(40):
        disk = SimDisk(Random(seed))
        disk.make_directory(FOLDER)
        disk.open(FILE, create=True).sync()
        disk.crash()
        found.add(tuple(disk.list(FOLDER)))
    assert found == {(), ("file",)}


def test_renames_are_undone_by_a_crash_but_whole() -> None:
    found = set()
    for seed in range(60):
        disk = disk_with_file(seed)
        disk.rename(FILE, FOLDER / "other")
        disk.remove(FOLDER / "other")
        disk.crash()
        found.add(tuple(disk.list(FOLDER)))
    assert found == {("file",), ("other",), ()}


def test_a_durable_write_replaces_the_whole_or_nothing() -> None:
    for fuse in range(8):
        disk = disk_with_file(fuse)
        disk.write(FILE, b"old", durable=True)
        disk.fuse = fuse
        try:
            disk.write(FILE, b"new!", durable=True)
            expected = {b"new!"}
        except PowerLost:
            expected = {b"old", b"new!"}
        disk.crash()
        assert disk.read(FILE) in expected


def test_moving_a_folder_takes_its_files_along() -> None:
    disk = SimDisk(Random(1))
    disk.make_directory(FOLDER / "topics" / "t")
    disk.make_directory(FOLDER / "trash")
    disk.write(FOLDER / "topics" / "t" / "f", b"1", durable=True)
    disk.rename(FOLDER / "topics" / "t", FOLDER / "trash" / "x")
    disk.sync_directory(FOLDER / "topics")
    disk.crash()
    assert disk.list(FOLDER / "topics") == []
    assert disk.read(FOLDER / "trash" / "x" / "f") == b"1"
    disk.remove(FOLDER / "trash" / "x")
    assert disk.list(FOLDER / "trash") == []


def test_a_full_disk_stops_a_write_in_the_middle_and_lets_overwrite() -> None:
    disk = disk_with_file()
    file = disk.open(FILE)
    file.pwritev([b"abc"], 0)
    disk.is_full = True
    with pytest.raises(OSError) as refused:
        file.pwritev([b"xyz!"], 1)
    assert refused.value.errno == errno.ENOSPC
    assert disk.read(FILE) == b"axy"
    file.pwritev([b"A"], 0)
    assert disk.free_bytes(FOLDER) == 0
    with pytest.raises(OSError):
        disk.write(FOLDER / "small", b"", durable=False)


def test_after_a_failed_sync_the_next_one_covers_nothing_of_it() -> None:
    lost = 0
    for seed in range(60):
        disk = disk_with_file(seed)
        file = disk.open(FILE)
        file.pwritev([b"doubtful"], 0)
        disk.failing_syncs = 1
        with pytest.raises(OSError):
            file.sync()
        assert disk.read(FILE) == b"doubtful"
        file.sync()
        disk.crash()
        lost += disk.read(FILE) != b"doubtful"
    assert lost


def test_rot_flips_one_bit_of_what_is_durable() -> None:
    disk = disk_with_file()
    disk.write(FILE, bytes(100), durable=True)
    where = disk.rot(lambda path: 10 if path.endswith("file") else 0)
    assert where is not None
    assert where.startswith("data/file@")
    content = disk.read(FILE) or b""
    assert sum(bin(byte).count("1") for byte in content) == sum(bin(byte).count("1") for byte in content[:10]) == 1
    assert disk.rot(lambda path: 10 if path.endswith("nothing") else 0) is None


def test_a_wiped_disk_is_empty() -> None:
    disk = disk_with_file()
    disk.wipe()
    assert disk.list(FOLDER) == []
    assert disk.read(FILE) is None
    with pytest.raises(FileNotFoundError):
        disk.open(FILE)


def test_the_fuse_cuts_the_power_at_the_operation() -> None:
    disk = disk_with_file()
    disk.fuse = 1
    file = disk.open(FILE)
    file.pwritev([b"done"], 0)
    with pytest.raises(PowerLost):
        file.sync()
    disk.crash()
    assert disk.fuse is None


@pytest.mark.parametrize(
    ("operation", "act"),
    [
        ("create", lambda disk, file: disk.open(FOLDER / "new", create=True)),
        ("open", lambda disk, file: disk.open(FOLDER / "a")),
        ("write", lambda disk, file: file.pwritev([b"x"], 0)),
        ("sync", lambda disk, file: file.sync()),
        ("truncate", lambda disk, file: file.truncate(0)),
        ("pread", lambda disk, file: file.pread(1, 0)),
        ("rename", lambda disk, file: disk.rename(FOLDER / "a", FOLDER / "b")),
        ("remove", lambda disk, file: disk.remove(FOLDER / "a")),
        ("sync_directory", lambda disk, file: disk.sync_directory(FOLDER)),
        ("read", lambda disk, file: disk.read(FOLDER / "a")),
        ("replace", lambda disk, file: disk.write(FOLDER / "a", b"x", durable=True)),
        ("list", lambda disk, file: disk.list(FOLDER)),
    ],
)  # fmt: skip
def test_each_operation_fails_once_on_demand(operation: str, act: Callable[[SimDisk, SimFile], object]) -> None:
    disk = SimDisk(Random(1))
    disk.make_directory(FOLDER)
    file = disk.open(FOLDER / "a", create=True)
    file.pwritev([b"abc"], 0)
    file.sync()
    disk.fail_after, disk.fail_only, disk.fail_errno = 0, operation, errno.EIO
    with pytest.raises(OSError) as refused:
        act(disk, file)
    assert refused.value.errno == errno.EIO
    assert (disk.fail_after, disk.failures, disk.met) == (None, 1, {errno.EIO})
    act(disk, file)


def test_an_error_waits_for_an_operation_that_may_meet_it() -> None:
    disk = SimDisk(Random(1))
    file = disk.open(Path("/a"), create=True)
    disk.fail_after, disk.fail_errno = 0, errno.EMFILE
    file.pwritev([b"abc"], 0)
    file.sync()
    with pytest.raises(OSError):
        disk.open(Path("/a"))


def test_a_disk_with_a_capacity_is_full_at_some_point_and_keeps_its_reserve() -> None:
    disk = SimDisk(Random(1), capacity=1_000)
    assert disk.keep_reserve(400)
    file = disk.open(Path("/a"), create=True)
    file.pwritev([bytes(500)], 0)
    assert (disk.free_bytes(Path("/")), disk.size_bytes(Path("/"))) == (100, 1_000)
    with pytest.raises(OSError):
        file.pwritev([bytes(200)], 500)
    assert file.size() == 600, "what fits was written"
    with pytest.raises(OSError):
        disk.write(Path("/b"), bytes(50), durable=False)
    disk.write(Path("/b"), bytes(50), durable=True)
    assert disk.is_reserve_spent
    assert disk.free_bytes(Path("/")) == 350
    disk.remove(Path("/a"))
    assert disk.free_bytes(Path("/")) == 350, "it is still open"
    file.close()
    assert disk.free_bytes(Path("/")) == 950
    assert disk.keep_reserve(400)
    assert not disk.is_reserve_spent


def test_open_files_are_counted_until_they_are_closed_or_their_process_ends() -> None:
    disk = SimDisk(Random(1))
    first, second = disk.open(Path("/a"), create=True), disk.open(Path("/a"))
    assert disk.open_files == 2
    first.close()
    first.close()
    del second
    assert disk.open_files == 0
    third = disk.open(Path("/a"))
    disk.begin_process()
    assert disk.open_files == 0
    third.close()
    assert disk.open_files == 0
