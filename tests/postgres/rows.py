"""Writes pgoutput messages by hand: what a server would send for columns of any content."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from walstream.postgres.messages import UNCHANGED, RelationColumn, Value


def text(value: str) -> bytes:
    """A name, ended by a NUL."""
    return value.encode() + b"\0"


def columns(values: Sequence[Value]) -> bytes:
    """The columns of one row."""
    parts = [struct.pack(">H", len(values))]
    for value in values:
        if isinstance(value, bytes):
            parts.append(b"t" + struct.pack(">i", len(value)) + value)
        else:
            parts.append(b"u" if value is UNCHANGED else b"n")
    return b"".join(parts)


def row(
    kind: str,
    relation_id: int,
    *,
    xid: int | None = None,
    old_kind: str | None = None,
    old: Sequence[Value] | None = None,
    new: Sequence[Value] | None = None,
) -> bytes:
    """An insert, update or delete."""
    head = kind.encode() + (b"" if xid is None else struct.pack(">I", xid)) + struct.pack(">I", relation_id)
    before = b"" if old is None or old_kind is None else old_kind.encode() + columns(old)
    after = b"" if new is None else b"N" + columns(new)
    return head + before + after


def relation(
    relation_id: int,
    schema: str,
    table: str,
    identity: str,
    described: Sequence[RelationColumn],
    xid: int | None = None,
) -> bytes:
    """The description of a table."""
    head = b"R" + (b"" if xid is None else struct.pack(">I", xid)) + struct.pack(">I", relation_id)
    parts = [head, text(schema), text(table), identity.encode(), struct.pack(">H", len(described))]
    for column in described:
        parts.append(bytes([column.is_key]) + text(column.name))
        parts.append(struct.pack(">Ii", column.type_oid, column.type_modifier))
    return b"".join(parts)
