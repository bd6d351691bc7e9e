"""Bytes that rot on the disk of a real node: found although nobody reads them, and fetched from another replica."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .clients import read_messages
from .replicating import Cluster, running, write
from .support import MakeNode, segments_of, wait_for

pytestmark = pytest.mark.timeout(300)

COUNT = 2_000


HEADER = struct.Struct(">qii")


def rot(file: Path, position: int) -> bytes:
    """Turn one bit of a file; return what it was."""
    sound = file.read_bytes()
    with file.open("r+b") as rotting:
        rotting.seek(position)
        rotting.write(bytes([sound[position] ^ 1]))
    return sound


def in_records(file: Path) -> int:
    """A place among the records of a segment's first batch: its checksum tells, nothing else does."""
    _, length, _ = HEADER.unpack_from(file.read_bytes())
    return 12 + length - 5


def in_epoch(_: Path) -> int:
    """The leader epoch of a segment's first batch: no checksum has it."""
    return HEADER.size - 2


@contextmanager
def written(make_node: MakeNode) -> Iterator[Cluster]:
    """A cluster with a topic of several segments, which is sound in the end."""
    with running(make_node, replication__scrub_interval_ms=0) as cluster:
        cluster.create("t", min_insync_replicas=2, segment_bytes=50_000)
        write(cluster.address, "t", 0, COUNT)
        assert cluster.compare("t") > 3
        yield cluster
        cluster.wait_in_sync("t", 3)
        cluster.compare("t")
        found = [int(message.value()) for message in read_messages(cluster.address, "t", 0, log_level=0)]
        assert found == list(range(COUNT))


def second_segment(cluster: Cluster, victim: int) -> Path:
    return segments_of(cluster[victim].data, "t")[1]


@pytest.mark.parametrize(
    ("victim", "place"), [(1, in_records), (2, in_records), (1, in_epoch)], ids=["leader", "follower", "leader-header"]
)
def test_rot_is_found_and_repaired(make_node: MakeNode, victim: int, place: Callable[[Path], int]) -> None:
    with written(make_node) as cluster:
        file = second_segment(cluster, victim)
        sound = rot(file, place(file))
        wait_for(lambda: "damage found" in cluster[victim].log_text(), "the scrub finds it", 60)
        wait_for(lambda: file.read_bytes() == sound, "it is fetched from a peer", 60)
        wait_for(lambda: "all damage is repaired" in cluster[victim].log_text(), "the node knows", 30)


@pytest.mark.parametrize("place", [in_records, in_epoch], ids=["records", "header"])
def test_rot_that_nobody_reads_is_found_when_a_follower_refuses_it(
    make_node: MakeNode, place: Callable[[Path], int]
) -> None:
    """Sealed segments are sent without being looked at; the one who looks at them is the follower."""
    with running(make_node, replication__scrub_bytes_per_s=0) as cluster:
        cluster.create("t", min_insync_replicas=2, segment_bytes=200_000)
        write(cluster.address, "t", 0, 4 * COUNT)
        assert cluster.compare("t") > 3
        cluster[3].kill()
        cluster.wipe(3)
        file = second_segment(cluster, 1)
        sound = rot(file, place(file))
        cluster[3].start()
        wait_for(lambda: "all damage is repaired" in cluster[1].log_text(), "it is found, and fetched from a peer", 60)
        assert file.read_bytes() == sound
        cluster.wait_in_sync("t", 3)
        cluster.compare("t")


def test_rot_in_a_followers_header_is_found_by_whoever_looks_first(make_node: MakeNode) -> None:
    """Its own scrub, which has it repaired, or its leader's comparison, which has it copied anew."""
    with written(make_node) as cluster:
        file = second_segment(cluster, 2)
        rot(file, in_epoch(file))

        def is_mended() -> bool:
            told = cluster[2].log_text()
            return "all damage is repaired" in told or "log begun anew" in told or "log cut back" in told

        wait_for(is_mended, "it is mended", 60)
