"""The SQL of a replica: its own tables, a table and how it follows the source's, the merge of one batch.

Owns the statements; refuses to know connections, Spark and the log. Names and types come from the source, so every one
of them is quoted or was found in the replica's own catalogue. Sans-IO.

A batch arrives in a *stage*: one row per key, whatever happened to it, with the columns by number, so that no name of
the source's can meet one of ours:

    c0 c1 …    the row, in the order of the table's columns; of a deleted row the key alone
    k0 k1 …    the key under which the target still has a row that has moved and was not sent whole, else null
    op         u: it is there now; d: it is not
    unsent     numbers of the columns that PostgreSQL did not send (TOAST): the target has them
    attempt    the Spark task that wrote it

and is merged in this order, all of it in the batch's one transaction:

    fill       rows that have moved take what was not sent from the row under their old key, before that is deleted
    merge      MERGE where the key is the only thing that is unique; otherwise every row of the batch is deleted and
               those that are there now are inserted, so that two rows may exchange a unique value
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

UPSERT: Final = "u"
DELETE: Final = "d"

TEXT: Final = "text"
"""What a column is at the replica when its type is not there: all values have a text."""

MERGE_VERSION_MIN: Final = 150000


class TableName(NamedTuple):
    """A table as both sides call it."""

    schema: str
    table: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}"


class SourceColumn(NamedTuple):
    """A column of the source: its type in PostgreSQL's words, and its number in the catalogue where that is known."""

    name: str
    type: str
    attnum: int | None = None


class Version(NamedTuple):
    """A version of a table at the source, as far as a replica follows it."""

    number: int
    relation_id: int
    key: tuple[str, ...]
    columns: tuple[SourceColumn, ...]

    def to_json(self) -> str:
        """Write it for the replica's own table."""
        return json.dumps(self, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Version:
        """Read what `to_json` wrote."""
        number, relation_id, key, columns = json.loads(text)
        return cls(number, relation_id, tuple(key), tuple(SourceColumn(*column) for column in columns))


class Column(NamedTuple):
    """A column and its type in the replica's words."""

    name: str
    type: str


class Shape(NamedTuple):
    """A table at the replica, as far as a batch writes to it; without a key rows are only added."""

    name: TableName
    columns: tuple[Column, ...]
    key: tuple[str, ...]

    @property
    def key_numbers(self) -> list[int]:
        """Where the key's columns stand among all."""
        numbers = {column.name: number for number, column in enumerate(self.columns)}
        return [numbers[name] for name in self.key]


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def quoted_table(name: TableName) -> str:
    """Return a table as SQL names it."""
    return f"{quoted(name.schema)}.{quoted(name.table)}"


def control_tables(schema: str) -> list[str]:
    """Return what makes the tables in which the replica keeps how far it has come."""
    own = quoted(schema)
    return [
        f"CREATE SCHEMA IF NOT EXISTS {own}",
        f"""CREATE TABLE IF NOT EXISTS {own}.position (
            prefix text PRIMARY KEY,
            point bigint NOT NULL,
            source_epoch integer NOT NULL,
            end_lsn pg_catalog.pg_lsn NOT NULL,
            commit_time timestamptz,
            applied_at timestamptz NOT NULL
        )""",
        f"""CREATE TABLE IF NOT EXISTS {own}.tables (
            prefix text NOT NULL,
            table_schema text NOT NULL,
            table_name text NOT NULL,
            source_epoch integer NOT NULL,
            end_lsn pg_catalog.pg_lsn NOT NULL,
            point bigint NOT NULL,
            snapshot text NOT NULL,
            version jsonb NOT NULL,
            stopped text NOT NULL,
            PRIMARY KEY (prefix, table_schema, table_name)
        )""",
    ]


def create_table(shape: Shape) -> list[str]:
    """Return what makes a table that is not there yet. Only the key is constrained: the source has seen to the rest."""
    columns = [f"{quoted(column.name)} {column.type}" for column in shape.columns]
    if shape.key:
        columns.append(f"PRIMARY KEY ({', '.join(map(quoted, shape.key))})")
    return [
        f"CREATE SCHEMA IF NOT EXISTS {quoted(shape.name.schema)}",
        f"CREATE TABLE {quoted_table(shape.name)} ({', '.join(columns)})",
    ]


def evolution(
    table: TableName, target: Mapping[str, str], known: Version | None, new: Version, types: Mapping[str, str]
) -> list[str]:
    """Return what brings a table from the version that it follows to another; nothing when it is that already.

    `target` has the replica's columns with their types, `types` those that each column of `new` is to have. A column is
    the same as before when its number in the source's catalogue is, whatever its name. Columns that the source never
    had, and types that somebody chose for the replica alone, stay as they are.
    """
    alter = f"ALTER TABLE {quoted_table(table)}"
    before, after = _by_identity(known, new)
    names = dict(target)
    statements = []
    for identity, column in before.items():
        if identity not in after and column.name in names:
            statements.append(f"{alter} DROP COLUMN {quoted(column.name)}")
            del names[column.name]
    moved = {
        before[identity].name: column.name
        for identity, column in after.items()
        if identity in before and before[identity].name != column.name and before[identity].name in names
    }
    # By way of names that nobody has, so that two columns may exchange theirs.
    passing = {old: f"walstream renames {number}" for number, old in enumerate(moved)}
    for steps in (passing, {passing[old]: final for old, final in moved.items()}):
        for old, final in steps.items():
            statements.append(f"{alter} RENAME COLUMN {quoted(old)} TO {quoted(final)}")
            names[final] = names.pop(old)
    for identity, column in after.items():
        wanted, name = types[column.name], quoted(column.name)
        if column.name not in names:
            statements.append(f"{alter} ADD COLUMN {name} {wanted}")
        elif identity in before and before[identity].type != column.type and names[column.name] != wanted:
            statements.append(f"{alter} ALTER COLUMN {name} TYPE {wanted} USING {name}::text::{wanted}")
    return statements


def _by_identity(known: Version | None, new: Version) -> tuple[dict[str, SourceColumn], dict[str, SourceColumn]]:
    """Return the columns of both by what makes them the same: their number, or their name where one has no number.

    What stands for it is the name of the earlier column; a column that there was not has one that no column can have.
    """
    before = {column.name: column for column in known.columns} if known is not None else {}
    has_numbers = known is not None and known.relation_id == new.relation_id
    by_number = {one.attnum: one.name for one in before.values() if has_numbers and one.attnum is not None}
    same = {column.name: by_number[column.attnum] for column in new.columns if column.attnum in by_number}
    taken = set(same.values())
    for column in new.columns:
        earlier = before.get(column.name)
        if column.name in same or earlier is None or earlier.name in taken:
            continue
        if not has_numbers or earlier.attnum is None or column.attnum is None:
            same[column.name] = column.name
    return before, {same.get(column.name, f"\0{column.name}"): column for column in new.columns}


def create_stage(stage: str, shape: Shape) -> str:
    """Return what makes the stage of a table; it is not worth surviving a crash."""
    rows = [f"c{number} {column.type}" for number, column in enumerate(shape.columns)]
    keys = [f"k{at} {shape.columns[number].type}" for at, number in enumerate(shape.key_numbers)]
    own = ['op "char" NOT NULL', "unsent int2[] NOT NULL", "attempt bigint NOT NULL"]
    return f"CREATE UNLOGGED TABLE {stage} ({', '.join((*rows, *keys, *own))})"


def copy_into(stage: str) -> str:
    """Return the COPY into a stage, all of its columns."""
    return f"COPY {stage} FROM STDIN (FORMAT csv)"


def fill(stage: str, shape: Shape, unsent: Collection[int], *, moved_only: bool) -> str:
    """Return what takes columns that were not sent from the target, and then counts them as sent."""
    target = quoted_table(shape.name)
    values = [
        f"c{number} = CASE WHEN {number} = ANY(s.unsent) THEN t.{quoted(shape.columns[number].name)}"
        f" ELSE s.c{number} END"
        for number in sorted(unsent)
    ]
    pairs = enumerate(zip(shape.key, shape.key_numbers, strict=True))
    matches = [f"t.{quoted(name)} = coalesce(s.k{at}, s.c{number})" for at, (name, number) in pairs]
    conditions = [f"s.op = '{UPSERT}'", "s.unsent <> '{}'", *(["s.k0 IS NOT NULL"] if moved_only else []), *matches]
    return f"UPDATE {stage} s SET {', '.join(values)}, unsent = '{{}}' FROM {target} t WHERE {' AND '.join(conditions)}"


def orphans(stage: str, shape: Shape) -> str:
    """Return the question how many rows still lack columns that the target cannot give, and one of their keys."""
    keys = ", ".join(f"c{number}" for number in shape.key_numbers)
    return (
        f"SELECT count(*), min(ROW({keys})::text) FROM {stage} s WHERE s.op = '{UPSERT}' AND s.unsent <> '{{}}'"
        f" AND (s.k0 IS NOT NULL OR NOT EXISTS (SELECT FROM {quoted_table(shape.name)} t WHERE {_matches(shape)}))"
    )


def merge(stage: str, shape: Shape, unsent: Collection[int], writable: Collection[str]) -> str:
    """Return the one statement that applies a stage, rows that have moved being filled already."""
    columns = [(number, column.name) for number, column in enumerate(shape.columns) if column.name in writable]
    kept = [(number, name) for number, name in columns if name not in shape.key]
    updates = ", ".join(
        f"{quoted(name)} = CASE WHEN {number} = ANY(s.unsent) THEN t.{quoted(name)} ELSE s.c{number} END"
        if number in unsent
        else f"{quoted(name)} = s.c{number}"
        for number, name in kept
    )
    names, values = _lists(columns)
    return (
        f"MERGE INTO {quoted_table(shape.name)} t USING {stage} s ON {_matches(shape)}"
        f" WHEN MATCHED AND s.op = '{DELETE}' THEN DELETE"
        f" WHEN MATCHED THEN {f'UPDATE SET {updates}' if kept else 'DO NOTHING'}"
        f" WHEN NOT MATCHED AND s.op = '{UPSERT}' THEN INSERT ({names}) OVERRIDING SYSTEM VALUE VALUES ({values})"
    )


def replace(stage: str, shape: Shape, writable: Collection[str]) -> list[str]:
    """Return the statements that delete every row of a filled stage and insert those that are there now."""
    return [
        f"DELETE FROM {quoted_table(shape.name)} t USING {stage} s WHERE {_matches(shape)}",
        insert(stage, shape, writable),
    ]


def insert(stage: str, shape: Shape, writable: Collection[str]) -> str:
    """Return the statement that inserts the rows of a stage which are there now."""
    columns = [(number, column.name) for number, column in enumerate(shape.columns) if column.name in writable]
    names, values = _lists(columns)
    return (
        f"INSERT INTO {quoted_table(shape.name)} ({names}) OVERRIDING SYSTEM VALUE"
        f" SELECT {values} FROM {stage} s WHERE s.op = '{UPSERT}'"
    )


def empty(shape: Shape) -> str:
    """Return the statement that removes all rows. TRUNCATE would, but also for those whose snapshot is older."""
    return f"DELETE FROM {quoted_table(shape.name)}"


def drop_stages(stages: Iterable[str]) -> str:
    """Return the statement that removes stages."""
    return f"DROP TABLE IF EXISTS {', '.join(stages)}"


def _matches(shape: Shape) -> str:
    return " AND ".join(
        f"t.{quoted(name)} = s.c{number}" for name, number in zip(shape.key, shape.key_numbers, strict=True)
    )


def _lists(columns: Sequence[tuple[int, str]]) -> tuple[str, str]:
    return ", ".join(quoted(name) for _, name in columns), ", ".join(f"s.c{number}" for number, _ in columns)
