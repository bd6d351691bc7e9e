"""Promises, however they come: the newest counts, and one that says nothing changes nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from walstream.capture.kafka import LogAddress
from walstream.feed.reading.calls import Found
from walstream.feed.reading.log_client import LogClient
from walstream.feed.reading.resolved import Promise, Promises
from walstream.positions import GlobalLsn, TopicPartition

A, B = TopicPartition("a", 0), TopicPartition("b", 0)


def nobody_asked() -> Promises:
    return Promises(LogClient(LogAddress("127.0.0.1:1"), None), 100)


def test_a_promise_never_goes_back() -> None:
    promises = nobody_asked()
    promises.keep({A: Found(0, 5, 1_000), B: Found(0, 1, 900)})
    promises.keep({A: Found(0, 4, 999), B: Found(0, 2, 901)})
    assert promises.of(A) == Promise(5, 1_000)
    assert promises.of(B) == Promise(2, 901)
    promises.keep({A: Found(0, 6, 1_000)})
    assert promises.of(A) == Promise(6, 1_000), "as true as the other, and newer"


def test_what_is_not_known_changes_nothing() -> None:
    promises = nobody_asked()
    promises.keep({A: Found(0, 5, 1_000)})
    promises.keep({A: Found(0, -1, -1), B: Found(0, -1, -1)})
    promises.keep({A: Found(6, 7, 2_000)})
    assert promises.of(A) == Promise(5, 1_000)
    assert promises.of(B) is None


def test_one_that_was_broken_is_believed_no_more_and_a_later_one_is() -> None:
    promises = nobody_asked()
    promises.keep({A: Found(0, 5, 1_000)})
    broken = promises.note_broken(A, GlobalLsn.at_time(900))
    assert broken.bound == GlobalLsn.at_time(1_001)
    assert promises.of(A) is None
    promises.keep({A: Found(0, 6, 1_010)})
    assert promises.of(A) == Promise(6, 1_010)


@given(st.lists(st.builds(Found, st.sampled_from([0, 0, 6]), st.integers(-1, 50), st.integers(-1, 50)), max_size=20))
def test_the_bound_only_rises(answers: list[Found]) -> None:
    promises, bound = nobody_asked(), 0
    for answer in answers:
        promises.keep({A: answer})
        promise = promises.of(A)
        assert promise is None or promise.bound >= bound
        bound = promise.bound if promise is not None else 0
