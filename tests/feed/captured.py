"""A capture by hand: rows and commit points as a real one writes them, and all that a crash can leave between them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaError, Message, Producer, TopicCollection
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient, NewTopic

from walstream.capture.commit_points import CommitRecord, OpenRecord, Origin, Point, TableSnapshot, encode
from walstream.capture.ledger import Ledger, Written
from walstream.capture.resuming import FIRST_EPOCH
from walstream.capture.topics import COMMITS, COMPACTED, DATA
from walstream.node.process import NodeProcess
from walstream.positions import ZERO, Lsn, TopicPartition

ORIGIN = Origin("here", "1", 1, "walstream")


class Row(NamedTuple):
    """A change: where it goes, whose it is, what it says."""

    table: str
    partition: int = 0
    tenant: str = ""
    text: str = ""


class Begun(NamedTuple):
    """A snapshot whose rows are all written."""

    snapshot: TableSnapshot
    start: dict[TopicPartition, int]
    written: Written
    texts: list[str]


class Capture:
    """Writes with one prefix. Everything is durable when a method returns."""

    def __init__(self, node: NodeProcess, prefix: str, tables: Mapping[str, int]) -> None:
        """Make the topics: of each table with so many partitions, and that of commit points."""
        self.prefix = prefix
        self._admin = AdminClient({"bootstrap.servers": node.address})
        self._producer = Producer({"bootstrap.servers": node.address, "linger.ms": 1, "log_level": 0})
        self._ids: dict[str, str] = {}
        for name, settings in (("commits", COMMITS), ("schema", COMPACTED), ("status", COMPACTED)):
            self._create(f"{prefix}.{name}", 1, settings)
        self._lsn = 100
        self._xid = 700
        self._numbers = 0
        self._written = Written(ZERO)
        self.ledger = Ledger(-1, ORIGIN, _begin())
        self.told: list[list[str]] = []
        """The texts of every transaction in the order of commits, of every snapshot where it was finished."""
        self._group: list[list[str]] = []
        for table, partitions in tables.items():
            self.create(table, partitions)
        self.open()

    def topic(self, table: str) -> str:
        return f"{self.prefix}.{table}"

    def open(self) -> Ledger:
        """Begin a generation; return the books of the one before, which is a zombie's now."""
        before = self.ledger
        gen = self._commit(OpenRecord(before.source_epoch, ORIGIN, 0))
        base = _begin() if before.gen < 0 else _resumed(before)
        self.ledger = Ledger(gen, ORIGIN, base)
        self.ledger.topic_ids |= self._ids
        self._written, self._group = Written(before.end_lsn), []
        self.point()
        return before

    def transaction(self, rows: Sequence[Row], *, lost: int = 0) -> int:
        """Write a transaction; its last rows so that they are not its own any more. Return its commit LSN."""
        self._lsn += 10
        self._xid += 1
        texts = [self._text(row) for row in rows]
        self._write(rows, texts, self._lsn, lost=lost)
        self._written.end_lsn = Lsn(self._lsn + 5)
        self._group.append(texts)
        return self._lsn

    def orphan(self, rows: Sequence[Row]) -> None:
        """Write rows of a generation that is over, at a commit LSN that will come again."""
        self._produce(rows, ["orphan"] * len(rows), self._lsn + 10, self.ledger.gen - 1, None, None)

    def foreign(self, table: str) -> None:
        """Write something that no capture has written."""
        self._producer.produce(self.topic(table), b"anything", partition=0)
        assert self._producer.flush(30) == 0

    def point(self) -> int:
        """Write the commit point of the transactions since the last one; return its offset."""
        written, self._written = self._written, Written(self._written.end_lsn)
        written.last_xid = self._xid if written.rows else 0
        self.told += self._group
        self._group = []
        return self._landed(self.ledger.point(written))

    def void_point(self, zombie: Ledger) -> None:
        """Write a point of a generation that is over."""
        self._commit(zombie.point(Written(Lsn(zombie.end_lsn + 1_000))))

    def snapshot(self, table: str, rows: Sequence[Row], name: str) -> None:
        """Write the rows of a table, and that they are all there."""
        self.finish(self.snapshot_rows(table, rows, name))

    def snapshot_rows(self, table: str, rows: Sequence[Row], name: str) -> Begun:
        """Write the rows of a table."""
        snapshot = TableSnapshot("public", table, name, str(Lsn(self._lsn)))
        self._landed(self.ledger.begin_snapshot(snapshot))
        texts, written = [self._text(row) for row in rows], Written(ZERO)
        start = self._produce(rows, texts, self._lsn, self.ledger.gen, written, name)
        return Begun(snapshot, start, written, texts)

    def finish(self, begun: Begun) -> None:
        """Say that the rows of a table are all there."""
        self.told.append(begun.texts)
        self._landed(self.ledger.finish_snapshot(begun.snapshot, begun.start, begun.written))

    def remove(self, topic: str, before: int, partition: int = 0) -> None:
        """Remove records as retention does."""
        for future in self._admin.delete_records([KafkaPartition(topic, partition, before)]).values():
            future.result(30)

    def replace(self, table: str) -> None:
        """Delete a topic and make it again."""
        self.delete(table)
        self.create(table)

    def delete(self, table: str) -> None:
        """Delete a topic."""
        for future in self._admin.delete_topics([self.topic(table)]).values():
            future.result(30)

    def _text(self, row: Row) -> str:
        self._numbers += 1
        return f"{self._numbers} {row.text}"

    def _write(self, rows: Sequence[Row], texts: list[str], lsn: int, *, lost: int) -> None:
        kept = len(rows) - lost
        self._produce(rows[:kept], texts[:kept], lsn, self.ledger.gen, self._written, None)
        if lost:
            self._produce(rows[kept:], texts[kept:], lsn, self.ledger.gen - 1, self._written, None)

    def _produce(
        self,
        rows: Sequence[Row],
        texts: list[str],
        lsn: int,
        gen: int,
        written: Written | None,
        snapshot: str | None,
    ) -> dict[TopicPartition, int]:
        """Write rows; return the first offset of each partition."""
        failures: list[str] = []
        firsts: dict[TopicPartition, int] = {}

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failures.append(str(error))
                return
            partition = TopicPartition(str(message.topic()), int(message.partition() or 0))
            offset = int(message.offset() or 0)
            firsts.setdefault(partition, offset)
            if written is not None:
                written.last[partition] = offset
                written.rows[partition] = written.rows.get(partition, 0) + 1

        for seq, (row, text) in enumerate(zip(rows, texts, strict=True), 0 if snapshot else 1):
            number = 0 if snapshot else seq
            source = {"commit_lsn": lsn, "seq": number, "gen": gen, "snapshot": snapshot or False}
            value = json.dumps({"before": None, "after": {"text": text}, "source": source, "op": "c"})
            headers = [("tenant", row.tenant.encode())] if row.tenant else []
            headers += [("op", b"r" if snapshot else b"c"), ("commit_lsn", b"%d" % lsn), ("commit_time_ms", b"1700")]
            headers += [] if snapshot else [("txid", b"%d" % self._xid)]
            headers.append(("seq", b"%d" % number))
            while True:
                try:
                    self._producer.produce(
                        self.topic(row.table),
                        value.encode(),
                        text.encode(),
                        partition=row.partition,
                        headers=headers,
                        on_delivery=delivered,
                    )
                    break
                except BufferError:
                    self._producer.poll(0.1)
        assert self._producer.flush(60) == 0
        assert not failures
        return firsts

    def _landed(self, record: CommitRecord) -> int:
        offset = self._commit(record)
        self.ledger.landed(offset, lambda _: None)
        return offset

    def _commit(self, record: CommitRecord) -> int:
        offsets: list[int] = []
        self._producer.produce(
            f"{self.prefix}.commits",
            encode(record),
            partition=0,
            on_delivery=lambda error, message: offsets.append(-1 if error else int(message.offset() or 0)),
        )
        assert self._producer.flush(30) == 0
        assert offsets[0] >= 0
        return offsets[0]

    def create(self, table: str, partitions: int = 1) -> None:
        """Make the topic of a table, and note its id as a capture does."""
        topic = self.topic(table)
        self._create(topic, partitions, DATA)
        described = self._admin.describe_topics(TopicCollection([topic]))[topic].result(30)
        self._ids[topic] = self.ledger.topic_ids[topic] = str(described.topic_id)

    def _create(self, topic: str, partitions: int, settings: Mapping[str, str]) -> None:
        self._admin.create_topics([NewTopic(topic, partitions, config=dict(settings))])[topic].result(30)


def _begin() -> Point:
    return Point(-1, -1, FIRST_EPOCH, Lsn(100), 0, 0, 0, 0, next={}, topic_ids={})


def _resumed(ledger: Ledger) -> Point:
    return Point(
        0,
        ledger.gen,
        ledger.source_epoch,
        ledger.end_lsn,
        0,
        0,
        ledger.rows_total,
        0,
        next=dict(ledger.next),
        topic_ids={},
        snapshots=dict(ledger.snapshots),
    )
