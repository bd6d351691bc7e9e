"""What a node knows of itself: numbers that are promised are never given again, whichever threads ask for them."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

from walstream.cluster.local import PRODUCER_ID_BLOCK, Catalogue
from walstream.log.disk import OsDisk
from walstream.log.settings import TopicSettings

NOW_MS = 1_700_000_000_000


class SlowDisk(OsDisk):
    """A real disk of which one durable write waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_slow = False
        self.has_begun, self.may_end = Event(), Event()

    def write(self, path: Path, data: bytes, *, durable: bool) -> None:
        if self.is_slow:
            self.is_slow = False
            self.has_begun.set()
            assert self.may_end.wait(10)
        super().write(path, data, durable=durable)


def test_an_append_time_and_producer_ids_are_reserved_one_after_the_other(tmp_path: Path) -> None:
    """Housekeeping reserves the one, a thread for requests the others, and both are in one file: the later writer must
    not put back what the earlier one had read."""
    disk = SlowDisk()
    catalogue = Catalogue(disk, tmp_path, node_id=1, defaults=TopicSettings())
    given: list[int] = []
    disk.is_slow = True
    reserving = Thread(target=catalogue.reserve_append_time, args=(NOW_MS,))
    giving = Thread(target=lambda: given.extend(catalogue.next_producer_id() for _ in range(PRODUCER_ID_BLOCK + 1)))
    reserving.start()
    assert disk.has_begun.wait(10)
    giving.start()
    giving.join(0.2)  # It has to wait, or else it has given ids by now.
    disk.may_end.set()
    for thread in (reserving, giving):
        thread.join(10)
    given += [catalogue.next_producer_id() for _ in range(2 * PRODUCER_ID_BLOCK)]
    again = Catalogue(disk, tmp_path, node_id=1, defaults=TopicSettings())
    given += [again.next_producer_id() for _ in range(PRODUCER_ID_BLOCK)]
    assert len(set(given)) == len(given)
    assert again.append_time_floor_ms == NOW_MS
