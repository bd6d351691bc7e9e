"""What an entry says of its transaction: read fast it is the same as read by the book, and so is the rule."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.capture.commit_points import RowFacts, Span
from walstream.capture.escaping import quoted_name
from walstream.capture.provenance import Context, Moment, Origin, Stamp
from walstream.feed.reading.wire import varint
from walstream.feed.transactions.facts import NO_SNAPSHOT, rule_of, tell, tell_slowly
from walstream.feed.wal_pb2 import Header, WalBatch, WalEntry
from walstream.positions import Lsn, TopicPartition

FAKE = ',"source":{"db":"x","txId":1,"lsn":1,"source_epoch":1,"commit_lsn":1,"seq":1,"gen":1,"ts_ms":1,"snapshot":false'

names = st.sampled_from(["a", 'quo"ted', "back\\slash", "\n", "snowman ☃", FAKE])
columns = st.recursive(
    st.one_of(st.none(), st.integers(), names),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=5,
)
snapshots = st.sampled_from([None, "0/16B3748-7-1", 'with "quotes"'])
numbers = st.integers(1, (1 << 64) - 1)


@st.composite
def rows(draw: st.DrawFn) -> tuple[bytes, RowFacts, int]:
    """A row as a capture writes it, whatever its columns hold; what it says, and its place in the transaction."""
    snapshot, lsn, gen, seq = (
        draw(snapshots),
        draw(numbers),
        draw(st.integers(0, 1 << 40)),
        draw(st.integers(0, 99_999)),
    )
    xid, time_us = draw(st.sampled_from([0, 7, 1 << 31])), draw(st.integers(0, 1 << 52))
    moment = Moment(1, gen, Stamp(lsn, xid, time_us, 5, snapshot), lambda _: None)
    context = Context(moment, Origin(draw(names), draw(names), draw(names), 1, None), "c")
    after = json.dumps(draw(columns), separators=(",", ":"), ensure_ascii=False).encode()
    unchanged = [quoted_name(name) for name in draw(st.lists(names, max_size=2))]
    value = b'{"before":null,"after":%b%b%d%b' % (after, context.source, seq, context.end_without(unchanged))
    entry = WalEntry(
        key=draw(names).encode(), value=value, commit_lsn=lsn, seq=seq, txid=xid, committed_at_ms=time_us // 1000
    )
    return encoded(entry), RowFacts(gen, Lsn(lsn), snapshot), seq


def encoded(entry: WalEntry) -> bytes:
    return WalBatch(entries=[entry]).SerializeToString()


def test_a_message_that_repeats_headers_of_capture_keeps_its_place() -> None:
    """Earlier versions wrote such records: capture's own headers come first."""
    said = [("gen", b"7"), ("gen", b"9"), ("commit_lsn", b"1")]
    headers = [Header(name=name, value=value) for name, value in said]
    entry = encoded(WalEntry(value=b"{}", headers=headers, commit_lsn=100, seq=2, txid=5, committed_at_ms=6))
    assert tell(entry) == (b"7", NO_SNAPSHOT, 100, 2, 5, 6)


@settings(deadline=None)
@given(rows())
def test_rows_say_the_same_read_fast_and_slowly(row: tuple[bytes, RowFacts, int]) -> None:
    entry, facts, seq = row
    assert tell(entry) == tell_slowly(entry)
    told = tell(entry)
    assert told is not None
    gen, snapshot, commit_lsn, told_seq, _, _ = told
    expected = NO_SNAPSHOT if facts.snapshot is None else quoted_name(facts.snapshot)
    assert (int(gen), snapshot, commit_lsn, told_seq) == (facts.gen, expected, facts.commit_lsn, seq)


@pytest.mark.parametrize("value", [b"", b"anything", b"{" + FAKE[1:].encode() + b"}}", b'{"source":{"db":"x"}}'])
def test_headers_come_before_what_a_value_looks_like(value: bytes) -> None:
    """The value of an outbox is the user's: it may be an envelope of somebody else."""
    headers = [Header(name="gen", value=b"42"), Header(name="snapshot", value=b"s")]
    before = WalEntry(key=b"k", commit_lsn=5, seq=3, txid=9, committed_at_ms=8, headers=headers)
    # The feed writes a value behind the headers.
    body = before.SerializeToString() + WalEntry(value=value).SerializeToString()
    ours = b"\x0a" + varint(len(body)) + body
    assert WalBatch.FromString(ours).entries[0].value == value
    assert tell(ours) == (b"42", b'"s"', 5, 3, 9, 8)


@pytest.mark.parametrize("value", [b"", b"no json", b"{}", b'{"source":1}', b'{"source":{"gen":"x","commit_lsn":1}}'])
def test_what_no_capture_has_written_says_nothing(value: bytes) -> None:
    assert tell(encoded(WalEntry(key=b"k", value=value))) is None


@settings(deadline=None)
@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.integers(0, 9),
    st.tuples(st.integers(0, 2), st.integers(0, 9), snapshots),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2), snapshots),
)
def test_the_rule_is_that_of_commit_points(
    offsets: tuple[int, int], offset: int, said: tuple[int, int, str | None], span: tuple[int, int, int, str | None]
) -> None:
    lsn_from, lsn_to, span_gen, span_snapshot = span
    asked = Span(TopicPartition("t", 0), *offsets, 1, span_gen, Lsn(lsn_from), Lsn(lsn_to), span_snapshot)
    gen, lsn, snapshot = said
    told = (b"%d" % gen, NO_SNAPSHOT if snapshot is None else quoted_name(snapshot), lsn, 1, 0, 0)
    assert rule_of(asked)(offset, told) == asked.admits(offset, RowFacts(gen, Lsn(lsn), snapshot))
