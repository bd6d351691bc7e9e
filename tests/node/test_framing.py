"""Frames out of bytes, whatever their pieces, and the memory they hold on the way."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import MalformedRequest
from walstream.node.framing import FIRST_BYTES, FRAME_OVERHEAD_BYTES, SCRATCH_BYTES, Budget, Receiver, held_bytes

MIB = 1024 * 1024


def receiver(bytes_max: int = 32 * MIB, budget: Budget | None = None, scratch: int = SCRATCH_BYTES) -> Receiver:
    return Receiver(memoryview(bytearray(scratch)), budget or Budget(128 * MIB), bytes_max)


def feed(receiver: Receiver, data: bytes, pieces: list[int]) -> list[bytes]:
    """Write data to the receiver as a transport would, in reads of these sizes at most."""
    taken: list[bytes] = []
    position, turn = 0, 0
    while position < len(data):
        buffer = receiver.buffer()
        count = min(len(buffer), max(pieces[turn % len(pieces)], 1), len(data) - position)
        buffer[:count] = data[position : position + count]
        receiver.received(count)
        position, turn = position + count, turn + 1
        while receiver.frames:
            taken.append(bytes(receiver.frames.popleft()))
    return taken


def framed(*bodies: bytes) -> bytes:
    return b"".join(struct.pack(">i", len(body)) + body for body in bodies)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.binary(max_size=300), max_size=20),
    st.lists(st.integers(1, 200), min_size=1, max_size=10),
    st.integers(16, 128),
)
def test_frames_come_out_as_they_went_in(bodies: list[bytes], pieces: list[int], scratch: int) -> None:
    one = receiver(scratch=scratch)
    assert feed(one, framed(*bodies), pieces) == bodies
    assert not one.is_inside_frame


@pytest.mark.parametrize("size", [SCRATCH_BYTES - 4, SCRATCH_BYTES - 3, FIRST_BYTES * 4, 3 * MIB + 1])
def test_large_frames(size: int) -> None:
    bodies = [bytes([number]) * size for number in range(3)]
    assert feed(receiver(), framed(*bodies), [1 << 20]) == bodies


def test_an_announced_length_alone_holds_no_memory() -> None:
    budget = Budget(128 * MIB)
    one = receiver(budget=budget)
    feed(one, struct.pack(">i", 32 * MIB), [4])
    assert one.is_inside_frame
    assert budget.used_bytes <= FIRST_BYTES
    feed(one, bytes(FIRST_BYTES + 1), [1 << 20])
    assert budget.used_bytes <= 4 * FIRST_BYTES


def test_what_a_frame_holds_is_given_back() -> None:
    budget = Budget(128 * MIB)
    one = receiver(budget=budget)
    one.buffer()[:12] = framed(b"12345678")
    one.received(12)
    assert budget.used_bytes == held_bytes(one.frames[0]) == 8 + FRAME_OVERHEAD_BYTES
    feed(one, framed(bytes(MIB))[:-1], [1 << 20])
    one.release()
    # The small frame was taken out by `feed` and is its taker's to give back.
    assert budget.used_bytes == 8 + FRAME_OVERHEAD_BYTES


@pytest.mark.parametrize("announced", [-1, -(2**31), 1025, 2**31 - 1])
def test_an_impossible_length_is_malformed(announced: int) -> None:
    with pytest.raises(MalformedRequest, match="announces"):
        feed(receiver(bytes_max=1024), struct.pack(">i", announced), [4])


def test_unfinished_frames_get_half_the_room_and_a_single_one_all_of_it() -> None:
    budget = Budget(MIB)
    begun = framed(bytes(MIB - 4096))[: FIRST_BYTES + 4]
    stalled = [receiver(budget=budget) for _ in range(6)]
    for one in stalled:
        feed(one, begun, [MIB])
    assert not any(one.has_room() for one in stalled)
    assert receiver(budget=budget).has_room(), "a small request is not kept waiting by large ones that stall"
    for one in stalled[1:]:
        one.release()
    assert stalled[0].has_room()
    feed(stalled[0], bytes(4 * FIRST_BYTES), [MIB])
    assert budget.unfinished_bytes > MIB // 2
    assert stalled[0].has_room(), "the only one may have all of it, or it could never end"
    feed(stalled[0], bytes(MIB - 4096 - 5 * FIRST_BYTES), [MIB])
    assert budget.unfinished_bytes == 0


def test_room_is_asked_for_only_where_more_is_needed() -> None:
    budget = Budget(4 * MIB)
    one, other = receiver(budget=budget), receiver(budget=budget)
    feed(one, framed(bytes(FIRST_BYTES))[:-1], [MIB])
    budget.take(4 * MIB)
    assert one.has_room()
    assert not other.has_room()


class Waiter:
    def __init__(self, name: str, budget: Budget, called: list[str]) -> None:
        self.name, self.budget, self.called = name, budget, called

    def has_room(self) -> bool:
        return self.budget.fits(60)

    def resume(self) -> None:
        self.called.append(self.name)
        self.budget.take(60)


def test_the_budget_calls_those_who_waited_longest_first() -> None:
    budget, called = Budget(100), []
    budget.take(100)
    first, second, third = (Waiter(name, budget, called) for name in ("first", "second", "third"))
    budget.wait(third, is_inside_frame=True)
    for waiter in (first, second, first):
        budget.wait(waiter, is_inside_frame=False)
    budget.give(30)
    assert called == []
    budget.give(30)
    assert called == ["first"]
    assert budget.waiting == 2
    budget.forget(second)
    budget.give(100)
    assert called == ["first", "third"]


def test_everybody_is_called_when_nothing_is_held() -> None:
    class Idle(Waiter):
        def resume(self) -> None:
            self.called.append(self.name)

    budget, called = Budget(100), []
    budget.take(100)
    for number in range(5):
        budget.wait(Idle(str(number), budget, called), is_inside_frame=False)
    budget.give(50)
    assert called == []
    budget.give(50)
    assert called == ["0", "1", "2", "3", "4"]


def test_a_single_holder_always_fits() -> None:
    budget = Budget(100)
    assert budget.fits(1000)
    budget.take(1)
    assert not budget.fits(1000)
