"""The types of a table's columns in Spark, from what `<prefix>.schema` says of them.

Owns the mapping of PostgreSQL's types to Spark's and the columns that every change has beside the table's own; refuses
to know values (decoding.py, values.py) and where versions come from (versions.py). Sans-IO.

    smallint, integer, bigint, oid      short, int, long, long
    real, double precision              float, double
    numeric(p, s) with p up to 38       decimal(p, s), exact          other numerics      string
    boolean                             boolean
    timestamptz, timestamp, date        timestamp, timestamp_ntz, date
    bytea                               binary
    arrays of these                     array of the element's type
    everything else                     string: json, uuid, interval, time, enum, range, composite, money, inet, …

A column that is named in `strings` is a string whatever its type is: PostgreSQL's text of it, or the JSON of an array.
Every column may be null, because a delete has nothing but its key and an update may leave columns out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from pyspark.sql import types as t

from walstream.errors import DecodeError, UsageError
from walstream.postgres.types import NO_MODIFIER, Kind

DECIMAL_DIGITS_MAX: Final = 38
"""What a decimal of Spark, and of Arrow's decimal128, can hold."""

ALL: Final = "*"
"""In place of the names of columns: every one."""

_MODIFIER_OFFSET: Final = 4
"""PostgreSQL adds the size of a header to the modifier of numeric."""


class Wire(Enum):
    """How the JSON of a value is written, as far as a parser has to know."""

    NUMBER = "number"
    FLOAT = "float"
    """A number, or one of the strings NaN, Infinity and -Infinity."""
    BOOL = "bool"
    TEXT = "text"
    BYTES = "bytes"
    """A string of base64."""


_WIRES: Final = {
    Kind.NUMBER: Wire.NUMBER,
    Kind.FLOAT: Wire.FLOAT,
    Kind.BOOL: Wire.BOOL,
    Kind.BYTEA: Wire.BYTES,
}

_BY_NAME: Final[Mapping[str, t.DataType]] = {
    "int2": t.ShortType(),
    "int4": t.IntegerType(),
    "int8": t.LongType(),
    "oid": t.LongType(),
    "float4": t.FloatType(),
    "float8": t.DoubleType(),
    "bool": t.BooleanType(),
    "timestamp": t.TimestampNTZType(),
    "timestamptz": t.TimestampType(),
    "date": t.DateType(),
    "bytea": t.BinaryType(),
}

META: Final = t.StructType(
    [
        t.StructField("_op", t.StringType()),
        t.StructField("_source_epoch", t.IntegerType()),
        t.StructField("_commit_lsn", t.LongType()),
        t.StructField("_seq", t.LongType()),
        t.StructField("_ts", t.TimestampType()),
        t.StructField("_txid", t.LongType()),
        t.StructField("_snapshot", t.StringType()),
        t.StructField("_unchanged", t.ArrayType(t.StringType())),
        t.StructField("_schema_version", t.IntegerType()),
        t.StructField("_old_key", t.StringType()),
    ]
)
"""What every change has beside its table's columns."""

POINTS: Final = t.StructType(
    [
        t.StructField("offset", t.LongType()),
        t.StructField("gen", t.LongType()),
        t.StructField("source_epoch", t.IntegerType()),
        t.StructField("end_lsn", t.LongType()),
        t.StructField("end_lsn_text", t.StringType()),
        t.StructField("last_xid", t.LongType()),
        t.StructField("last_commit_time", t.TimestampType()),
        t.StructField("rows", t.LongType()),
        t.StructField("bytes", t.LongType()),
        t.StructField("snapshot_schema", t.StringType()),
        t.StructField("snapshot_table", t.StringType()),
        t.StructField("snapshot_id", t.StringType()),
        t.StructField("snapshot_lsn", t.LongType()),
        t.StructField("tables", t.MapType(t.StringType(), t.LongType())),
    ]
)
"""A commit point."""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column of one version of a table."""

    name: str
    spark: t.DataType
    wire: Wire
    """Of its elements, when it is an array."""
    is_array: bool = False
    is_key: bool = False
    attnum: int | None = None
    """What proves a rename; None where the catalogue could not be asked in time."""
    type_name: str = ""
    """PostgreSQL's words for the type."""

    @property
    def written(self) -> tuple[Wire, bool]:
        """How values are written: two columns that agree in this are parsed in the same way."""
        return self.wire, self.is_array


@dataclass(frozen=True, slots=True)
class TableVersion:
    """One version of a table, as a record of `<prefix>.schema` has it."""

    schema: str
    table: str
    version: int
    gen: int
    key: tuple[str, ...]
    columns: tuple[ColumnType, ...]
    replica_identity: str = "default"
    relation_id: int = 0

    @classmethod
    def from_json(cls, data: bytes) -> TableVersion:
        """Read a record. Raises DecodeError."""
        try:
            found = json.loads(data)
            key = tuple(map(str, found["key"]))
            return cls(
                schema=str(found["schema"]),
                table=str(found["table"]),
                version=int(found["version"]),
                gen=int(found.get("gen", 0)),
                key=key,
                columns=tuple(column_type(column, column["name"] in key) for column in found["columns"]),
                replica_identity=str(found["replica_identity"]),
                relation_id=int(found["relation_id"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"A record of the schema topic is not what walstream writes ({type(error).__name__}: {error})."
            raise DecodeError(message, data=data) from None

    @property
    def name(self) -> str:
        """The table as options name it."""
        return table_name(self.schema, self.table)

    def struct(self, strings: Collection[str] = (), columns: Iterable[str] | None = None) -> t.StructType:
        """Return the table's own columns, those asked for in their order, typed for Spark. Raises UsageError."""
        known = {column.name: column for column in self.columns}
        wanted = list(known) if columns is None else list(columns)
        if ALL in strings and ALL not in known:
            strings = known
        if unknown := [name for name in (*wanted, *strings) if name not in known]:
            raise UsageError(
                f"{self.name} has no column {', '.join(map(repr, unknown))} in its version {self.version}.",
                f"It has: {', '.join(known)}.",
            )
        return t.StructType(
            [t.StructField(name, t.StringType() if name in strings else known[name].spark) for name in wanted]
        )

    def changes(self, strings: Collection[str] = (), columns: Iterable[str] | None = None) -> t.StructType:
        """Return the columns of its changes: its own, then those that every change has. Raises UsageError."""
        own = self.struct(strings, columns)
        if taken := set(own.names) & set(META.names):
            raise UsageError(
                f"{self.name} has a column {', '.join(sorted(taken))}, which every change has with another meaning.",
                "Leave it out: name the others in the option columns.",
            )
        return t.StructType([*own.fields, *META.fields])


def table_name(schema: str, table: str) -> str:
    """Return how options name a table: `schema.table`, the schema in double quotes when it has a dot or a quote."""
    quoted = '"' + schema.replace('"', '""') + '"' if "." in schema or '"' in schema else schema
    return f"{quoted}.{table}"


def column_type(found: Mapping[str, Any], is_key: bool = False) -> ColumnType:
    """Return a column of a record of the schema topic. Raises KeyError, ValueError."""
    kind, name = Kind(found["kind"]), str(found["name"])
    is_array = kind is Kind.ARRAY
    modifier = int(found["base_modifier"])
    if is_array:
        kind, base = Kind(found["element_kind"]), str(found["element"])
    else:
        base = str(found["base"])
    if kind is Kind.ARRAY:
        # An array of a domain over arrays: nothing that Spark has a type for.
        spark: t.DataType = t.StringType()
    else:
        spark = scalar_type(base, modifier)
        spark = t.ArrayType(spark) if is_array else spark
    return ColumnType(
        name=name,
        spark=spark,
        wire=_WIRES.get(kind, Wire.TEXT),
        is_array=is_array,
        is_key=is_key,
        attnum=found.get("attnum"),
        type_name=str(found.get("type", base)),
    )


def scalar_type(base: str, modifier: int = NO_MODIFIER) -> t.DataType:
    """Return the Spark type of a type of PostgreSQL that is no array, by the name that pg_type gives it."""
    if base == "numeric":
        return _numeric(modifier)
    return _BY_NAME.get(base, t.StringType())


def _numeric(modifier: int) -> t.DataType:
    if modifier < _MODIFIER_OFFSET:
        return t.StringType()
    packed = modifier - _MODIFIER_OFFSET
    precision, scale = packed >> 16 & 0xFFFF, (packed & 0x7FF ^ 0x400) - 0x400
    # PostgreSQL allows 12300 in numeric(3, -2) and 0.00123 in numeric(3, 5).
    digits, scale = max(precision - min(scale, 0), scale), max(scale, 0)
    return t.DecimalType(digits, scale) if digits <= DECIMAL_DIGITS_MAX else t.StringType()
