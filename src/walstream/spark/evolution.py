"""How a table follows the schema of its source: columns added, dropped, renamed and widened.

Owns the comparison of two schemas and which values may become which; refuses to know who writes. It compares what the
table has with what the newest version of its source has, not two versions of the source: so it does not matter how many
versions lie between, and comparing again after the change finds nothing to do. Sans-IO.

- Two columns are the same when they have the same identity (relation and attribute number), or, where one of them does
  not know its identity, the same name. A column that was dropped and added again under its name is another one.
- A rename, then, is a fact or it does not happen: without identities it is a drop and an add, as PostgreSQL's own
  replication stream has it.
- Added columns change the metadata of a table alone, everything else is a rewrite of its rows. A dropped column's
  values must go, because a later column of its name would otherwise show them.
- A type may become one that holds every value of it exactly, or text, when the text is what the log would hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyspark.sql import types as t

from walstream.errors import SchemaIncompatible, TableUnfit
from walstream.spark.columns import META, Mode, identity, own_fields, quoted

_INTEGER_DIGITS: Final = {"smallint": 5, "int": 10, "bigint": 19}
_EXACT_IN_DOUBLE: Final = ("smallint", "int", "float")

# PostgreSQL writes as many digits of a second as are not zero. The session's zone is UTC.
_MOMENT: Final = "regexp_replace(date_format({}, 'yyyy-MM-dd\\'T\\'HH:mm:ss.SSSSSS'), '[.]?0+$', '')"
_TEXTS: Final = {
    **dict.fromkeys(("smallint", "int", "bigint", "boolean", "date"), "CAST({} AS STRING)"),
    "binary": "base64({})",
    "timestamp_ntz": _MOMENT,
    "timestamp": f"concat({_MOMENT}, 'Z')",
}
"""What makes of a value the text that the log has for it."""


@dataclass(frozen=True, slots=True)
class Evolution:
    """What has to happen to a table; `values` has, for each column that it shall have, the SQL that makes it."""

    added: tuple[t.StructField, ...] = ()
    dropped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    widened: tuple[tuple[str, str, str], ...] = ()
    """Column, type before, type now."""
    values: tuple[tuple[str, str], ...] = ()

    @property
    def is_rewrite(self) -> bool:
        """Whether rows have to be written again."""
        return bool(self.dropped or self.renamed or self.widened)

    def __bool__(self) -> bool:
        return bool(self.added) or self.is_rewrite

    def __str__(self) -> str:
        parts = [
            *(f"added {field.name}" for field in self.added),
            *(f"dropped {name}" for name in self.dropped),
            *(f"renamed {old} to {new}" for old, new in self.renamed),
            *(f"widened {name} from {old} to {new}" for name, old, new in self.widened),
        ]
        return ", ".join(parts)


def compare(table: str, mode: Mode, current: t.StructType, wanted: t.StructType) -> Evolution:
    """Return what makes a table of one schema into a table of another. Raises SchemaIncompatible, TableUnfit."""
    missing = {field.name for field in META[mode]} - set(current.names)
    if missing:
        raise TableUnfit(
            f"The folder of {table} holds a table that was not written in mode {mode}: "
            f"it lacks {', '.join(sorted(missing))}.",
            "Give the table the mode it had, or remove its folder and take a new snapshot of it.",
        )
    found, remaining = _pairs(own_fields(current, mode), own_fields(wanted, mode))
    added: list[t.StructField] = []
    renamed: list[tuple[str, str]] = []
    widened: list[tuple[str, str, str]] = []
    values: list[tuple[str, str]] = []
    for field in own_fields(wanted, mode):
        old = found.get(field.name)
        if old is None:
            added.append(field)
            values.append((field.name, f"CAST(NULL AS {field.dataType.simpleString()})"))
            continue
        if old.name != field.name:
            renamed.append((old.name, field.name))
        if old.dataType != field.dataType:
            widened.append((field.name, old.dataType.simpleString(), field.dataType.simpleString()))
        values.append((field.name, _converted(table, old, field)))
    values += [(field.name, quoted(field.name)) for field in META[mode]]
    return Evolution(tuple(added), tuple(remaining), tuple(renamed), tuple(widened), tuple(values))


def _pairs(
    current: list[t.StructField], wanted: list[t.StructField]
) -> tuple[dict[str, t.StructField], dict[str, t.StructField]]:
    """Return which column of the table each one of the source is, and the columns that are none of them."""
    remaining = {field.name: field for field in current}
    by_identity = {known: field for field in current if (known := identity(field)) is not None}
    found: dict[str, t.StructField] = {}
    for field in wanted:
        known = identity(field)
        if known is not None and known in by_identity:
            found[field.name] = remaining.pop(by_identity[known].name)
    for field in wanted:
        same = remaining.get(field.name)
        if field.name not in found and same is not None and not _contradicts(identity(same), identity(field)):
            found[field.name] = remaining.pop(field.name)
    return found, remaining


def _contradicts(one: str | None, other: str | None) -> bool:
    """Whether two identities are those of two columns of one relation; of two relations nothing is known."""
    if one is None or other is None:
        return False
    return one != other and one.split(".")[0] == other.split(".")[0]


def _converted(table: str, old: t.StructField, new: t.StructField) -> str:
    """Return the SQL that makes a value of the new type of one of the old. Raises SchemaIncompatible."""
    written = conversion(old.dataType, new.dataType)
    if written is None:
        raise SchemaIncompatible(
            f"The column {new.name} of {table} was {old.dataType.simpleString()} and is now "
            f"{new.dataType.simpleString()}: the values that the table has cannot be converted without a loss.",
            "Take a new snapshot of the table, which replaces it, or name the column in `strings` of its settings.",
        )
    return written.replace("{}", quoted(old.name))


def conversion(old: t.DataType, new: t.DataType) -> str | None:
    """Return the SQL, with `{}` for the value, that keeps every value of a type exactly; None if nothing does."""
    if old == new:
        return "{}"
    before, after = old.simpleString(), new.simpleString()
    if isinstance(new, t.StringType):
        return "CAST({} AS STRING)" if isinstance(old, t.DecimalType) else _TEXTS.get(before)
    if isinstance(old, t.ArrayType) and isinstance(new, t.ArrayType):
        inner = conversion(old.elementType, new.elementType)
        return f"CAST({{}} AS {after})" if inner is not None and inner.startswith("CAST") else None
    return f"CAST({{}} AS {after})" if _is_wider(old, new) else None


def _is_wider(old: t.DataType, new: t.DataType) -> bool:
    before, after = old.simpleString(), new.simpleString()
    if isinstance(new, t.DecimalType):
        if isinstance(old, t.DecimalType):
            return new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale
        return before in _INTEGER_DIGITS and new.precision - new.scale >= _INTEGER_DIGITS[before]
    if after == "double":
        return before in _EXACT_IN_DOUBLE
    if after == "timestamp_ntz":
        return before == "date"
    return _INTEGER_DIGITS.get(before, 99) < _INTEGER_DIGITS.get(after, 0)
