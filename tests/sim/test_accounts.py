"""What the checkers count as committed when somebody was elected who promises nothing."""

from __future__ import annotations

from walstream.sim.accounts import Copy, History
from walstream.sim.mirror import Item, Mirror


def items(first: int, end: int, epoch: int = 0) -> list[Item]:
    return [Item(base, base + 1, epoch, crc=base + 100 * epoch) for base in range(first, end)]


def holding(*batches: Item, start: int = 0) -> Copy:
    copy = Copy(Mirror(start))
    for item in batches:
        copy.mirror.add(item)
    copy.durable_end = copy.checked_end = copy.high_watermark = copy.mirror.end
    return copy


def history_of(*copies: Copy, committed: int) -> History:
    """Make a history in which the first copy's batches are committed up to an offset."""
    history = History("t", copies=dict(enumerate(copies, 1)), min_isr=2)
    for item in copies[0].mirror.between(0, committed):
        history.committed.add(item)
    return history


def elected(history: History, node: int, epoch: int, watermark: int, start: int = 0) -> None:
    history.unclean_epoch = epoch
    history.give_up(history.copies[node], start, watermark)


def test_what_the_leader_lacks_is_committed_no_more() -> None:
    history = history_of(holding(*items(0, 5)), holding(*items(0, 3)), committed=5)
    elected(history, 2, epoch=1, watermark=3)
    assert history.committed.items == items(0, 3)
    assert history.copies[1].checked_end == 3


def test_what_was_committed_once_is_back_with_who_held_it() -> None:
    history = history_of(holding(*items(0, 7)), holding(), committed=5)
    elected(history, 2, epoch=1, watermark=0)
    assert history.committed.end == 0
    elected(history, 1, epoch=2, watermark=5)
    assert history.committed.items == items(0, 5)
    assert history.copies[1].checked_end == 0, "what a copy exposes is compared with it again"


def test_no_more_is_back_than_the_leader_begins_with() -> None:
    history = history_of(holding(*items(0, 7)), holding(), committed=5)
    elected(history, 2, epoch=1, watermark=0)
    elected(history, 1, epoch=2, watermark=4)
    assert history.committed.items == items(0, 4)


def test_what_never_was_committed_is_not_by_being_exposed() -> None:
    history = history_of(holding(*items(0, 7)), holding(), committed=5)
    elected(history, 2, epoch=1, watermark=0)
    elected(history, 1, epoch=2, watermark=7)
    assert history.committed.items == items(0, 5), "the rest is judged like every batch that a leader commits"


def test_what_others_wrote_meanwhile_is_not_what_was_committed() -> None:
    history = history_of(holding(*items(0, 5)), holding(), holding(*items(0, 5, epoch=1)), committed=5)
    elected(history, 2, epoch=1, watermark=0)
    elected(history, 3, epoch=2, watermark=5)
    assert history.committed.end == 0


def test_producers_go_on_where_what_is_back_ends() -> None:
    batches = [Item(base, base + 1, 0, base, producer=7, sequence=base) for base in range(4)]
    history = history_of(holding(*batches), holding(), committed=3)
    elected(history, 2, epoch=1, watermark=0)
    assert history.sequences == {}
    elected(history, 1, epoch=2, watermark=3)
    assert history.sequences == {7: (3, 3)}
