"""Which records of a topic become rows of its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from confluent_kafka import Message

from spark.envelopes import arrow, column, envelope, version
from walstream.capture.commit_points import Span
from walstream.errors import RowsMissing
from walstream.positions import Lsn, TopicPartition
from walstream.spark.admitting import RangeDecoder
from walstream.spark.decoding import Decoder
from walstream.spark.planning import Range
from walstream.spark.rule import Spans

PARTITION = TopicPartition("w.public.orders", 0)
WANTED = version(column("id", "int4"), column("item", "text"))


class Record:
    """A record as a consumer returns it."""

    def __init__(self, offset: int, value: bytes, headers: Sequence[tuple[str, bytes]] = ()) -> None:
        self._offset, self._value, self._headers = offset, value, list(headers)

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return self._value

    def headers(self) -> list[tuple[str, bytes]]:
        return self._headers


def read(*records: Record) -> list[Any]:
    """Read a range that is due to hold all of these records."""
    span = Span(PARTITION, 0, 100, len(records), 0, Lsn(100), Lsn(200))
    decoder = RangeDecoder(Decoder(arrow(WANTED), WANTED, [WANTED]), Range(Spans.of([span]), 0, 100, 0))
    batches = list(decoder.decode(cast("list[Message]", records)))
    decoder.check()
    return [number for batch in batches for number in batch.column("id").to_pylist()]


def of_another_table(after: dict[str, Any], number: int = 1) -> bytes:
    return envelope(after, number=number).replace(b'"table":"orders"', b'"table":"others"')


def test_rows_of_another_table_are_counted_and_left_out() -> None:
    ours, theirs = envelope({"id": 1, "item": "a"}), of_another_table({"id": 2, "item": "b"})
    assert read(Record(0, ours), Record(1, theirs)) == [1]
    other_schema = theirs.replace(b'"schema":"public"', b'"schema":"private"').replace(b"others", b"orders")
    assert read(Record(0, other_schema), Record(1, ours)) == [1]


@pytest.mark.parametrize("theirs", [{"id": "no number"}, {"something": "else"}])
def test_rows_of_another_table_may_have_other_columns(theirs: dict[str, Any]) -> None:
    assert read(Record(0, envelope({"id": 1, "item": "a"})), Record(1, of_another_table(theirs, number=9))) == [1]


def test_a_message_among_rows_is_counted_and_left_out() -> None:
    """Also one that repeats headers of capture, which earlier versions let it do."""
    own = [("op", b"c"), ("commit_lsn", b"100"), ("txid", b"7"), ("seq", b"1"), ("gen", b"0")]
    repeated = [*own, ("gen", b"x"), ("commit_lsn", b"1"), ("snapshot", b"s")]
    ours = envelope({"id": 1, "item": "a"})
    assert read(Record(0, ours), Record(1, b"hello", own), Record(2, b"hello", repeated)) == [1]
    assert read(Record(0, ours), Record(1, b'{"total": 5}', own)) == [1]


def test_a_row_that_is_missing_is_missed() -> None:
    stranger = of_another_table({"id": 2, "item": "b"}).replace(b'"gen":0', b'"gen":5')
    with pytest.raises(RowsMissing):
        read(Record(0, envelope({"id": 1, "item": "a"})), Record(1, stranger))
