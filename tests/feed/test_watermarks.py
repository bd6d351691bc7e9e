"""Watermarks: who counts, where each stands, what never goes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.errors import TooManySubscriptions, UsageError
from walstream.feed.service import watermarks as module
from walstream.feed.service.watermarks import Covered, Subscriber, Watermarks
from walstream.positions import GlobalLsn

MINUTE_MS = 60_000
ANN = Subscriber("replication", "acme", "ann")
BOB = Subscriber("replication", "acme", "bob")
EVE = Subscriber("replication", "evil", "ann")
ROOT = Subscriber("admin", "", "backup")


def ack(marks: Watermarks, subscriber: Subscriber, lsn: int, at_ms: int = 0) -> None:
    assert marks.fold(subscriber.key("ack"), Watermarks.record(lsn, at_ms)) == subscriber


def test_the_watermark_is_that_of_the_slowest() -> None:
    marks = Watermarks(MINUTE_MS)
    assert marks.watermark(0) is None
    ack(marks, ANN, 50)
    ack(marks, BOB, 40)
    ack(marks, ROOT, 30)
    ack(marks, EVE, 20)
    assert marks.watermark(1000) == 20
    assert marks.watermark(1000, "acme") == 40
    assert marks.watermark(1000, "evil") == 20
    assert marks.watermark(1000, "nobody") is None


def test_who_is_silent_for_too_long_does_not_count_unless_connected() -> None:
    marks = Watermarks(MINUTE_MS)
    ack(marks, ANN, 10, at_ms=0)
    ack(marks, BOB, 20, at_ms=MINUTE_MS)
    assert marks.watermark(MINUTE_MS - 1) == 10
    assert marks.watermark(MINUTE_MS) == 20
    marks.connect(ANN, 1, 11, MINUTE_MS)
    assert marks.watermark(100 * MINUTE_MS) == 10
    marks.disconnect(ANN, 1, 100 * MINUTE_MS)
    assert marks.watermark(101 * MINUTE_MS - 1) == 10
    assert marks.watermark(101 * MINUTE_MS) is None
    assert marks.acked(ANN) == 10, "it is remembered all the same"


def test_one_that_never_acknowledged_stands_where_it_was_sent_to() -> None:
    marks = Watermarks(MINUTE_MS)
    marks.connect(ANN, 1, 100, 0)
    assert marks.watermark(0) == 99
    marks.advance(ANN, 1, 150)
    marks.connect(ANN, 2, 120, 0)
    assert marks.watermark(0) == 119
    marks.disconnect(ANN, 2, 0)
    assert marks.watermark(0) == 150
    marks.disconnect(ANN, 1, 0)
    assert marks.watermark(0) == 150
    ack(marks, ANN, 130)
    assert marks.watermark(0) == 130


def test_a_subscriber_that_begins_at_the_beginning_holds_everything() -> None:
    marks = Watermarks(MINUTE_MS)
    marks.connect(ANN, 1, 0, 0)
    assert marks.watermark(0) == 0


@given(st.lists(st.integers(1, 1000), min_size=1))
def test_an_acknowledgement_never_goes_back(lsns: list[int]) -> None:
    marks = Watermarks(MINUTE_MS)
    largest = 0
    for lsn in lsns:
        ack(marks, ANN, lsn)
        largest = max(largest, lsn)
        assert marks.acked(ANN) == largest
        assert marks.is_stale(ANN) == (lsn < largest)


def test_what_may_be_acknowledged_is_what_was_sent() -> None:
    marks = Watermarks(MINUTE_MS)
    assert marks.ceiling(ANN) is None
    ack(marks, ANN, 5)
    assert marks.ceiling(ANN) is None, "not connected here: others may know better"
    marks.connect(ANN, 1, 20, 0)
    assert marks.ceiling(ANN) == 19
    marks.advance(ANN, 1, 30)
    marks.disconnect(ANN, 1, 0)
    marks.connect(ANN, 2, 6, 0)
    assert marks.ceiling(ANN) == 30, "what an earlier stream was sent counts, too"


def test_what_other_feeds_tell_counts() -> None:
    marks = Watermarks(MINUTE_MS)
    marks.fold(ANN.key("seen"), Watermarks.record(70, 0))
    assert marks.watermark(0) == 70
    marks.fold(ANN.key("seen"), Watermarks.record(60, 1000))
    assert marks.watermark(0) == 60, "it began again further back"
    marks.fold(ANN.key("seen"), Watermarks.record(60, 2000, is_active=False))
    assert marks.watermark(2000) is None
    ack(marks, ANN, 65, at_ms=3000)
    assert marks.watermark(3000) == 65, "it is back"


class TestWhatMustBeKept:
    """For one that has acknowledged all that it was sent, nothing up to where it was sent everything."""

    def test_a_quiet_tenant_moves_on(self) -> None:
        marks = Watermarks(MINUTE_MS)
        marks.connect(ANN, 1, 1, 0)
        marks.advance(ANN, 1, 10, 10)
        assert marks.done(ANN) == 10, "it never acknowledged, so it stands where it was sent to"
        ack(marks, ANN, 10)
        marks.advance(ANN, 1, 5000)
        assert (marks.done(ANN), marks.watermark(0)) == (5000, 10)
        assert marks.needed_from(0) == 5000

    def test_an_entry_that_is_not_acknowledged_is_kept(self) -> None:
        marks = Watermarks(MINUTE_MS)
        marks.connect(ANN, 1, 1, 0)
        ack(marks, ANN, 10)
        marks.advance(ANN, 1, 5000, 10)
        assert marks.done(ANN) == 5000
        marks.advance(ANN, 1, 9000, 7000)
        assert marks.done(ANN) == 5000, "what was known to be clean stays so"
        ack(marks, ANN, 7000)
        assert marks.done(ANN) == 9000

    def test_it_is_known_when_the_stream_and_the_feed_are_gone(self) -> None:
        marks = Watermarks(MINUTE_MS)
        marks.connect(ANN, 1, 1, 0)
        ack(marks, ANN, 10)
        marks.advance(ANN, 1, 5000, 10)
        marks.disconnect(ANN, 1, 0)
        assert marks.done(ANN) == 5000
        other = Watermarks(MINUTE_MS)
        ack(other, ANN, 10)
        other.fold(ANN.key("seen"), Watermarks.record(5000, 0, clean=marks.done(ANN)))
        assert other.done(ANN) == 5000
        other.connect(ANN, 1, 5001, 0)
        other.advance(ANN, 1, 6000)
        assert other.done(ANN) == 6000

    def test_what_it_may_have_been_sent_elsewhere_is_kept(self) -> None:
        """It comes with a position of its own, beyond its last acknowledgement: what is between, nobody here knows."""
        marks = Watermarks(MINUTE_MS)
        ack(marks, ANN, 10)
        marks.connect(ANN, 1, 501, 0)
        marks.advance(ANN, 1, 9000)
        assert marks.done(ANN) == 10
        ack(marks, ANN, 500)
        assert marks.done(ANN) == 9000

    def test_a_quiet_one_says_itself_that_nothing_was_sent(self) -> None:
        """After a crash of the feed, by an acknowledgement of what its heartbeats tell."""
        marks = Watermarks(MINUTE_MS)
        ack(marks, ANN, 10)
        marks.fold(ANN.key("seen"), Watermarks.record(4900, 0, clean=4900))
        marks.connect(ANN, 1, 5000, 0)
        marks.advance(ANN, 1, 9000)
        assert marks.done(ANN) == 4900
        assert marks.ceiling(ANN) == 9000
        ack(marks, ANN, 9000)
        marks.advance(ANN, 1, 50_000)
        assert marks.done(ANN) == 50_000

    def test_what_is_known_of_one_choice_of_entries_is_not_known_of_another(self) -> None:
        marks = Watermarks(MINUTE_MS)
        marks.connect(ANN, 1, 1, 0, "orders")
        ack(marks, ANN, 10)
        marks.advance(ANN, 1, 5000, 10)
        assert marks.covered(ANN) == Covered("orders", 1, 5000)
        marks.connect(ANN, 2, 3000, 0, "users")
        assert marks.covered(ANN) == Covered("users", 3000, 2999)
        marks.advance(ANN, 2, 6000)
        assert marks.covered(ANN) == Covered("users", 3000, 2999), "both are there, and each had other entries"
        marks.disconnect(ANN, 1, 0)
        ack(marks, ANN, 5000)
        assert marks.covered(ANN) == Covered("users", 3000, 6000)
        marks.disconnect(ANN, 2, 0)
        other = Watermarks(MINUTE_MS)
        record = Watermarks.record(6000, 0, clean=marks.done(ANN), covered=marks.covered(ANN))
        other.fold(ANN.key("seen"), record)
        assert other.covered(ANN) == Covered("users", 3000, 6000)
        other.connect(ANN, 1, 7000, 0, "users")
        other.fold(ANN.key("seen"), Watermarks.record(9000, 9, covered=Covered("orders", 1, 9000)))
        assert other.covered(ANN).choice == "users", "it is here, and who was told of it before is not believed"

    def test_a_stream_from_the_very_beginning_is_told_to_others(self) -> None:
        marks, other = Watermarks(MINUTE_MS), Watermarks(MINUTE_MS)
        marks.connect(ANN, 1, 0, 0, "orders")
        other.fold(ANN.key("seen"), Watermarks.record(0, 0, covered=marks.covered(ANN)))
        assert other.is_active(ANN, 0)

    def test_the_slowest_stream_counts(self) -> None:
        marks = Watermarks(MINUTE_MS)
        ack(marks, ANN, 10)
        marks.connect(ANN, 1, 11, 0)
        marks.connect(ANN, 2, 11, 0)
        marks.advance(ANN, 1, 900)
        assert marks.done(ANN) == 10
        marks.advance(ANN, 2, 800)
        assert marks.done(ANN) == 800


def test_a_lapsed_subscriber_counts_again_when_it_connects() -> None:
    marks = Watermarks(MINUTE_MS)
    ack(marks, ANN, 10)
    marks.lapse(ANN)
    assert not marks.is_active(ANN, 0)
    marks.connect(ANN, 1, 11, 0)
    assert marks.is_active(ANN, 0)


def test_a_tombstone_forgets() -> None:
    marks = Watermarks(MINUTE_MS)
    ack(marks, ANN, 10)
    marks.fold(ANN.key("seen"), None)
    assert marks.acked(ANN) == 10
    marks.fold(ANN.key("ack"), None)
    assert marks.acked(ANN) == 0
    assert len(marks) == 0


def test_a_tombstone_for_one_that_is_connected() -> None:
    """Another feed has forgotten it: it begins anew, and its streams go on."""
    marks = Watermarks(MINUTE_MS)
    ack(marks, ANN, 10)
    marks.connect(ANN, 1, 11, 0)
    marks.advance(ANN, 1, 50, 40)
    marks.fold(ANN.key("ack"), None)
    assert marks.acked(ANN) == 0
    assert not marks.is_stale(ANN)
    assert (marks.watermark(0), marks.done(ANN)) == (50, 50)
    marks.advance(ANN, 1, 60, 60)
    assert marks.ceiling(ANN) == 60
    ack(marks, ANN, 40)
    assert (marks.watermark(0), marks.done(ANN)) == (40, 40)
    marks.disconnect(ANN, 1, 0)
    marks.fold(ANN.key("ack"), None)
    assert len(marks) == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"", b""),
        (b"\xff", b"{}"),
        (b'["ack","a","b"]', b"{}"),
        (b'["ack","a","b","c"]', b"[]"),
        (b'["ack","a","b","c"]', b'{"lsn":"x","time_ms":1}'),
        (b'["ack","a","b","c"]', b'{"lsn":7,"time_ms":1}'),
        (b'["seen","a","b","c"]', b'{"lsn":"","time_ms":1,"clean_lsn":5}'),
        (b'["seen","a","b","c"]', b'{"lsn":"","time_ms":1,"covered":7}'),
        (b'["seen","a","b","c"]', b'{"lsn":"","time_ms":1,"covered":["x","y","z"]}'),
        (b'["other","a","b","c"]', Watermarks.record(5, 0)),
        (b'["ack",["x"],"",""]', Watermarks.record(5, 0)),
        (b'["ack",{},"",""]', None),
        (b'["ack",1,2,3]', Watermarks.record(5, 0)),
        (b'["ack","a","b","\\ud800"]', Watermarks.record(5, 0)),
        (b'["ack","a","b","c"]', b'{"lsn":"","time_ms":1e999}'),
        (b'["ack","a","b","c"]', b"[" * 100_000),
        (b"[" * 100_000, None),
        (b'{"ack":1}', None),
        (b"7", None),
    ],
)
def test_records_of_strangers_are_left_alone(key: bytes, value: bytes | None) -> None:
    marks = Watermarks(MINUTE_MS)
    assert marks.fold(key, value) is None
    assert len(marks) == 0


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", "a\x00"])
def test_a_name_that_cannot_be_used(name: str) -> None:
    with pytest.raises(UsageError, match="subscriber id"):
        Subscriber.of("replication", "acme", name)


def test_no_name_of_one_tenant_is_that_of_another() -> None:
    tricky = [
        ("replication", "acme", "ann"), ("replication", "acme/ann", ""), ("replication", "", "acme/ann"),
        ("replication", 'acme","ann', "x"), ("replication", "acme", 'ann","x'), ("admin", "", "acme/ann"),
    ]  # fmt: skip
    keys = [Subscriber(*one).key("ack") for one in tricky]
    assert len(set(keys)) == len(keys)


def test_the_names_of_one_tenant_find_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SUBSCRIBERS_MAX", 3)
    marks = Watermarks(MINUTE_MS)
    for number in range(3):
        new = Subscriber("replication", "acme", f"s{number}")
        assert marks.make_room(new, 0) is None
        ack(marks, new, 10, at_ms=number)
    assert marks.make_room(Subscriber("replication", "acme", "s0"), 0) is None, "it is known"
    assert marks.make_room(EVE, 0) is None, "another tenant has room of its own"
    with pytest.raises(TooManySubscriptions, match="3 subscribers"):
        marks.make_room(ANN, 1000)
    assert marks.make_room(ANN, MINUTE_MS + 1) == Subscriber("replication", "acme", "s0")


def test_a_record_says_what_it_means() -> None:
    assert Watermarks.record(GlobalLsn.of(1, 2, 3), 7) == (
        b'{"lsn":"0000000000000001.0000000002.0000000003","time_ms":7}'
    )
    assert ANN.key("ack") == b'["ack","replication","acme","ann"]'
