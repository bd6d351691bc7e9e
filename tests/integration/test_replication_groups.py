"""Committed offsets on a static cluster of three real nodes: none that was acknowledged, or read, is taken back."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from walstream.node.process import NodeProcess

from .bare import Bare, request, text
from .replicating import TIMEOUT_S, Cluster, running
from .support import MakeNode, rounds, seeded, wait_for

OFFSETS_TOPIC = "__consumer_offsets"
OFFSET_COMMIT, OFFSET_FETCH = 8, 9
COORDINATOR_NOT_AVAILABLE = 15

pytestmark = pytest.mark.timeout(600)


class Offsets:
    """Commits rising offsets of one group at one coordinator, and knows which were acknowledged."""

    def __init__(self, coordinator: NodeProcess) -> None:
        self.coordinator = coordinator
        self.sent = self.acknowledged = 0
        self.read: list[int] = []
        self.failures: list[str] = []

    def _ask(self, raw: bytes) -> bytes | None:
        """Return the answer; None where there is none."""
        try:
            with Bare(self.coordinator.address) as connection:
                return connection.ask(raw)
        except OSError:
            return None

    def commit(self) -> bool:
        """Commit the next offset once; return whether that was acknowledged."""
        self.sent += 1
        topic = text("t") + struct.pack(">iiq", 1, 0, self.sent) + text("")
        body = text("g") + struct.pack(">i", -1) + text("") + struct.pack(">qi", -1, 1) + topic
        answer = self._ask(request(OFFSET_COMMIT, 2, body))
        if answer is None or answer[-2:] != bytes(2):
            return False
        self.acknowledged = self.sent
        return True

    def committed(self) -> int | None:
        """Return the committed offset; None where the coordinator does not know it yet."""
        answer = self._ask(
            request(OFFSET_FETCH, 1, text("g") + struct.pack(">i", 1) + text("t") + struct.pack(">ii", 1, 0))
        )
        if answer is None or answer[-2:] != bytes(2):
            return None
        (offset,) = struct.unpack_from(">q", answer, 4 + len(text("t")) + 4 + 4)
        return int(offset)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read all the time: each offset that is read must be the last acknowledged one or a later one."""
        ended = threading.Event()

        def read() -> None:
            while not ended.is_set():
                acknowledged = self.acknowledged
                offset = self.committed()
                if offset is None:
                    continue
                self.read.append(offset)
                if not acknowledged <= offset <= self.sent:
                    self.failures.append(f"{offset} was read, {acknowledged} of {self.sent} were acknowledged")
                time.sleep(0.005)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def test_an_offset_that_was_acknowledged_or_read_is_never_taken_back(make_node: MakeNode) -> None:
    """Followers stand still, the coordinator is killed right after a commit, or while one waits for followers."""
    _, dice = seeded()
    with running(make_node) as cluster:
        cluster.create("t")
        cluster.wait_in_sync(OFFSETS_TOPIC, 3)
        offsets = Offsets(cluster[1])
        wait_for(offsets.commit, "an offset is committed")
        with offsets.reading():
            for number in range(rounds(full=10, part=2)):
                paused = [2, 3] if number % 2 == 0 else [dice.choice([2, 3])]
                for follower in paused:
                    cluster.pause(follower)
                acknowledged = [offsets.commit() for _ in range(2)]
                if len(paused) == 2:
                    assert acknowledged == [False, False], "a commit is acknowledged by two replicas at least"
                else:
                    wait_for(offsets.commit, "an offset is committed without the follower that stands still")
                cluster[1].kill()
                for follower in paused:
                    cluster.resume(follower)
                cluster[1].start()
                wait_for(offsets.commit, "an offset is committed by the coordinator's next life", TIMEOUT_S)
                cluster[1].kill()  # Right after it was acknowledged.
                cluster[1].start()
                wait_for(offsets.committed, "the coordinator answers", TIMEOUT_S)
                cluster.wait_in_sync(OFFSETS_TOPIC, 3)
        assert offsets.failures == []
        assert offsets.read == sorted(offsets.read)
        assert offsets.committed() == offsets.acknowledged
        cluster.compare(OFFSETS_TOPIC)


def has_joined(node: NodeProcess) -> bool:
    meta = node.data / "meta.json"
    return meta.exists() and json.loads(meta.read_text())["joined_version"] >= 0


@pytest.mark.parametrize("paused", [[], [3], [1, 3]])
def test_a_commit_outlives_the_disk_of_its_coordinator(make_node: MakeNode, paused: list[int]) -> None:
    """Right after a commit all nodes are killed and the coordinator's disk is gone: another one has what was read."""
    cluster = Cluster(make_node, leaders={OFFSETS_TOPIC: 2})
    try:
        # Node 3 joins before the topic is created, so its disk cannot have lost records of it and it may lead at once.
        for number in (1, 3):
            cluster[number].spawn()
        wait_for(lambda: has_joined(cluster[3]), "the node joins", TIMEOUT_S)
        cluster[2].spawn()
        cluster.create("t")
        cluster.wait_in_sync(OFFSETS_TOPIC, 3)
        offsets = Offsets(cluster[2])
        wait_for(offsets.commit, "an offset is committed")
        for follower in paused:
            cluster.pause(follower)
        with offsets.reading():
            if len(paused) < 2:
                wait_for(offsets.commit, "an offset is committed")
            else:
                assert not offsets.commit(), "a commit is acknowledged by two replicas at least"
        for number in (2, 1, 3):
            cluster[number].kill()
        cluster.paused.clear()
        cluster.wipe(2)
        successor = 1 if paused == [3] else 3
        offsets.coordinator = cluster[successor]
        for number in (1, 2, 3):
            cluster[number].settings["replication.leaders"] = json.dumps([{"topics": OFFSETS_TOPIC, "node": successor}])
            cluster[number].spawn()
        for number in (1, 2, 3):
            wait_for(cluster[number].answers, "the node answers", TIMEOUT_S)
        wait_for(offsets.committed, "the new coordinator answers", TIMEOUT_S)
        assert offsets.failures == []
        assert [*offsets.read, offsets.committed()] == sorted([*offsets.read, offsets.committed() or 0])
        assert (offsets.committed() or 0) >= offsets.acknowledged
        wait_for(offsets.commit, "an offset is committed", TIMEOUT_S)
        assert offsets.committed() == offsets.acknowledged
    finally:
        cluster.end()


def test_a_commit_is_refused_while_the_followers_stand_still(make_node: MakeNode) -> None:
    """What the coordinator serves afterwards is what the next one loads, also for a group that was only refused."""
    groups = ("g", "refused", "never")

    def commit(group: str, offset: int) -> int:
        with Bare(cluster[1].address, timeout_s=30) as coordinator:
            return coordinator.commit(group, "t", offset)

    def served() -> list[int] | None:
        with Bare(cluster[1].address) as coordinator:
            answers = [coordinator.committed(group, "t") for group in groups]
        return None if any(error for error, _ in answers) else [offset for _, offset in answers]

    with running(make_node) as cluster:
        cluster.create("t")
        wait_for(lambda: commit("g", 10) == 0, "an offset is committed", TIMEOUT_S)
        cluster.wait_in_sync(OFFSETS_TOPIC, 3)
        cluster.pause(2)
        cluster.pause(3)
        try:
            # The coordinator learns only now that the followers do not answer: the commit is appended, then refused.
            assert commit("g", 20) == COORDINATOR_NOT_AVAILABLE
            assert commit("refused", 20) == COORDINATOR_NOT_AVAILABLE
            cluster.wait_in_sync(OFFSETS_TOPIC, 1)
            held = cluster.held(1, OFFSETS_TOPIC)
            assert commit("g", 30) == COORDINATOR_NOT_AVAILABLE
            assert commit("never", 30) == COORDINATOR_NOT_AVAILABLE
            assert cluster.held(1, OFFSETS_TOPIC) == held, "it is refused before it is appended"
            assert served() == [10, -1, -1]
        finally:
            cluster.resume(2)
            cluster.resume(3)
        cluster.wait_in_sync(OFFSETS_TOPIC, 3)
        wait_for(lambda: (served() or [0])[0] == 20, "the commit that was appended is visible")
        before = served()
        assert before is not None
        assert before[2] == -1, "what was not appended is nowhere"
        cluster[1].kill()
        cluster[1].start()
        wait_for(lambda: served() is not None, "the coordinator has loaded its offsets", TIMEOUT_S)
        assert served() == before
        wait_for(lambda: commit("g", 5) == 0, "an offset is committed", TIMEOUT_S)
        assert (served() or [0])[0] == 5
        cluster.compare(OFFSETS_TOPIC)
