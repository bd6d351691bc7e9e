"""Reading the log by the rule: valid points from `<prefix>.commits`, and exactly the rows that belong to them.

Owns the reading side for everybody: tests, pipeline, feed, backups. Needs nothing but a Kafka bootstrap. Refuses to
know what rows mean. Invariants: a row is yielded once, iff it belongs to a point of the range; after the last row of a
partition their number is compared with what the points say, and a difference is an error, never a shorter answer.

    with LogReader("127.0.0.1:9092", "walstream") as log:
        for point in log.points():                       # valid points, in order; point.spans says where its rows lie
            for row in log.rows([point]): …
        first, last = log.last_point(), …
        for row in log.rows_between(first, last): …      # (first, last]

Rows come partition by partition, in the order of their offsets: order by `(source_epoch, commit_lsn, seq)` to have
transactions whole. Rows that retention has removed, or that the log has lost, are a DataLoss that says which.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Final, NamedTuple, Self, cast

import msgspec
from confluent_kafka import Consumer, KafkaError, Message
from confluent_kafka import TopicPartition as KafkaPartition

from walstream.capture.chain import Chain
from walstream.capture.commit_points import CommitRecord, Point, RowFacts, Span, decode
from walstream.capture.kafka import OF_GROUPS, LogAddress
from walstream.capture.provenance import READ_OP
from walstream.capture.topics import Topics
from walstream.errors import CorruptCommits, DataLoss, UnreachableError
from walstream.positions import Lsn, TopicPartition

CHUNK: Final = 2_000
CHUNK_S: Final = 0.05
"""`consume` waits for as many as it is asked for, or for its timeout: so a short one."""
SILENCE_S_MAX: Final = 30.0
TAIL: Final = 2_500
"""Records at the end of the commits topic that a resuming capture reads first: more than two full vectors apart."""


class Row(NamedTuple):
    """A record that belongs to a point."""

    partition: TopicPartition
    offset: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]
    facts: RowFacts


class PartitionReader:
    """One consumer, assigned one partition at a time, read by offsets."""

    def __init__(self, address: LogAddress) -> None:
        self._address = address
        self._consumer: Consumer | None = None

    def read(self, partition: TopicPartition, start: int, stop: int) -> Iterator[Message]:
        """Yield the records of [start, stop) that are there. Raises UnreachableError."""
        if start >= stop:
            return
        if self._consumer is None:
            self._consumer = self._address.consumer({"fetch.wait.max.ms": 50})
        consumer = self._consumer
        with self._address.translated(str(partition)):
            consumer.assign([KafkaPartition(*partition, start)])
        deadline = time.monotonic() + SILENCE_S_MAX
        while True:
            with self._address.translated(str(partition)):
                told = consumer.consume(CHUNK, timeout=CHUNK_S)
            messages = [one for one in told if (error := one.error()) is None or error.code() not in OF_GROUPS]
            if not messages and time.monotonic() > deadline:
                raise UnreachableError(f"{partition} has answered nothing for {SILENCE_S_MAX:g} seconds.")
            for message in messages:
                error, offset = message.error(), message.offset()
                if error is not None:
                    if error.code() == KafkaError._PARTITION_EOF:
                        return
                    raise self._address.error(error, str(partition))
                assert offset is not None, "a record has an offset"
                if offset >= stop:
                    return
                yield message
                if offset + 1 == stop:
                    return
            if messages:
                # From here on: what the caller did with the rows is not the log's silence.
                deadline = time.monotonic() + SILENCE_S_MAX

    def close(self) -> None:
        """End the connection."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


class CommitsReader:
    """Reads records of the commits topic. A context manager."""

    def __init__(self, address: LogAddress, topic: str) -> None:
        """Take the topic's name."""
        self._partition = TopicPartition(topic, 0)
        self._reader = PartitionReader(address)

    def read(self, start: int, stop: int) -> Iterator[tuple[int, CommitRecord]]:
        """Yield the records of [start, stop) with their offsets. Raises CorruptCommits."""
        for message in self._reader.read(self._partition, start, stop):
            offset = message.offset()
            assert offset is not None
            yield offset, decode(message.value(), offset)

    def last_valid(self, start: int, stop: int) -> Chain:
        """Return the chain up to `stop`, having read as little of the end of [start, stop) as tells its last point."""
        window = TAIL
        while True:
            first = max(start, stop - window)
            chain = Chain(first)
            for offset, record in self.read(first, stop):
                chain.feed(offset, record)
            if first == start or chain.last is not None:
                return chain
            window *= 8

    def close(self) -> None:
        """End the connection."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LogReader:
    """Reads one capture's log by the rule. A context manager; used by one thread."""

    def __init__(self, address: LogAddress | str, prefix: str) -> None:
        """Take where the log is and the prefix of the capture."""
        self._address = LogAddress(address) if isinstance(address, str) else address
        self._topics = Topics(self._address, prefix)
        self._commits = CommitsReader(self._address, self._topics.names.commits)
        self._reader = PartitionReader(self._address)

    def points(self, after: Point | None = None, *, follow: bool = False) -> Iterator[Point]:
        """Yield the valid points, from the beginning or after one; with `follow`, wait for more for ever."""
        partition = TopicPartition(self._topics.names.commits, 0)
        start = self._topics.starts([partition])[partition]
        chain = Chain(start) if after is None else Chain.after(after)
        position = start if after is None else after.offset + 1
        if position < start:
            raise DataLoss(
                f"Commit points after offset {position:,} were removed; the oldest that is left is at {start:,}.",
                "Begin again from a snapshot or a backup.",
            )
        while True:
            end = self._topics.ends([partition])[partition]
            for offset, record in self._commits.read(position, end):
                point = chain.feed(offset, record)
                if point is not None:
                    yield point
            if not follow:
                return
            if position >= end:
                time.sleep(CHUNK_S)
            position = max(position, end)

    def last_point(self) -> Point | None:
        """Return the last valid point, reading no more than the end of the topic; None in a new log."""
        partition = TopicPartition(self._topics.names.commits, 0)
        start, end = self._topics.starts([partition])[partition], self._topics.ends([partition])[partition]
        return self._commits.last_valid(start, end).last

    def rows_between(self, first: Point | None, last: Point) -> Iterator[Row]:
        """Yield the rows of (first, last]; None for `first` means from the beginning."""
        between = []
        for point in self.points(first):
            between.append(point)
            if point.offset >= last.offset:
                break
        if not between or between[-1].offset != last.offset:
            raise CorruptCommits(f"There is no valid point at offset {last.offset:,} of the commits topic.")
        yield from self.rows(between)

    def rows(self, points: Iterable[Point]) -> Iterator[Row]:
        """Yield the rows of these points, partition by partition, each partition read once. Raises DataLoss."""
        spans: dict[TopicPartition, list[Span]] = {}
        for point in points:
            for span in point.spans:
                spans.setdefault(span.partition, []).append(span)
        starts, ends = self._topics.starts(spans), self._topics.ends(spans)
        for partition, wanted in spans.items():
            self._check_bounds(wanted, starts[partition], ends[partition])
        for partition, wanted in spans.items():
            yield from self._partition_rows(partition, wanted, starts[partition])

    def close(self) -> None:
        """End the connections."""
        self._commits.close()
        self._reader.close()

    @staticmethod
    def _check_bounds(spans: list[Span], log_start: int, log_end: int) -> None:
        """Refuse to begin where rows are due that cannot be there."""
        for span in spans:
            if span.rows and span.stop <= log_start:
                raise DataLoss(
                    f"{span.partition} begins at offset {log_start:,}; {span.rows:,} rows up to {span.stop:,} are due.",
                    "Retention has removed them: begin from a later point, a snapshot or a backup.",
                )
            if span.stop > log_end:
                raise DataLoss(f"{span.partition} ends at offset {log_end:,}; a commit point says {span.stop:,}.")

    def _partition_rows(self, partition: TopicPartition, spans: list[Span], log_start: int) -> Iterator[Row]:
        counts = Counts(spans)
        start = max(log_start, min(span.start for span in spans))
        for message in self._reader.read(partition, start, max(span.stop for span in spans)):
            row = row_of(partition, message)
            if row is not None and counts.admit(row.offset, row.facts):
                yield row
        counts.check(log_start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Counts:
    """The spans of one partition, and how many rows of each have been seen. Sans-IO."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._counted = dict.fromkeys(spans, 0)
        # Those of the stream follow one another, so one is enough to look at; those of snapshots lie across them.
        self._stream = sorted((span for span in self._counted if span.snapshot is None), key=lambda span: span.start)
        self._snapshots = {(span.snapshot, span.gen): span for span in self._counted if span.snapshot is not None}
        self._at = 0

    def admit(self, offset: int, facts: RowFacts) -> bool:
        """Whether the record belongs to one of the points; offsets must not go back."""
        span: Span | None
        if facts.snapshot is not None:
            span = self._snapshots.get((facts.snapshot, facts.gen))
        else:
            while self._at < len(self._stream) and self._stream[self._at].stop <= offset:
                self._at += 1
            span = self._stream[self._at] if self._at < len(self._stream) else None
        if span is None or not span.admits(offset, facts):
            return False
        self._counted[span] += 1
        return True

    def check(self, log_start: int = 0) -> None:
        """Compare with what the points say. Raises RowsMissing, or DataLoss where the beginning was removed."""
        for span, counted in self._counted.items():
            if counted < span.rows and span.start < log_start:
                raise DataLoss(
                    f"{span.partition} begins at offset {log_start:,}, so that {span.rows - counted:,} of the "
                    f"{span.rows:,} rows from {span.start:,} on are gone.",
                    "Retention has removed them: begin from a later point, a snapshot or a backup.",
                )
            span.check(counted)


class _Source(msgspec.Struct):
    gen: int
    commit_lsn: int
    snapshot: bool | str = False


class _Envelope(msgspec.Struct):
    source: _Source


_READ: Final = READ_OP.encode()
_envelope = msgspec.json.Decoder(_Envelope)


def row_of(partition: TopicPartition, message: Message) -> Row | None:
    """Return a record with the facts that the rule asks for; None for one that capture did not write."""
    headers = first_of_each(_headers(message))
    key, value, offset = message.key(), message.value(), message.offset()
    facts = facts_of(headers, value)
    if facts is None or offset is None:
        return None
    return Row(partition, offset, key, value, headers, facts)


def first_of_each(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, bytes]:
    """Return headers by name, of those with the same name the first.

    Capture writes its own before those of a message, which earlier versions let a message repeat.
    """
    found: dict[str, bytes] = {}
    for name, value in headers:
        if value is not None:
            found.setdefault(name, value)
    return found


def facts_of(headers: Mapping[str, bytes], value: bytes | None) -> RowFacts | None:
    """Return what a record says of its generation, commit and snapshot: in its headers, or else in its value."""
    try:
        if "gen" not in headers:
            source = _envelope.decode(value or b"").source
            snapshot = source.snapshot if isinstance(source.snapshot, str) else None
            return RowFacts(source.gen, Lsn(source.commit_lsn), snapshot)
        # Earlier versions let the message of any row bring this header. The feed's entries do not have `op`.
        named = headers.get("snapshot") if headers.get("op", _READ) == _READ else None
        return RowFacts(int(headers["gen"]), Lsn(int(headers["commit_lsn"])), named.decode() if named else None)
    except (KeyError, ValueError):
        return None


def _headers(message: Message) -> list[tuple[str, bytes | None]]:
    return cast("list[tuple[str, bytes | None]]", message.headers() or [])
