"""Which column of a row, written under one version of its table, is which column of a DataFrame, and how it is parsed.

Owns the mapping between versions; refuses to know bytes and rows. Sans-IO.

A column is followed by its attribute number where both versions know it, so that a renamed column keeps its values and
one that was dropped and added again under the same name does not have the old one's. Where one of them does not know
it, or the table is another relation, names decide. What a version does not have is null.

Arrow parses rows of several versions at once when they agree about every column that is wanted; otherwise they are told
apart by `source.schema_version`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from walstream.spark.types import ColumnType, TableVersion, Wire
from walstream.spark.values import Converter, converter


class Reading(NamedTuple):
    """How Arrow parses a column's JSON, and what is then done to have its type."""

    parse: pa.DataType
    finish: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Source:
    """Where the values of one wanted column come from."""

    target: pa.Field
    json_name: str
    written: tuple[Wire, bool]
    reading: Reading | None
    """None: Arrow cannot, values.py does it one by one."""
    convert: Converter

    @property
    def may_be_odd(self) -> bool:
        """Whether values that Arrow does not take may be frequent: NaN is a value like others."""
        return self.written[0] is Wire.FLOAT and self.reading is not None


@dataclass(frozen=True)
class Layout:
    """What is read of the rows of one version, or of several that agree."""

    table: str
    fields: tuple[pa.Field, ...]
    """The wanted columns."""
    sources: tuple[Source | None, ...]
    """Of each wanted column; None where these versions have no such column."""
    renamed: dict[str, str]
    """Names in the rows by which a column that is wanted under another is known."""


def layouts(versions: Sequence[TableVersion], wanted: TableVersion, fields: Sequence[pa.Field]) -> dict[int, Layout]:
    """Return the layout of each version; where all agree they are one and the same object."""
    single = {version.version: _layout([version], wanted, fields) for version in versions}
    merged = _layout(versions, wanted, fields) if _agree(single.values(), versions) else None
    return {number: merged or layout for number, layout in single.items()}


def counterpart(column: ColumnType, wanted: TableVersion, version: TableVersion) -> ColumnType | None:
    """Return the column of `version` that `column` of `wanted` is; None if it has none."""
    same_relation = version.relation_id == wanted.relation_id
    for known in version.columns:
        if same_relation and known.attnum is not None and column.attnum is not None:
            if known.attnum == column.attnum:
                return known
        elif known.name == column.name:
            return known
    return None


def _layout(versions: Sequence[TableVersion], wanted: TableVersion, fields: Sequence[pa.Field]) -> Layout:
    columns = {column.name: column for column in wanted.columns}
    sources: list[Source | None] = []
    renamed = {}
    for field in fields:
        found = [counterpart(columns[field.name], wanted, version) for version in versions]
        known = next((column for column in found if column is not None), None)
        if known is None:
            sources.append(None)
            continue
        convert = converter(known.written, field.type)
        sources.append(Source(field, known.name, known.written, reading(known.written, field.type), convert))
        if known.name != field.name:
            renamed[known.name] = field.name
    return Layout(wanted.name, tuple(fields), tuple(sources), renamed)


def _agree(found: Iterable[Layout], versions: Sequence[TableVersion]) -> bool:
    """Whether no two versions have something else where a column is looked for."""
    for sources in zip(*(layout.sources for layout in found), strict=True):
        places = {(source.json_name, source.written) for source in sources if source is not None}
        if len(places) > 1:
            return False
        names = {name for name, _ in places}
        for version, source in zip(versions, sources, strict=True):
            if source is None and any(column.name in names for column in version.columns):
                return False
    return True


def reading(written: tuple[Wire, bool], target: pa.DataType) -> Reading | None:
    """Return how Arrow parses a column that is written in this way; None: it does not."""
    wire, is_array = written
    if is_array != pa.types.is_list(target):
        return None
    if not is_array:
        return _scalar(wire, target)
    element = _scalar(wire, target.value_type)
    if element is None:
        return None
    if element.finish is None:
        return Reading(target)
    return Reading(pa.list_(target.value_field.with_type(element.parse)), partial(_each, element.finish, target))


def _scalar(wire: Wire, target: pa.DataType) -> Reading | None:
    is_text = pa.types.is_string(target)
    match wire:
        case Wire.TEXT:
            if pa.types.is_date(target):
                return Reading(pa.timestamp("s"), partial(_cast, target))
            if is_text or pa.types.is_decimal(target) or pa.types.is_timestamp(target):
                return Reading(target)
            if pa.types.is_integer(target):
                return Reading(pa.string(), partial(_cast, target))
        case Wire.NUMBER:
            if is_text:
                return Reading(pa.int64(), partial(_cast, target))
            if pa.types.is_integer(target) or pa.types.is_floating(target) or pa.types.is_decimal(target):
                return Reading(target)
        case Wire.FLOAT:
            if pa.types.is_floating(target):
                return Reading(target)
        case Wire.BOOL:
            if pa.types.is_boolean(target):
                return Reading(target)
            if is_text:
                return Reading(pa.bool_(), partial(_cast, target))
        case Wire.BYTES:
            if is_text:
                return Reading(target)
            if pa.types.is_binary(target):
                return Reading(pa.string(), from_base64)
    return None


def _cast(target: pa.DataType, values: Any) -> Any:
    return pc.cast(values, target)


def _each(finish: Callable[[Any], Any], target: pa.DataType, values: Any) -> Any:
    """Finish the elements of lists."""
    assert values.offset == 0, "a column as it was parsed or filtered, not a slice"
    mask = pc.is_null(values) if values.null_count else None
    return pa.ListArray.from_arrays(values.offsets, finish(values.values), type=target, mask=mask)


# The six bits of each letter of base64; what is none of them would be noticed by its length alone, and is not written.
_BITS = np.zeros(256, dtype=np.uint8)
for _number, _letter in enumerate(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"):
    _BITS[_letter] = _number


def from_base64(values: Any) -> Any:
    """Return the bytes behind strings of base64, all of them at once: every string is whole groups of four letters."""
    filled = pc.fill_null(values, "") if values.null_count else values
    offsets = np.frombuffer(filled.buffers()[1], dtype=np.int32)[filled.offset : filled.offset + len(filled) + 1]
    data = filled.buffers()[2]
    letters = np.frombuffer(data, dtype=np.uint8)[offsets[0] : offsets[-1]] if data is not None else _BITS[:0]
    lengths = np.diff(offsets).astype(np.int64)
    if (lengths % 4).any():
        raise pa.ArrowInvalid("not base64")
    groups = _BITS[letters].reshape(-1, 4).astype(np.uint32)
    joined = groups[:, 0] << 18 | groups[:, 1] << 12 | groups[:, 2] << 6 | groups[:, 3]
    out = np.empty((len(joined), 3), dtype=np.uint8)
    out[:, 0], out[:, 1], out[:, 2] = joined >> 16, joined >> 8, joined
    # Padding stands at the end of a string that is not empty: the bytes that it made are left out.
    ends = (offsets[1:] - offsets[0])[lengths > 0].astype(np.int64)
    has_one, has_two = letters[ends - 1] == ord("="), letters[ends - 2] == ord("=")
    keep = np.ones(out.size, dtype=bool)
    keep[ends[has_one] // 4 * 3 - 1] = False
    keep[ends[has_two] // 4 * 3 - 2] = False
    sizes = lengths // 4 * 3
    sizes[lengths > 0] -= has_one.astype(np.int64) + has_two
    found = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    buffers = [None, pa.py_buffer(found), pa.py_buffer(out.reshape(-1)[keep])]
    decoded = pa.Array.from_buffers(pa.binary(), len(filled), buffers)
    if values.null_count:
        decoded = pc.if_else(pc.is_valid(values), decoded, pa.scalar(None, pa.binary()))
    return decoded
