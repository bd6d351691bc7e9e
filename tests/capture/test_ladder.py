"""The rungs of the ladder, put together from what was read one after the other."""

from __future__ import annotations

from walstream.capture.commit_points import PointRecord
from walstream.capture.ladder import look
from walstream.capture.source import Ladder
from walstream.positions import Lsn

NOW_MS = 1_700_000_010_000
DURABLE = PointRecord(5, 1, str(Lsn(700)), 9, 1_700_000_000_000_000, 40, 4000)


def rungs(sent: int, received: int) -> Ladder:
    return Ladder(Lsn(sent), Lsn(sent), Lsn(received), Lsn(0))


def test_each_rung_tells_what_lies_between() -> None:
    found = look("here", rungs(900, 800), Lsn(1000), DURABLE, NOW_MS)
    assert (found.server_end, found.sent, found.received, found.durable) == (1000, 900, 800, 700)
    assert (found.lag_bytes, found.lag_ms) == (300, 10_000)
    assert (found.gen, found.source_epoch, found.rows_total, found.bytes_total) == (5, 1, 40, 4000)


def test_a_rung_is_never_below_the_one_under_it() -> None:
    found = look("here", rungs(600, 500), Lsn(650), DURABLE, NOW_MS)
    assert found.server_end == found.sent == found.received == found.durable == 700


def test_nothing_is_late_when_all_that_came_is_durable() -> None:
    assert look("here", rungs(700, 700), Lsn(5000), DURABLE, NOW_MS).lag_ms == 0


def test_a_server_that_does_not_answer_is_as_far_as_it_was_heard() -> None:
    assert look("here", rungs(900, 800), None, DURABLE, NOW_MS).server_end == 900
