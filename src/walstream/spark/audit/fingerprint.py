"""What a row, and a set of rows, is reduced to when two sides are compared.

Owns the hash, so that there is one; refuses to know where rows come from. Both sides must have the same columns, of the
same types: whoever compares brings them to that first.

A row's fingerprint is 64 bits of its values (xxHash64) in the order of the columns, with a mark before each that tells
null from a value. Values whose hash in Spark is coarser than the values are (floats know no -0.0 there, arrays forget
their nulls) go in as text, each element with its length before it. A set's fingerprint is the number of its rows and
the sum of theirs, which no order changes and in which a row that is there twice counts twice; as an exact decimal it
cannot overflow below 10^18 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from walstream.spark.columns import col

_NULL: Final = "~"
"""What no length begins with."""


class Fingerprint(NamedTuple):
    """What is left of a set of rows."""

    rows: int
    hash: int


def row_hash(struct: t.StructType, columns: Sequence[str]) -> Column:
    """Return the fingerprint of a row over these columns, which `struct` types."""
    parts: list[Column] = []
    for name in columns:
        value = col(name)
        parts += [value.isNull(), _hashable(value, struct[name].dataType)]
    return f.xxhash64(*parts) if parts else f.lit(0).cast("long")


def fingerprint(rows: DataFrame, columns: Sequence[str]) -> Fingerprint:
    """Reduce rows to their number and the sum of their fingerprints."""
    total = f.sum(row_hash(rows.schema, columns).cast(t.DecimalType(20, 0)))
    found = rows.agg(f.count(f.lit(1)).alias("rows"), total.alias("hash")).collect()[0]
    return Fingerprint(found["rows"], int(found["hash"] or 0))


def _hashable(value: Column, kind: t.DataType) -> Column:
    if isinstance(kind, t.ArrayType):
        element = kind.elementType
        return f.array_join(f.transform(value, lambda one: _framed(_text(one, element))), "")
    if isinstance(kind, t.FloatType | t.DoubleType):
        return value.cast("string")
    return value


def _framed(text: Column) -> Column:
    return f.coalesce(f.concat(f.length(text).cast("string"), f.lit(":"), text), f.lit(_NULL))


def _text(value: Column, kind: t.DataType) -> Column:
    if isinstance(kind, t.BinaryType):
        return f.hex(value)
    if isinstance(kind, t.TimestampType):
        # An instant, whatever zone the session shows it in: the text of one hour in autumn stands for two.
        return f.unix_micros(value).cast("string")
    return value.cast("string")
