"""The queue of one subscriber: bounds, order, coalescing, credits, and when it is too slow."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from feed.frames import Written, frame_of
from walstream.errors import FeedError
from walstream.feed import wal_pb2
from walstream.feed.service.batching import Limits, Slice, batch_response, cut
from walstream.feed.service.send_queue import Batch, Bounds, Message, SendQueue
from walstream.positions import GlobalLsn

BOUNDS = Bounds(entries_max=100, bytes_max=1 << 20, coalesce_s=0.010, timeout_s=30.0)
LIMITS = Limits(10, keeps_lsns=True)


def slice_of(first: int, count: int = 1, size: int = 5) -> Slice:
    frame = frame_of([Written(first + number, bytes(size)) for number in range(count)])
    [part] = cut(frame, None, Limits(1000, keeps_lsns=True)).slices
    return part


def beat(number: int) -> Message:
    return Message(b"%d" % number, "heartbeat", number)


def lsns_of(batch: Batch) -> list[int]:
    message = wal_pb2.WalResponse.FromString(batch_response(batch.slices, 0)).batch
    return [int(GlobalLsn.parse(entry.lsn)) for entry in message.entries]


def take(queue: SendQueue, now: float = 0.0) -> Batch:
    taken = queue.take(now)
    assert isinstance(taken, Batch)
    return taken


def test_entries_and_messages_keep_their_order() -> None:
    queue = SendQueue(BOUNDS, LIMITS)
    queue.offer(slice_of(1), 0.0, is_live=True)
    queue.tell(beat(1))
    queue.offer(slice_of(2), 0.0, is_live=True)
    queue.end(FeedError("over"))
    assert lsns_of(take(queue)) == [1]
    assert queue.take(0.0) == beat(1)
    assert lsns_of(take(queue)) == [2]
    assert isinstance(queue.take(0.0), FeedError)
    assert queue.take(0.0) is None


def test_heartbeats_do_not_pile_up() -> None:
    queue = SendQueue(BOUNDS, LIMITS)
    for number in range(1, 100):
        queue.tell(beat(number))
        if number == 50:
            queue.tell(Message(b"w", "watermark"))
    assert [queue.take(0.0), queue.take(0.0), queue.take(0.0), queue.take(0.0)] == [
        beat(50), Message(b"w", "watermark"), beat(99), None,
    ]  # fmt: skip


def test_a_full_queue_refuses_and_the_clock_runs() -> None:
    queue = SendQueue(BOUNDS._replace(entries_max=20), LIMITS)
    assert queue.offer(slice_of(0, 15), 1.0, is_live=False)
    assert queue.deadline() is None
    assert not queue.offer(slice_of(15, 6), 2.0, is_live=False)
    assert not queue.offer(slice_of(15, 6), 9.0, is_live=False)
    assert queue.deadline() == 32.0
    take(queue, 10.0)
    queue.moved()
    assert queue.deadline() is None
    assert queue.offer(slice_of(15, 6), 10.0, is_live=False)


def test_the_clock_of_a_full_queue_stops_when_there_is_room() -> None:
    queue = SendQueue(BOUNDS._replace(entries_max=20), LIMITS)
    queue.offer(slice_of(0, 15), 1.0, is_live=False)
    assert not queue.offer(slice_of(15, 6), 2.0, is_live=False)
    assert queue.offer(slice_of(15, 5), 3.0, is_live=False)
    assert queue.deadline() is None
    assert not queue.offer(slice_of(20, 1), 40.0, is_live=False)
    assert queue.deadline() == 70.0, "it counts from when it was full again"


def test_bytes_bound_the_queue_too_and_a_giant_waits_alone() -> None:
    queue = SendQueue(BOUNDS._replace(bytes_max=1000), LIMITS)
    assert queue.offer(slice_of(1, size=5000), 0.0, is_live=False)
    assert not queue.offer(slice_of(2), 0.0, is_live=False)
    assert lsns_of(take(queue)) == [1]
    assert (queue.entries, queue.size_bytes) == (0, 0)
    assert queue.offer(slice_of(2), 0.0, is_live=False)
    assert not queue.offer(slice_of(3, size=990), 0.0, is_live=False)


def test_what_came_within_the_coalescing_time_is_one_batch() -> None:
    queue = SendQueue(BOUNDS, LIMITS)
    for number, now in enumerate((1.000, 1.004, 1.009, 1.011, 1.013)):
        queue.offer(slice_of(number), now, is_live=True)
    assert lsns_of(take(queue)) == [0, 1, 2]
    assert lsns_of(take(queue)) == [3, 4]


def test_an_idle_subscriber_is_not_delayed() -> None:
    queue = SendQueue(BOUNDS, LIMITS)
    for number in range(5):
        queue.offer(slice_of(number), float(number), is_live=True)
        assert lsns_of(take(queue, float(number))) == [number]


def test_catching_up_fills_batches_whatever_the_time() -> None:
    queue = SendQueue(BOUNDS, LIMITS)
    for number in range(25):
        queue.offer(slice_of(number), 5.0 * number, is_live=False)
    assert [len(lsns_of(take(queue))) for _ in range(3)] == [10, 10, 5]


def test_a_batch_is_bounded_by_bytes() -> None:
    queue = SendQueue(BOUNDS, Limits(10, 250, keeps_lsns=True))
    for number in range(5):
        queue.offer(slice_of(number, size=20), 0.0, is_live=False)
    counts = []
    while not queue.is_idle:
        batch = take(queue)
        assert batch.size_bytes <= 250
        counts.append(batch.count)
    assert sum(counts) == 5
    assert max(counts) > 1


def test_credit_is_what_may_be_ahead_of_the_last_ack() -> None:
    queue = SendQueue(BOUNDS._replace(credit=7), LIMITS)
    queue.offer(slice_of(100, 10), 0.0, is_live=False)
    queue.offer(slice_of(110, 10), 0.0, is_live=False)
    assert lsns_of(take(queue)) == list(range(100, 107))
    assert queue.take(5.0) is None
    assert queue.take(6.0) is None
    assert queue.deadline() == 35.0, "waiting for credit counts as a full queue"
    queue.acknowledge(102)
    assert lsns_of(take(queue, 7.0)) == [107, 108, 109]
    assert queue.deadline() is None
    queue.acknowledge(50)
    assert queue.take(8.0) is None
    queue.acknowledge(10_000)
    assert queue.credit == 7
    assert lsns_of(take(queue)) == list(range(110, 117))


def test_what_is_acknowledged_before_it_is_sent_takes_no_credit() -> None:
    queue = SendQueue(BOUNDS._replace(credit=7), LIMITS)
    queue.acknowledge(112)
    queue.offer(slice_of(100, 10), 0.0, is_live=False)
    queue.offer(slice_of(110, 15), 0.0, is_live=False)
    found: list[int] = []
    while isinstance(taken := queue.take(0.0), Batch):
        found += lsns_of(taken)
    assert found == list(range(100, 120)), "seven ahead of the last acknowledgement"
    assert queue.deadline() == 30.0


def test_heartbeats_need_no_credit() -> None:
    queue = SendQueue(BOUNDS._replace(credit=1), LIMITS)
    queue.offer(slice_of(1), 0.0, is_live=True)
    queue.tell(beat(1))
    take(queue)
    assert queue.take(0.0) == beat(1)


class Story(RuleBasedStateMachine):
    """Everything that is put in comes out once, in order, within bounds and credit, whatever happens meanwhile."""

    @initialize(
        entries_max=st.integers(1, 60),
        bytes_max=st.integers(1, 4000),
        batch=st.integers(1, 30),
        credit=st.integers(0, 9),
    )
    def begin(self, entries_max: int, bytes_max: int, batch: int, credit: int) -> None:
        self.bounds = Bounds(entries_max, bytes_max, 0.01, 30.0, credit)
        self.limits = Limits(batch, 2000, keeps_lsns=True)
        self.queue = SendQueue(self.bounds, self.limits)
        self.expected: deque[int] = deque()
        self.delivered: list[int] = []
        self.acked = 0
        self.next = 1
        self.now = 0.0

    @rule(count=st.integers(1, 12), size=st.integers(0, 300), is_live=st.booleans(), later=st.floats(0, 0.02))
    def offer(self, count: int, size: int, is_live: bool, later: float) -> None:
        self.now += later
        part = slice_of(self.next, count, size)
        was_empty = not self.queue.entries
        if self.queue.offer(part, self.now, is_live=is_live):
            self.expected.extend(range(self.next, self.next + count))
            self.next += count
            fits = self.queue.entries <= self.bounds.entries_max and self.queue.size_bytes <= self.bounds.bytes_max
            assert fits or was_empty
        else:
            assert not was_empty
            assert self.queue.deadline() is not None

    @rule()
    def tell(self) -> None:
        self.queue.tell(beat(self.next))

    @rule()
    def take(self) -> None:
        taken = self.queue.take(self.now)
        if taken is None:
            assert not self.expected or self.unacked() >= self.bounds.credit > 0
        elif isinstance(taken, Batch):
            found = lsns_of(taken)
            assert found == [self.expected.popleft() for _ in found]
            assert len(found) == taken.count <= self.limits.entries_max
            self.delivered += found
            self.queue.moved()

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        # Also beyond what came through here: another stream of the subscriber may be further.
        lsn = data.draw(st.integers(0, self.delivered[-1] + 20))
        self.acked = max(self.acked, lsn)
        self.queue.acknowledge(lsn)

    def unacked(self) -> int:
        return sum(lsn > self.acked for lsn in self.delivered)

    @invariant()
    def credit_holds(self) -> None:
        if self.bounds.credit:
            assert self.unacked() <= self.bounds.credit
            assert self.queue.credit == self.bounds.credit - self.unacked()

    @invariant()
    def the_depth_is_what_waits(self) -> None:
        assert self.queue.entries == len(self.expected)


TestStory = Story.TestCase


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_nothing_is_left_uncounted(counts: list[int]) -> None:
    queue, first = SendQueue(BOUNDS._replace(entries_max=10_000), LIMITS), 1
    for count in counts:
        queue.offer(slice_of(first, count), 0.0, is_live=False)
        first += count
    while not queue.is_idle:
        take(queue)
    assert (queue.entries, queue.size_bytes) == (0, 0)
