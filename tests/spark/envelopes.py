"""Envelopes and records of the schema topic made by hand, as capture writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from walstream.spark.types import TableVersion

_KINDS = {
    "int2": "number",
    "int4": "number",
    "int8": "number",
    "oid": "number",
    "float4": "float",
    "float8": "float",
    "bool": "bool",
    "timestamp": "timestamp",
    "timestamptz": "timestamptz",
    "bytea": "bytea",
    "numeric": "plain",
    "date": "plain",
    "uuid": "plain",
}


def column(name: str, base: str, modifier: int = -1, attnum: int | None = None) -> dict[str, Any]:
    """A column; `int4[]` is an array."""
    element = base.removesuffix("[]")
    kind = _KINDS.get(element, "string")
    written: dict[str, Any] = {
        "name": name,
        "type": base,
        "type_oid": 1,
        "type_modifier": modifier,
        "base": base if element == base else f"_{element}",
        "base_oid": 1,
        "base_modifier": modifier,
        "kind": kind if element == base else "array",
        "attnum": attnum,
        "not_null": None,
        "generated": None,
    }
    if element != base:
        written |= {"element": element, "element_kind": kind}
    return written


def numeric(precision: int, scale: int) -> int:
    """The modifier of numeric(precision, scale)."""
    return (precision << 16 | scale & 0x7FF) + 4


def version(
    *columns: dict[str, Any], number: int = 1, key: Sequence[str] = ("id",), gen: int = 0, relation_id: int = 1
) -> TableVersion:
    record = {
        "gen": gen,
        "schema": "public",
        "table": "orders",
        "version": number,
        "relation_id": relation_id,
        "replica_identity": "default",
        "key": list(key),
        "columns": list(columns),
    }
    return TableVersion.from_json(json.dumps(record).encode())


def arrow(wanted: TableVersion, strings: Sequence[str] = ()) -> pa.Schema:
    return to_arrow_schema(wanted.changes(strings), timezone="UTC")


def envelope(
    after: Mapping[str, Any] | None,
    *,
    before: Mapping[str, Any] | None = None,
    op: str = "c",
    seq: int = 1,
    commit_lsn: int = 100,
    gen: int = 0,
    snapshot: str | bool = False,
    number: int = 1,
    unchanged: Sequence[str] = (),
) -> bytes:
    source = {
        "db": "shop",
        "schema": "public",
        "table": "orders",
        "txId": 771 if snapshot is False else None,
        "lsn": commit_lsn,
        "source_epoch": 1,
        "commit_lsn": commit_lsn,
        "seq": seq,
        "gen": gen,
        "ts_ms": 1_769_860_800_123,
        "snapshot": snapshot,
        "schema_version": number,
        "unchanged": list(unchanged),
    }
    value = {"before": before, "after": after, "source": source, "op": op, "ts_ms": 1_769_860_800_125}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
