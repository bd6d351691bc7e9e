"""The columns of a table in the warehouse: the source's own, and those that say where a row comes from.

Owns the schema that a table has in each mode and the rules for names; refuses to know what is in it. A column of the
source carries its identity (relation id and attribute number) as metadata of its field, in the table itself: so a
rename can be proved later from the table alone, whoever wrote it (evolution.py).

    mirror    the columns, _source_epoch, _commit_lsn, _seq: the position of the change that made the row what it is
    history   the columns, _source_epoch, _valid_from_lsn, _valid_from_seq, _valid_to_lsn, _valid_to_seq, _valid_from,
              _valid_to, _op: a row is true from its first position up to, not including, its last; null: it is true now
    append    the columns and everything that is known of the change

Every column may be null, whatever the source says: a delete has only its key, and a column may be dropped and added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql import types as t

from walstream.errors import TableUnfit

Mode: TypeAlias = Literal["mirror", "history", "append"]

IDENTITY: Final = "walstream.column"
"""The metadata of a field that says which column of PostgreSQL it is."""

POSITION: Final = ("_commit_lsn", "_seq")
"""What orders the changes of one source epoch."""

META: Final[Mapping[Mode, tuple[t.StructField, ...]]] = {
    "mirror": (
        t.StructField("_source_epoch", t.IntegerType()),
        t.StructField("_commit_lsn", t.LongType()),
        t.StructField("_seq", t.LongType()),
    ),
    "history": (
        t.StructField("_source_epoch", t.IntegerType()),
        t.StructField("_valid_from_lsn", t.LongType()),
        t.StructField("_valid_from_seq", t.LongType()),
        t.StructField("_valid_to_lsn", t.LongType()),
        t.StructField("_valid_to_seq", t.LongType()),
        t.StructField("_valid_from", t.TimestampType()),
        t.StructField("_valid_to", t.TimestampType()),
        t.StructField("_op", t.StringType()),
    ),
    "append": (
        t.StructField("_op", t.StringType()),
        t.StructField("_source_epoch", t.IntegerType()),
        t.StructField("_commit_lsn", t.LongType()),
        t.StructField("_seq", t.LongType()),
        t.StructField("_ts", t.TimestampType()),
        t.StructField("_txid", t.LongType()),
        t.StructField("_snapshot", t.StringType()),
        t.StructField("_unchanged", t.ArrayType(t.StringType())),
        t.StructField("_old_key", t.StringType()),
    ),
}
"""What a table has beside the source's columns."""

_UNWRITABLE: Final = frozenset(" ,;{}()\n\t=")
"""Delta allows no field with one of these in its name, unless columns are mapped, which not every writer can."""


class TableColumn(NamedTuple):
    """A column of the source; its attribute number is None where the catalogue could not be asked in time."""

    name: str
    type: t.DataType
    attnum: int | None = None


def table_schema(mode: Mode, columns: Iterable[TableColumn], relation_id: int = 0) -> t.StructType:
    """Return the schema of a table in a mode."""
    own = [t.StructField(column.name, column.type, True, _identity(column, relation_id)) for column in columns]
    return t.StructType([*own, *META[mode]])


def _identity(column: TableColumn, relation_id: int) -> dict[str, str]:
    return {} if column.attnum is None else {IDENTITY: f"{relation_id}.{column.attnum}"}


def identity(field: t.StructField) -> str | None:
    """Return which column of PostgreSQL a field is, if that is known."""
    found = field.metadata.get(IDENTITY)
    return None if found is None else str(found)


def own_fields(schema: t.StructType, mode: Mode) -> list[t.StructField]:
    """Return the fields that are columns of the source."""
    meta = {field.name for field in META[mode]}
    return [field for field in schema.fields if field.name not in meta]


def check_names(table: str, mode: Mode, names: Iterable[str]) -> None:
    """See that Delta and Spark can have columns of these names. Raises TableUnfit."""
    names = list(names)
    unwritable = [name for name in names if _UNWRITABLE & set(name)]
    taken = {field.name for field in META[mode]} & {name.lower() for name in names}
    counts = Counter(name.lower() for name in names)
    alike = [name for name in names if counts[name.lower()] > 1]
    if unwritable:
        problem = "has characters in a name that no Delta table can have", unwritable
    elif taken:
        problem = "has columns that every table of the warehouse has with another meaning", sorted(taken)
    elif alike:
        problem = "has columns whose names differ in case alone, which Spark takes for the same", alike
    else:
        return
    raise TableUnfit(
        f"{table} {problem[0]}: {', '.join(map(repr, problem[1]))}.",
        "Rename them in PostgreSQL, or leave them out with a column list of the publication.",
    )


def quoted(name: str, of: str = "") -> str:
    """Write a column as SQL has it; `of` is the alias of its table."""
    written = f"`{name.replace('`', '``')}`"
    return f"{of}.{written}" if of else written


def col(name: str, of: str = "") -> Column:
    """Return a column by its exact name: dots in it are part of it."""
    return f.col(quoted(name, of))


def position(prefix: str = "") -> Column:
    """Return a change's position as one value that can be compared."""
    return f.struct(*(f.col(f"{prefix}{name}").alias(name) for name in POSITION))


def struct_of(names: Iterable[str], of: str = "") -> Column:
    """Return some columns as one value."""
    return f.struct(*(col(name, of).alias(name) for name in names))


def typed(schema: t.StructType) -> list[Column]:
    """Return the columns of a schema with its types and its metadata, to be selected."""
    return [col(field.name).cast(field.dataType).alias(field.name, metadata=field.metadata) for field in schema.fields]
