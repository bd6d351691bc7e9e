"""Received bytes: nothing lost, nothing overwritten, no memory for mere announcements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from walstream.replication.wire.inbox import CHUNK_BYTES, FIRST_CHUNK_BYTES, GROWTH, Inbox


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 6000))))
def test_bytes_come_out_as_they_went_in(steps: list[tuple[int, int]]) -> None:
    inbox, sent, views = Inbox(), bytearray(), []
    for size, wish in steps:
        data = bytes((len(sent) + index) % 251 for index in range(size))
        sent += data
        while data:
            room = inbox.buffer()
            assert len(room) > 0
            count = min(len(room), len(data))
            room[:count] = data[:count]
            inbox.received(count)
            data = data[count:]
        if wish <= len(inbox):
            views.append(inbox.take(wish))
        else:
            inbox.need(wish)
    views.append(inbox.take(len(inbox)))
    # Views that were handed out early are still what they were.
    assert b"".join(views) == sent


def test_an_announced_frame_holds_little_until_it_comes() -> None:
    inbox = Inbox()
    inbox.feed(b"x" * 100)
    inbox.need(64 << 20)
    assert inbox.held_bytes == FIRST_CHUNK_BYTES
    fed = 100
    while fed < 1 << 20:
        fed += inbox.feed(b"x" * 10_000)
        assert inbox.held_bytes <= max(CHUNK_BYTES, GROWTH * fed)


def test_a_frame_that_fits_is_not_moved() -> None:
    inbox = Inbox()
    for _ in range(10):  # Up to the usual size.
        inbox.feed(b"x" * CHUNK_BYTES)
        inbox.take(len(inbox))
    inbox.buffer()
    chunk = inbox.chunk
    inbox.feed(b"y" * 1000)
    inbox.need(2000)
    inbox.feed(b"y" * 1000)
    view = inbox.take(2000)
    assert view.obj is chunk
