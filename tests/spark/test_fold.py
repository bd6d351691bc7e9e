"""Fold against a model: one row per key, values carried forward, key changes followed to where their values are."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import types as t

from integration.support import rounds
from spark.changing import LARGE, NAMES, Change, Story, change, frame
from walstream.spark.columns import TableColumn
from walstream.spark.fold import Folded, fold

Values = dict[str, Any]


def folded_rows(folded: Folded) -> list[Values]:
    return [row.asDict(recursive=True) for row in folded.rows.collect()]


def applied(before: Mapping[Any, Values], rows: Sequence[Values], has_truncate: bool) -> dict[Any, Values]:
    """What a table becomes by a fold's result, as any destination has to do it."""
    after = {} if has_truncate else {key: dict(row) for key, row in before.items()}
    for row in rows:
        key = row["id"]
        if row["_op"] == "d":
            after.pop(key, None)
            continue
        values = {name: row[name] for name in NAMES}
        unsent = row["_unsent"] or []
        if unsent:
            home = (row["_from"] or {"id": key})["id"]
            values |= {name: before[home][name] for name in unsent}
        after[key] = values
    return after


def check(
    spark: SparkSession, story: Story, before: Mapping[int, Values], changes: Sequence[Change], **more: Any
) -> Folded:
    folded = fold(frame(spark, changes), ("id",), NAMES, **more)
    try:
        rows = folded_rows(folded)
        assert len({row["id"] for row in rows}) == len(rows)
        assert applied(before, rows, folded.has_truncate) == story.rows
        assert folded.rows_in == len(changes)
    finally:
        folded.release()
    return folded


def began(**rows: Values) -> Story:
    """A story whose table has rows from before."""
    story = Story()
    for row in rows.values():
        story.insert(**row)
    story.commit()
    story.changes.clear()
    return story


def row(key: int, doc: str | None = "long", note: str | None = "also long", n: int = 0) -> Values:
    return {"id": key, "n": n, "doc": doc, "note": note}


def before_of(story: Story) -> dict[int, Values]:
    return {key: dict(values) for key, values in story.rows.items()}


def test_last_change_of_each_key_wins_whatever_the_order_of_rows(spark: SparkSession) -> None:
    story = began(a=row(1), b=row(2))
    before = before_of(story)
    story.insert(**row(3))
    story.update(3, doc="other", note="x")
    story.delete(1)
    story.insert(**row(1, doc="again"))
    story.delete(2)
    folded = check(spark, story, before, story.changes)
    assert not folded.carries
    assert not folded.has_truncate


def test_unsent_columns_keep_what_was_told_last(spark: SparkSession) -> None:
    story = began(a=row(1), b=row(2))
    before = before_of(story)
    story.insert(**row(3, doc="of the insert"))
    story.update(3, ["doc", "note"], n=7)
    story.update(1, ["doc"], n=1, note="told")
    story.update(1, ["doc", "note"], n=2)
    story.update(2, ["note"], doc=None)
    story.update(2, ["doc", "note"], n=5)
    folded = check(spark, story, before, story.changes)
    assert folded.carries == {"doc", "note"}
    by_key = {one["id"]: one for one in folded_rows(fold(frame(spark, story.changes), ("id",), NAMES))}
    assert by_key[3]["_unsent"] is None
    assert by_key[3]["doc"] == "of the insert"
    assert by_key[1]["_unsent"] == ["doc"]
    assert (by_key[2]["_unsent"], by_key[2]["doc"]) == (["note"], None)


def test_a_row_that_was_deleted_leaves_nothing_to_its_key(spark: SparkSession) -> None:
    story = began(a=row(1, doc="of the first"), b=row(2, doc="of the second"))
    before = before_of(story)
    story.update(1, doc="told of the first")
    story.delete(1)
    story.update(2, ["doc", "note"], id=1)
    check(spark, story, before, story.changes)


def test_key_changes_in_a_chain(spark: SparkSession) -> None:
    story = began(a=row(1, doc="the one"), b=row(50))
    before = before_of(story)
    story.update(1, ["doc"], note="told on the way", id=2)
    for key in range(2, 20):
        story.update(key, ["doc", "note"], id=key + 1)
        story.commit()
    story.insert(**row(1, doc="another row by now"))
    story.insert(**row(5, doc="another row, too"))
    folded = check(spark, story, before, story.changes)
    assert folded.facts.has_moves


def test_key_changes_of_a_row_that_the_batch_inserted(spark: SparkSession) -> None:
    story = Story()
    story.insert(**row(1, doc="inserted"))
    story.update(1, ["doc", "note"], id=2)
    story.update(2, ["doc", "note"], n=3)
    check(spark, story, {}, story.changes)


def test_keys_that_are_swapped(spark: SparkSession) -> None:
    story = began(a=row(1, doc="first"), b=row(2, doc="second"))
    before = before_of(story)
    story.update(1, LARGE, id=99)
    story.update(2, LARGE, id=1)
    story.update(99, LARGE, id=2)
    folded = check(spark, story, before, story.changes)
    by_key = {one["id"]: one for one in folded_rows(fold(frame(spark, story.changes), ("id",), NAMES))}
    assert by_key[1]["_from"] == {"id": 2}
    assert by_key[2]["_from"] == {"id": 1}
    assert by_key[99]["_op"] == "d"
    assert folded.carries == set(LARGE)


def test_a_key_that_goes_and_comes_back(spark: SparkSession) -> None:
    story = began(a=row(1, doc="at home"))
    before = before_of(story)
    story.update(1, LARGE, id=2)
    story.update(2, LARGE, id=1, n=5)
    check(spark, story, before, story.changes)


def test_truncates_in_order(spark: SparkSession) -> None:
    story = began(a=row(1), b=row(2))
    before = before_of(story)
    story.update(1, n=3)
    story.truncate()
    story.insert(**row(2, doc="after the first"))
    story.truncate()
    story.insert(**row(3, doc="after the second"))
    story.update(3, LARGE, n=9)
    story.update(3, LARGE, id=4)
    folded = check(spark, story, before, story.changes)
    assert folded.has_truncate


def test_nothing_is_something_as_well(spark: SparkSession) -> None:
    folded = fold(frame(spark, []), ("id",), NAMES)
    assert folded_rows(folded) == []
    assert folded.rows_in == 0
    assert not folded.has_truncate


def test_what_is_known_of_a_table_spares_the_second_reading(spark: SparkSession) -> None:
    story = began(a=row(1))
    before = before_of(story)
    story.update(1, ["doc"], n=4)
    folded = check(spark, story, before, story.changes, carries={"doc", "note"})
    assert folded.carries == {"doc", "note"}


def test_many_columns_and_odd_names(spark: SparkSession) -> None:
    names = ["id.x", "a`b", "it's", *(f"c{number}" for number in range(130))]
    columns = [TableColumn(name, t.StringType()) for name in names]
    changes = [
        change("u", {name: f"{name} one" for name in names} | {"id.x": "k"}, lsn=1, seq=1),
        change("u", {"id.x": "k", "c5": "two"}, [name for name in names if name not in ("id.x", "c5")], lsn=2, seq=1),
    ]
    folded = fold(frame(spark, changes, columns), ("id.x",), names)
    (one,) = folded_rows(folded)
    assert one["_unsent"] is None
    assert {name: one[name] for name in names} == {name: f"{name} one" for name in names} | {"id.x": "k", "c5": "two"}
    assert folded.carries == set(names) - {"id.x", "c5"}


@pytest.mark.parametrize("seed", range(rounds(full=10, part=2)))
def test_any_history_of_many_tables_at_once(spark: SparkSession, seed: int) -> None:
    """Two hundred histories in one DataFrame, told apart by a second column of the key."""
    dice = random.Random(seed)
    columns = [TableColumn("story", t.IntegerType()), TableColumn("id", t.LongType())]
    columns += [TableColumn("n", t.IntegerType()), *(TableColumn(name, t.StringType()) for name in LARGE)]
    befores, stories, changes = [], [], []
    for number in range(200):
        story = Story()
        story.play(dice, 8, truncates=0, keys=5)
        befores.append(before_of(story))
        story.changes.clear()
        story.play(dice, dice.randrange(1, 25), truncates=0, keys=5)
        stories.append(story)
        # Positions are one order for all: a transaction of each story at a time.
        changes += [
            {**one, "story": number, "_commit_lsn": one["_commit_lsn"] * 1000 + number} for one in story.changes
        ]
    folded = fold(frame(spark, changes, columns), ("story", "id"), ("story", *NAMES))
    rows = folded_rows(folded)
    folded.release()
    for number, (before, story) in enumerate(zip(befores, stories, strict=True)):
        own = [one for one in rows if one["story"] == number]
        assert applied(before, own, False) == story.rows, f"story {number}"
