"""The loop with a source that holds what a test puts into it, and a real node: groups, idle points, broken changes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from capture import sender
from capture.test_sink import Writer
from walstream.capture.envelope import Renderer
from walstream.capture.loop import Loop
from walstream.capture.reading import LogReader, Row
from walstream.capture.runner import _beating, _with_saved_bytes
from walstream.capture.source import Batch, Ladder, Transaction
from walstream.capture.streams import Streams
from walstream.errors import DecodeError, HistoryForked, QueryFailed
from walstream.node.process import NodeProcess
from walstream.positions import ZERO, Lsn
from walstream.postgres.relations import Relations
from walstream.postgres.types import Types

RELATION = sender.relation(7, "t", ["id", "note"])
BROKEN = sender.insert(7, "2", None)[:-1]

_prefixes = (f"loop{number}" for number in itertools.count())


class ListSource:
    """A source of batches that are given; then it is idle, at the LSN of the last one."""

    def __init__(self, *batches: Batch) -> None:
        self._batches = list(batches)
        self.is_over = False

    def receive_batch(self, limit: int, timeout_s: float) -> Batch:
        if self._batches:
            return self._batches.pop(0)
        self.is_over = True
        return Batch([], ZERO)

    def skip_before(self, lsn: Lsn) -> None: ...
    def send_feedback(self, lsn: Lsn) -> None: ...
    def close(self) -> None: ...

    def ladder(self) -> Ladder:
        return Ladder(ZERO, ZERO, ZERO, ZERO)


def transaction(lsn: int, *rows: bytes) -> Transaction:
    return Transaction(lsn, Lsn(lsn), Lsn(lsn + 5), 1_700_000_000_000_000, list(rows), len(rows))


def batch(*transactions: Transaction) -> Batch:
    return Batch(list(transactions), transactions[-1].end_lsn)


@pytest.fixture
def writer(node: NodeProcess) -> Iterator[Writer]:
    writer = Writer(node, next(_prefixes))
    yield writer
    writer.close()


def run(writer: Writer, source: ListSource, dead_letter: str = "") -> None:
    renderer = Renderer(
        database="db",
        source_epoch=1,
        generation=writer.ledger.gen,
        streams=Streams(writer.prefix),
        types=Types(),
        describe=Relations().update,
    )
    loop = Loop(source, writer.sink, renderer, writer.ledger, limit=1000, dead_letter=dead_letter)
    loop.run(lambda: source.is_over)


def read(node: NodeProcess, writer: Writer) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    with LogReader(node.address, writer.prefix) as log:
        for row in log.rows(list(log.points())):
            found.setdefault(row.partition.topic, []).append(row)
    return found


def test_a_batch_is_a_group_and_an_idle_source_an_empty_point(node: NodeProcess, writer: Writer) -> None:
    first = batch(
        transaction(200, RELATION, sender.insert(7, "1", "one")), transaction(210, sender.delete(7, "1", None))
    )
    run(writer, ListSource(first, Batch([], Lsn(300)), Batch([], Lsn(310))))
    assert writer.durable[-1] == 300, "empty points come once a second at most"
    assert 215 in writer.durable or writer.durable == [100, 300], "the groups may have shared a point"
    rows = read(node, writer)[f"{writer.prefix}.public.t"]
    assert [json.loads(row.value or b"")["op"] for row in rows] == ["c", "d"]


def test_a_transaction_that_comes_after_later_ones_stops_it(node: NodeProcess, writer: Writer) -> None:
    source = ListSource(batch(transaction(200, RELATION, sender.insert(7, "1", "one"))), batch(transaction(150)))
    with pytest.raises(HistoryForked, match="committed at 0/96, after it had sent everything before 0/CD"):
        run(writer, source)


def test_a_heartbeat_that_cannot_be_written_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    class Standby:
        def ask(self, question: object) -> None:
            raise QueryFailed("PostgreSQL said while writing a heartbeat: recovery is in progress.")

    _beating(Standby())()  # type: ignore[arg-type]
    assert "heartbeat not written" in "".join(capfd.readouterr())


def test_a_change_that_cannot_be_understood_stops_it_after_what_came_before(node: NodeProcess, writer: Writer) -> None:
    good = batch(transaction(200, RELATION, sender.insert(7, "1", "one")))
    bad = batch(transaction(210, sender.insert(7, "3", "three"), BROKEN))
    with pytest.raises(DecodeError) as failure:
        run(writer, ListSource(good, bad))
    assert failure.value.data == BROKEN
    writer.sink.drain()
    assert writer.durable[-1] == 205
    (row,) = read(node, writer)[f"{writer.prefix}.public.t"]
    assert row.key == b'{"id":"1"}'


def test_a_change_that_cannot_be_understood_goes_to_the_dead_letters(node: NodeProcess, writer: Writer) -> None:
    bad = batch(transaction(210, RELATION, sender.insert(7, "1", "one"), BROKEN, sender.insert(7, "3", "three")))
    run(writer, ListSource(bad), dead_letter=f"{writer.prefix}.dead_letter")
    found = read(node, writer)
    assert [row.key for row in found[f"{writer.prefix}.public.t"]] == [b'{"id":"1"}', b'{"id":"3"}']
    (dead,) = found[f"{writer.prefix}.dead_letter"]
    assert dead.value == BROKEN
    assert (dead.headers["seq"], dead.headers["txid"], dead.headers["commit_lsn"]) == (b"2", b"210", b"210")
    assert dead.headers["error"]


def test_the_bytes_are_saved_for_a_report(tmp_path: Path) -> None:
    told = _with_saved_bytes(DecodeError("A row cannot be read.", data=b"\x01\x02"), tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.read_bytes() == b"\x01\x02"
    assert str(file) in told.hint
    assert "could not be saved" in _with_saved_bytes(told, tmp_path / "not there").hint
