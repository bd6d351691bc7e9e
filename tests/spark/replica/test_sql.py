"""The replica's SQL against real servers: what a stage does to a table, and how a table follows the source's."""

from __future__ import annotations

from typing import Any

import pytest

from postgres.servers import Database
from walstream.spark.replica import sql
from walstream.spark.replica.sql import Column, Shape, SourceColumn, TableName, Version

STAGE = '"walstream"."stage"'
SHAPE = Shape(
    TableName("public", 'or"ders'),
    (Column("id", "integer"), Column("the doc", "text"), Column("op", "text")),
    ("id",),
)


def staged(database: Database, shape: Shape, rows: list[list[Any]]) -> None:
    """Fill a stage: c0… k0… op unsent."""
    database.execute("create schema if not exists walstream")
    database.execute(sql.drop_stages([STAGE]))
    database.execute(sql.create_stage(STAGE, shape))
    width = len(shape.columns) + len(shape.key) + 3
    for row in rows:
        database.execute(f"insert into {STAGE} values ({', '.join(['%s'] * width)})", [*row, 0])


def content(database: Database, shape: Shape = SHAPE) -> list[tuple[Any, ...]]:
    return database.execute(f"select * from {sql.quoted_table(shape.name)} order by 1")


def created(database: Database, shape: Shape, rows: list[tuple[Any, ...]]) -> None:
    for statement in sql.create_table(shape):
        database.execute(statement)
    for row in rows:
        database.execute(
            f"insert into {sql.quoted_table(shape.name)} values ({', '.join(['%s'] * len(row))})", list(row)
        )


def applied(database: Database, way: str, unsent: tuple[int, ...] = ()) -> int:
    """Apply the stage by MERGE or by DELETE and INSERT; return how many rows were orphans."""
    writable = [column.name for column in SHAPE.columns]
    if unsent:
        database.execute(sql.fill(STAGE, SHAPE, unsent, moved_only=way == "merge"))
    orphan_count: int = database.execute(sql.orphans(STAGE, SHAPE))[0][0]
    for statement in (
        [sql.merge(STAGE, SHAPE, unsent, writable)] if way == "merge" else sql.replace(STAGE, SHAPE, writable)
    ):
        database.execute(statement)
    return orphan_count


both_ways = pytest.mark.parametrize("way", ["merge", "replace"])


@both_ways
def test_inserts_updates_and_deletes(each_database: Database, way: str) -> None:
    created(each_database, SHAPE, [(1, "one", "a"), (2, "two", "b"), (3, "three", "c")])
    staged(
        each_database,
        SHAPE,
        [
            [1, "ONE", None, None, "u", []],
            [2, None, None, None, "d", []],
            [4, "four", "d", None, "u", []],
            [5, None, None, None, "d", []],
        ],
    )
    assert applied(each_database, way) == 0
    assert content(each_database) == [(1, "ONE", None), (3, "three", "c"), (4, "four", "d")]


@both_ways
def test_columns_that_were_not_sent_stay(each_database: Database, way: str) -> None:
    created(each_database, SHAPE, [(1, "long", "a"), (2, "longer", "b")])
    staged(each_database, SHAPE, [[1, None, "x", None, "u", [1]], [2, None, None, None, "u", []]])
    assert applied(each_database, way, (1,)) == 0
    assert content(each_database) == [(1, "long", "x"), (2, None, None)]


@both_ways
def test_two_rows_exchange_their_keys_and_keep_what_was_not_sent(each_database: Database, way: str) -> None:
    created(each_database, SHAPE, [(1, "doc of one", "a"), (2, "doc of two", "b")])
    staged(each_database, SHAPE, [[1, None, "b", 2, "u", [1]], [2, None, "a", 1, "u", [1]]])
    assert applied(each_database, way, (1,)) == 0
    assert content(each_database) == [(1, "doc of two", "b"), (2, "doc of one", "a")]


@both_ways
def test_a_row_that_moved_to_a_new_key(each_database: Database, way: str) -> None:
    created(each_database, SHAPE, [(1, "doc", "a")])
    staged(each_database, SHAPE, [[1, None, None, None, "d", []], [9, None, "b", 1, "u", [1]]])
    assert applied(each_database, way, (1,)) == 0
    assert content(each_database) == [(9, "doc", "b")]


@both_ways
def test_a_row_that_the_target_lacks_is_counted(each_database: Database, way: str) -> None:
    created(each_database, SHAPE, [])
    staged(each_database, SHAPE, [[1, None, "b", None, "u", [1]], [2, None, "b", 7, "u", [1]]])
    assert applied(each_database, way, (1,)) == 2


def test_unique_values_are_exchanged_by_deleting_first(each_database: Database) -> None:
    created(each_database, SHAPE, [(1, "one", "a"), (2, "two", "b")])
    each_database.execute('create unique index on public."or""ders" ("the doc")')
    staged(each_database, SHAPE, [[1, "two", "a", None, "u", []], [2, "one", "b", None, "u", []]])
    assert applied(each_database, "replace") == 0
    assert content(each_database) == [(1, "two", "a"), (2, "one", "b")]


def test_a_table_that_is_all_key(each_database: Database) -> None:
    shape = Shape(TableName("s", "pairs"), (Column("a", "integer"), Column("b", "text")), ("a", "b"))
    created(each_database, shape, [(1, "x")])
    staged(each_database, shape, [[1, "x", None, None, "d", []], [1, "y", None, None, "u", []]])
    each_database.execute(sql.merge(STAGE, shape, (), ["a", "b"]))
    staged(each_database, shape, [[1, "y", None, None, "u", []]])
    each_database.execute(sql.merge(STAGE, shape, (), ["a", "b"]))
    assert content(each_database, shape) == [(1, "y")]


def test_identity_columns_take_the_source_s_values(each_database: Database) -> None:
    each_database.execute(
        'create table public."or""ders" (id integer generated always as identity primary key, "the doc" text, op text)'
    )
    staged(each_database, SHAPE, [[7, "seven", "a", None, "u", []]])
    assert applied(each_database, "merge") == 0
    staged(each_database, SHAPE, [[8, "eight", "a", None, "u", []], [7, "SEVEN", None, None, "u", []]])
    assert applied(each_database, "replace") == 0
    assert content(each_database) == [(7, "SEVEN", None), (8, "eight", "a")]


def test_the_control_tables_are_made_once(each_database: Database) -> None:
    for _ in range(2):
        for statement in sql.control_tables("my walstream"):
            each_database.execute(statement)
    assert each_database.execute('select * from "my walstream".position') == []
    assert each_database.execute('select * from "my walstream".tables') == []


TABLE = TableName("public", "t")


def version(*columns: tuple[str, str, int | None], relation_id: int = 1) -> Version:
    return Version(1, relation_id, ("id",), tuple(SourceColumn(*column) for column in columns))


def evolved(database: Database, known: Version | None, new: Version) -> list[tuple[str, str]]:
    """Evolve public.t; return its columns with their types."""
    types = {column.name: column.type for column in new.columns}
    for statement in sql.evolution(TABLE, dict(columns_of(database)), known, new, types):
        database.execute(statement)
    assert sql.evolution(TABLE, dict(columns_of(database)), new, new, types) == []
    return columns_of(database)


def columns_of(database: Database) -> list[tuple[str, str]]:
    rows = database.execute(
        "select attname::text, format_type(atttypid, atttypmod) from pg_attribute"
        " where attrelid = 'public.t'::regclass and attnum > 0 and not attisdropped order by attnum"
    )
    return [(name, kind) for name, kind in rows]


OLD = version(("id", "integer", 1), ("a", "integer", 2), ("b", "text", 3))


def test_columns_are_added_and_types_follow(each_database: Database) -> None:
    each_database.execute("create table public.t (id integer primary key, a integer, b text, mine date)")
    each_database.execute("insert into public.t values (1, 2, '3')")
    new = version(("id", "bigint", 1), ("a", "numeric(12,2)", 2), ("b", "text", 3), ("c", "jsonb", 4))
    assert evolved(each_database, OLD, new) == [
        ("id", "bigint"),
        ("a", "numeric(12,2)"),
        ("b", "text"),
        ("mine", "date"),
        ("c", "jsonb"),
    ]
    assert each_database.execute("select a::text from public.t") == [("2.00",)]


def test_a_rename_is_proved_by_the_number_and_two_columns_may_exchange_names(each_database: Database) -> None:
    each_database.execute("create table public.t (id integer primary key, a integer, b text)")
    each_database.execute("insert into public.t values (1, 2, 'three')")
    new = version(("id", "integer", 1), ("b", "integer", 2), ("a", "text", 3))
    assert evolved(each_database, OLD, new) == [("id", "integer"), ("b", "integer"), ("a", "text")]
    assert each_database.execute("select a, b from public.t") == [("three", 2)]


def test_a_rename_is_proved_although_another_column_has_no_number(each_database: Database) -> None:
    each_database.execute("create table public.t (id integer primary key, a integer, b text)")
    each_database.execute("insert into public.t values (1, 2, 'three')")
    new = version(("id", "integer", 1), ("c", "integer", 2), ("a", "text", None), ("b", "text", None))
    columns = [("id", "integer"), ("c", "integer"), ("b", "text"), ("a", "text")]
    assert evolved(each_database, OLD, new) == columns
    assert each_database.execute("select a, b, c from public.t") == [(None, "three", 2)]


def test_a_column_dropped_and_added_by_the_same_name_is_another_one(each_database: Database) -> None:
    each_database.execute("create table public.t (id integer primary key, a integer, b text)")
    each_database.execute("insert into public.t values (1, 2, 'three')")
    new = version(("id", "integer", 1), ("a", "integer", 7))
    assert evolved(each_database, OLD, new) == [("id", "integer"), ("a", "integer")]
    assert each_database.execute("select a from public.t") == [(None,)]


def test_without_numbers_names_decide(each_database: Database) -> None:
    each_database.execute("create table public.t (id integer primary key, a integer, b text)")
    new = version(("id", "integer", None), ("x", "integer", None), ("b", "text", None))
    assert evolved(each_database, OLD, new) == [("id", "integer"), ("b", "text"), ("x", "integer")]


def test_a_table_that_nobody_followed_before_only_gets_what_it_lacks(each_database: Database) -> None:
    each_database.execute("create table public.t (id integer primary key, a bigint, old text)")
    assert evolved(each_database, None, OLD) == [("id", "integer"), ("a", "bigint"), ("old", "text"), ("b", "text")]


def test_a_version_survives_being_written() -> None:
    assert Version.from_json(OLD.to_json()) == OLD
