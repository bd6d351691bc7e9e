"""Idempotent producers: Kafka's rules one by one, and a client that retries at will against a plain model."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import CorruptLog, InvalidProducerEpoch, OutOfOrderSequence, TooManyProducers
from walstream.log.batch import BatchHeader
from walstream.log.producers import BATCHES_KEPT, RETRY_MS_MAX, Duplicate, ProducerStates

SEQUENCE_MAX = 2**31 - 1


def header(sequence: int, count: int = 1, *, offset: int = 0, producer: int = 9, epoch: int = 0) -> BatchHeader:
    return BatchHeader(offset, 100, 0, 2, 0, 0, count - 1, 50, 60 + offset, producer, epoch, sequence, count)


def known(*headers: BatchHeader, **options: Any) -> ProducerStates:
    states = ProducerStates(**options)
    for each in headers:
        states.apply(each, 0)
    return states


def test_a_batch_without_a_producer_is_nobodys() -> None:
    states = ProducerStates()
    plain = header(-1, producer=-1, epoch=-1)
    assert states.check(plain, 0) is None
    states.apply(plain, 0)
    assert len(states) == 0


def test_an_unknown_producer_may_start_anywhere() -> None:
    assert ProducerStates().check(header(1_234), 0) is None


def test_a_known_producer_must_go_on() -> None:
    states = known(header(5, 10, offset=100))
    assert states.check(header(15), 0) is None
    for sequence in (14, 16, 0, 6):
        with pytest.raises(OutOfOrderSequence):
            states.check(header(sequence), 0)


def test_duplicates_of_the_last_five_batches() -> None:
    states = known(*(header(index * 10, 10, offset=1_000 + index * 10) for index in range(7)))
    for index in range(2, 7):
        offset = 1_000 + index * 10
        assert states.check(header(index * 10, 10), 0) == Duplicate(offset, offset + 9, 60 + offset)
    with pytest.raises(OutOfOrderSequence):
        states.check(header(10, 10), 0)
    with pytest.raises(OutOfOrderSequence):
        states.check(header(60, 9), 0)


def test_epochs() -> None:
    states = known(header(0, 5, epoch=3))
    with pytest.raises(InvalidProducerEpoch):
        states.check(header(5, epoch=2), 0)
    with pytest.raises(InvalidProducerEpoch):
        states.check(header(0, 5, epoch=2), 0)
    with pytest.raises(OutOfOrderSequence):
        states.check(header(5, epoch=4), 0)
    bumped = header(0, 5, epoch=4, offset=5)
    assert states.check(bumped, 0) is None
    states.apply(bumped, 0)
    assert states.check(bumped, 0) == Duplicate(5, 9, 65)
    with pytest.raises(InvalidProducerEpoch):
        states.check(header(0, 5, epoch=3), 0)


@pytest.mark.parametrize(("base", "count", "following"), [(SEQUENCE_MAX, 1, 0), (SEQUENCE_MAX - 1, 4, 2)])
def test_sequences_wrap(base: int, count: int, following: int) -> None:
    states = known(header(base, count))
    assert states.check(header(following), 0) is None
    assert states.check(header(base, count), 0) == Duplicate(0, count - 1, 60)
    with pytest.raises(OutOfOrderSequence):
        states.check(header(following + 1), 0)


def test_applying_again_changes_nothing() -> None:
    headers = [header(index, offset=index) for index in range(8)]
    states = known(*headers)
    before = states.snapshot()
    for each in headers:
        states.apply(each, 0)
    assert states.snapshot() == before


def test_a_live_producer_is_never_forgotten_for_a_new_one() -> None:
    states = ProducerStates(producers_max=2)
    states.apply(header(0, producer=1), 1_000)
    states.apply(header(0, producer=2), 2_000)
    states.apply(header(1, producer=1, offset=1), 3_000)
    newcomer = header(0, producer=3, offset=2)
    with pytest.raises(TooManyProducers):
        states.check(newcomer, 2_000 + RETRY_MS_MAX - 1)
    assert states.check(header(1, producer=2), 2_000) is None
    assert states.check(newcomer, 2_000 + RETRY_MS_MAX) is None
    states.apply(newcomer, 2_000 + RETRY_MS_MAX)
    assert [producer in states for producer in (1, 2, 3)] == [True, False, True]


def test_expire() -> None:
    states = ProducerStates()
    for producer in range(5):
        states.apply(header(0, producer=producer), producer * 100)
    assert states.expire(200) == 2
    assert [producer in states for producer in range(5)] == [False, False, True, True, True]


def test_snapshot_survives_json() -> None:
    states = known(*(header(index, offset=index * 2 + who, producer=who) for index in range(7) for who in (3, 4)))
    restored = ProducerStates.restore(json.loads(json.dumps(states.snapshot())), now_ms=0)
    assert restored.snapshot() == states.snapshot()
    assert restored.check(header(7, producer=3), 0) is None
    assert restored.check(header(6, producer=4), 0) == Duplicate(16, 16, 76)
    assert len(ProducerStates.restore(states.snapshot(), producers_max=1, now_ms=0)) == 1


def test_snapshot_below_an_offset_leaves_out_what_may_not_be_durable() -> None:
    states = known(header(0, offset=0), header(1, offset=1), header(2, offset=2), header(0, offset=3, producer=4))
    restored = ProducerStates.restore(states.snapshot(below=2), now_ms=0)
    assert restored.check(header(2), 0) is None
    assert restored.check(header(1), 0) == Duplicate(1, 1, 61)
    assert 4 not in restored


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.lists(JSON, max_size=3))
def test_a_broken_snapshot_is_named(data: list[Any]) -> None:
    with contextlib.suppress(CorruptLog):
        ProducerStates.restore(data, now_ms=0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=40), st.booleans())
def test_a_retrying_client_is_written_once(steps: list[tuple[int, int]], restarts: bool) -> None:
    """The client sends the next batch (0) or one that it sent some batches ago; the log never holds a number twice."""
    states, sent, log = ProducerStates(), [], []
    for back, count in steps:
        if back == 0 or back > len(sent):
            sequence = sent[-1].base_sequence + sent[-1].record_count if sent else 0
            sent.append(header(sequence, count))
            back = 1
        batch = sent[-back]
        if restarts:
            states = ProducerStates.restore(states.snapshot(), now_ms=0)
        try:
            duplicate = states.check(batch, 0)
        except OutOfOrderSequence:
            assert back > BATCHES_KEPT
            continue
        if duplicate is None:
            stamped = batch._replace(base_offset=len(log))
            log += range(batch.base_sequence, batch.base_sequence + batch.record_count)
            states.apply(stamped, 0)
        else:
            assert log[duplicate.base_offset : duplicate.last_offset + 1] == list(
                range(batch.base_sequence, batch.base_sequence + batch.record_count)
            )
    assert log == list(range(len(log)))
