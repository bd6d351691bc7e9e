"""Regions: the first record that names a partition counts, for everybody, and numbers are never used twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from walstream.feed.reading.entries import Region
from walstream.feed.reading.regions import AHEAD, Named, RegionTable, write

ROLL = 1 << 32


def applied(batches: list[list[bytes]]) -> RegionTable:
    """Read batches as a feed does; the batch number n is appended at the time 1000 + n."""
    table, offset = RegionTable(), 0
    for number, batch in enumerate(batches):
        for value in batch:
            table.apply(offset, value, 1000 + number, is_first_batch=number == 0)
            offset += 1
    return table


def test_the_first_record_counts_and_its_offset_is_the_number() -> None:
    orders, users = Named("id-1", "orders", 0, 0), Named("id-2", "users", 3, 0)
    table = applied(
        [
            write([orders], is_first_batch=True),
            write([users, orders], is_first_batch=False),
            write([users], is_first_batch=False),
        ]
    )
    assert table.of("id-1", 0) == {0: Region(2, 0)}
    assert table.of("id-2", 3) == {0: Region(3, 1001)}
    assert table.named == {2: orders, 3: users}
    assert table.next_offset == 5


def test_a_first_batch_may_name_nothing_and_what_follows_is_new() -> None:
    table = applied(
        [write([], is_first_batch=True), write([Named("id", "late", 0, 0, start=77, end=99)], is_first_batch=False)]
    )
    assert table.of("id", 0) == {0: Region(2, 1001, 77, 99)}


def test_a_topic_made_anew_is_another_one() -> None:
    table = applied([write([Named("old", "orders", 0, 0), Named("new", "orders", 0, 0)], is_first_batch=True)])
    assert table.of("old", 0)[0].number != table.of("new", 0)[0].number


def test_what_makes_no_sense_takes_a_number_and_names_nothing() -> None:
    table = applied([[b"", b"{", b"[]", b'{"topic_id":1}', *write([Named("id", "t", 0, 0)], is_first_batch=False)]])
    assert table.of("id", 0) == {0: Region(5, 0)}


def test_rolls_are_named_in_order_before_they_are_needed() -> None:
    table = RegionTable()
    assert table.missing("id", 0, 0, 0) == [0]
    table.apply(0, write([Named("id", "t", 0, 0)], is_first_batch=False)[0], 5, is_first_batch=True)
    assert table.missing("id", 0, 0, ROLL - AHEAD - 1) == []
    assert table.missing("id", 0, 0, ROLL - AHEAD) == [1]
    assert table.missing("id", 0, 2 * ROLL + 5, 2 * ROLL + 9) == [2], "a roll that is all removed needs no region"
    table.apply(1, write([Named("id", "t", 0, 1)], is_first_batch=False)[0], 9, is_first_batch=False)
    assert table.of("id", 0) == {0: Region(1, 0), 1: Region(2, 9)}
    assert table.has(Named("id", "t", 0, 1))
    assert not table.has(Named("id", "t", 0, 2))


def test_a_roll_below_one_that_is_named_cannot_be_named_any_more() -> None:
    table = applied([write([Named("id", "t", 0, 4), Named("id", "t", 0, 2)], is_first_batch=True)])
    assert list(table.of("id", 0)) == [4]
    assert table.has(Named("id", "t", 0, 2)), "whoever wanted it must not try for ever"


triples = st.builds(Named, st.sampled_from(["a", "b"]), st.just("t"), st.integers(0, 1), st.integers(0, 3))


@given(st.lists(st.lists(triples, min_size=1, max_size=4), min_size=1, max_size=8))
def test_regions_grow_with_rolls_and_stay_what_they_are(batches: list[list[Named]]) -> None:
    written = [write(batch, is_first_batch=number == 0) for number, batch in enumerate(batches)]
    before: dict[tuple[str, int], dict[int, Region]] = {}
    for count in range(1, len(written) + 1):
        table = applied(written[:count])
        now = {(topic_id, partition): dict(table.of(topic_id, partition)) for topic_id in "ab" for partition in (0, 1)}
        for key, rolls in before.items():
            assert {roll: now[key][roll] for roll in rolls} == rolls
        numbers = [region.number for rolls in now.values() for region in rolls.values()]
        assert len(numbers) == len(set(numbers))
        for rolls in now.values():
            assert [region.number for _, region in sorted(rolls.items())] == sorted(r.number for r in rolls.values())
            assert [region.since_ms for _, region in sorted(rolls.items())] == sorted(
                r.since_ms for r in rolls.values()
            )
        before = now
