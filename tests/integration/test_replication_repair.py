"""Bytes that rot on the disk of a real node: found although nobody reads them, and fetched from another replica."""

from __future__ import annotations

import pytest

from .clients import read_messages
from .replicating import running, write
from .support import MakeNode, wait_for

pytestmark = pytest.mark.timeout(300)

COUNT = 2_000


@pytest.mark.parametrize("victim", [1, 2], ids=["leader", "follower"])
@pytest.mark.parametrize("share", [0.0, 0.5], ids=["header", "record"])
def test_rot_is_found_and_repaired(make_node: MakeNode, victim: int, share: float) -> None:
    with running(make_node) as cluster:
        cluster.create("t", min_insync_replicas=2, segment_bytes=50_000)
        write(cluster.address, "t", 0, COUNT)
        assert cluster.compare("t") > 3
        folder = cluster[victim].data / "topics" / "t" / "0"
        file = sorted(folder.glob("*.log"))[1]
        sound = file.read_bytes()
        with file.open("r+b") as rotting:
            position = int(len(sound) * share) + 14  # Of a header, the bits of the leader epoch: no checksum has them.
            rotting.seek(position)
            rotting.write(bytes([sound[position] ^ 1]))
        wait_for(lambda: "damage found" in cluster[victim].log_text(), "the scrub finds it", 60)
        wait_for(lambda: file.read_bytes() == sound, "it is fetched from a peer", 60)
        wait_for(lambda: "all damage is repaired" in cluster[victim].log_text(), "the node knows", 30)
        cluster.wait_in_sync("t", 3)
        cluster.compare("t")
        found = [int(message.value()) for message in read_messages(cluster.address, "t", 0, log_level=0)]
        assert found == list(range(COUNT))
