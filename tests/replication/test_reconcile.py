from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from replication.memory_log import MemoryLog, Record
from walstream.replication.messages import ReplicaFlag, State
from walstream.replication.reconcile import Accepted, Diverges, StartsOver, breaks_promise, cut_at, judge

KEY = (UUID(int=1), 0)
Run = tuple[int, int]
"""An epoch and how many records it has."""


def log_of(runs: list[Run], own_epoch: int | None = None, start: int = 0) -> MemoryLog:
    log = MemoryLog()
    for epoch, count in runs:
        log.epoch, log.is_leader = epoch, True
        for _ in range(count):
            log.append(f"e{epoch}")
    log.is_leader = False
    log.flush()
    log.high_watermark = log.log_end
    log.trim(min(start, log.log_end))
    if own_epoch is not None:
        log.lead(own_epoch)
    return log


def state_of(log: MemoryLog) -> State:
    return State(
        KEY, 99, 1, log.log_start, log.durable_end, log.epochs.last_epoch, log.high_watermark, ReplicaFlag.NONE
    )


def exchange(leader: MemoryLog, follower: MemoryLog) -> int:
    """Go through the whole exchange; return where the follower is accepted."""
    for _ in range(50):
        match judge(leader, state_of(follower)):
            case Accepted(offset):
                return offset
            case StartsOver(start):
                follower.reset(start)
            case Diverges(epoch, offset):
                cut = cut_at(follower, epoch, offset)
                if cut < follower.log_start:
                    follower.reset(leader.log_start)
                else:
                    before = (follower.log_end, follower.epochs.last_epoch)
                    follower.truncate(cut)
                    assert (follower.log_end, follower.epochs.last_epoch) < before, "no progress"
    raise AssertionError("it does not end")


def common(one: MemoryLog, other: MemoryLog, start: int) -> int:
    """Return up to where two logs hold the same records from `start` on."""
    ours: dict[int, Record] = {record.offset: record for record in one.records}
    theirs: dict[int, Record] = {record.offset: record for record in other.records}
    while start in ours and ours[start] == theirs.get(start):
        start += 1
    return start


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Run], list[Run], int]:
    """Two logs that share their beginning. After that no epoch is in both: an epoch belongs to one life of one node.

    The last shared epoch may be longer in one of them: that node's leader sent the other only a part.
    """
    epochs = draw(st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=9).map(sorted))
    shared_count = draw(st.integers(0, len(epochs)))
    shared = [(epoch, draw(st.integers(1, 4))) for epoch in epochs[:shared_count]]
    ones, others = list(shared), list(shared)
    if shared:
        longer = draw(st.sampled_from((ones, others)))
        longer[-1] = (shared[-1][0], shared[-1][1] + draw(st.integers(0, 3)))
    for epoch in epochs[shared_count:]:
        draw(st.sampled_from((ones, others))).append((epoch, draw(st.integers(0, 4))))
    return ones, others, draw(st.integers(0, 12))


@given(histories())
def test_exchange_keeps_exactly_what_both_have(history: tuple[list[Run], list[Run], int]) -> None:
    ones, others, _ = history
    leader, follower = log_of(ones, own_epoch=50), log_of(others)
    both = common(leader, follower, 0)
    assert exchange(leader, follower) == both == follower.log_end


@given(histories())
def test_exchange_with_a_trimmed_leader_keeps_nothing_unproven(history: tuple[list[Run], list[Run], int]) -> None:
    ones, others, start = history
    leader, follower = log_of(ones, own_epoch=50, start=start), log_of(others)
    whole = common(log_of(ones), follower, 0)
    end = exchange(leader, follower)
    assert end == max(whole, leader.log_start)
    assert common(leader, follower, leader.log_start) == end
    if whole <= leader.log_start < follower.log_end:
        assert not follower.records


@given(histories())
def test_exchange_with_a_trimmed_follower_ends_in_a_common_log(history: tuple[list[Run], list[Run], int]) -> None:
    ones, others, start = history
    leader, follower = log_of(ones, own_epoch=50), log_of(others, start=start)
    end = exchange(leader, follower)
    assert end == follower.log_end <= leader.log_end
    assert common(leader, follower, follower.log_start) == end


def test_leader_without_writes_leaves_no_mark_on_its_successors() -> None:
    leader, follower = log_of([(1, 3), (4, 2)], own_epoch=6), log_of([(1, 3)])
    follower.lead(5)
    assert judge(leader, state_of(follower)) == Diverges(4, 5)
    assert exchange(leader, follower) == 3
    assert follower.epochs.last_epoch == 1


def test_follower_beyond_the_leaders_end_starts_over() -> None:
    leader, follower = log_of([(1, 2)], own_epoch=6), log_of([])
    follower.reset(40)
    assert judge(leader, state_of(follower)) == StartsOver(0)


def test_cutting_below_the_high_watermark_needs_an_unclean_election_since() -> None:
    assert breaks_promise(4, high_watermark=5, high_watermark_epoch=7, unclean_epoch=-1)
    assert breaks_promise(4, high_watermark=5, high_watermark_epoch=7, unclean_epoch=7)
    assert not breaks_promise(4, high_watermark=5, high_watermark_epoch=7, unclean_epoch=8)
    assert not breaks_promise(5, high_watermark=5, high_watermark_epoch=7, unclean_epoch=-1)
