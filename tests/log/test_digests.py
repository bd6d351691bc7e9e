from pathlib import Path

import pytest

from log.rig import Rig
from walstream.log import digests
from walstream.log.partition_log import PartitionLog


def written(folder: Path, *batches: str, **config: str) -> PartitionLog:
    rig = Rig(folder)
    partition = rig.topic(**config)
    for values in batches:
        rig.write(partition, *values.split())
    return partition


LAST_OFFSET_DELTA = 23
"""Where it stands in a batch, in four bytes."""

BATCHES = ("a b c", "d", "e f g h", "i j", "k")
"""They begin at 0, 3, 4, 8 and 10; the log ends at 11."""


def test_same_batches_in_other_segments_have_the_same_digest(tmp_path: Path) -> None:
    one = written(tmp_path / "one", *BATCHES)
    other = written(tmp_path / "other", *BATCHES, segment_bytes="1048576")
    other.roll()
    assert one.digest(0, 11) == other.digest(0, 11)
    assert one.digest(0, 11).valid_from == 0
    assert len(one.digest(0, 11).value) == 16


@pytest.mark.parametrize(("start", "end"), [(0, 11), (3, 8), (2, 8), (5, 11), (5, 6), (0, 1), (1, 10)])
def test_range_need_not_lie_between_batches(tmp_path: Path, start: int, end: int) -> None:
    one = written(tmp_path / "one", *BATCHES)
    other = written(tmp_path / "other", *BATCHES)
    assert one.digest(start, end) == other.digest(start, end)
    assert one.digest(start, end).valid_from == start


def test_each_batch_is_in_exactly_one_of_two_neighbours(tmp_path: Path) -> None:
    one = written(tmp_path / "one", *BATCHES)
    other = written(tmp_path / "other", "a b c", "d", "e f g X", "i j", "k")
    for middle in range(1, 11):
        halves = [one.digest(0, middle) == other.digest(0, middle), one.digest(middle, 11) == other.digest(middle, 11)]
        assert halves == ([True, False] if middle <= 4 else [False, True])


def test_range_that_is_not_whole_is_void(tmp_path: Path) -> None:
    one = written(tmp_path / "one", *BATCHES)
    assert one.digest(4, 20).valid_from == 20
    one.advance_start(5)
    assert one.digest(3, 11).valid_from == 5
    assert one.digest(5, 11).value


@pytest.mark.parametrize("until", [6, 11])
def test_a_batch_that_says_it_reaches_beyond_its_segment_hides_nothing(tmp_path: Path, until: int) -> None:
    """Its last offset has rotted, and no batch after it in its segment contradicts it."""
    rig = Rig(tmp_path)
    partition = rig.topic()
    for number, values in enumerate(BATCHES):
        rig.write(partition, *values.split())
        if number == 1:
            partition.roll()
    sound = partition.digest(5, until)
    (_, (position, _)) = partition.segments[0].headers()
    file = bytearray(partition.segments[0].path.read_bytes())
    file[position + LAST_OFFSET_DELTA + 3] ^= 0x04
    partition.segments[0].path.write_bytes(file)
    assert partition.digest(5, until) == sound, "it is in another segment"
    assert partition.digest(3, until).valid_from == until, "it is not believed"


def test_the_quick_way_and_the_careful_one_agree(tmp_path: Path) -> None:
    log = written(tmp_path / "one", *BATCHES, segment_bytes="1048576")
    for start in range(10):
        for end in range(start + 1, 11):
            quick = digests._quick(log.segments, start, end)
            assert quick is not None
            assert quick == digests._careful(log.segments, start, end)


def test_the_quick_way_believes_the_last_batch_of_a_segment_if_it_ends_where_that_does(tmp_path: Path) -> None:
    log = written(tmp_path / "one", *BATCHES, segment_bytes="1048576")
    assert digests._quick(log.segments, 0, 11) == digests._careful(log.segments, 0, 11) is not None
    log.roll()
    assert digests._quick(log.segments, 0, 11) == digests._careful(log.segments, 0, 11) is not None
    assert digests._quick(log.segments, 0, 12) is None, "more than the segment has"


@pytest.mark.parametrize("field", [8, LAST_OFFSET_DELTA])
def test_the_quick_way_leaves_a_last_batch_that_ends_elsewhere_to_the_careful_one(tmp_path: Path, field: int) -> None:
    log = written(tmp_path / "one", *BATCHES, segment_bytes="1048576")
    file = log.segments[0].file
    *_, (position, _) = log.segments[0].headers()
    said = int.from_bytes(file.pread(4, position + field), "big")
    file.pwritev([(said + 1).to_bytes(4, "big")], position + field)
    assert digests._quick(log.segments, 0, 11) is None
    assert digests._quick(log.segments, 0, 10) is not None, "the range ends before it"


@pytest.mark.parametrize("field", [8, LAST_OFFSET_DELTA])
def test_the_quick_way_believes_no_batch_that_the_next_one_contradicts(tmp_path: Path, field: int) -> None:
    """The batch at 4 says another length, or another last offset, than it had."""
    log = written(tmp_path / "one", *BATCHES, segment_bytes="1048576")
    file = log.segments[0].file
    (position,) = (at for at, header in log.segments[0].headers() if header.base_offset == 4)
    said = int.from_bytes(file.pread(4, position + field), "big")
    file.pwritev([(said + 1).to_bytes(4, "big")], position + field)
    assert digests._quick(log.segments, 0, 4) is not None, "the range ends before it"
    for end in (5, 8, 10):
        assert digests._quick(log.segments, 0, end) is None
        assert log.digest(0, end).valid_from == end
