"""What a record's headers say of it, as fields of its entry: tenant, operation, and where it stands in PostgreSQL.

Owns how headers become fields. The rows of a transaction have the same headers but for the sequence number, which is
the last one: so what all others come to is found once. Headers that say nothing of the kind, or that hold what
cannot be such a thing, go along as they are; those of applications, which may differ in every record, are no part of
what is kept. Sans-IO.

A tenant is who a header `tenant` names, once and in UTF-8. A record that names two different ones belongs to nobody: it
is for whoever may see everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from walstream.capture.provenance import DELETE_OP, INSERT_OP, MESSAGE_OP, READ_OP, TRUNCATE_OP, UPDATE_OP
from walstream.feed.reading import wire
from walstream.feed.reading.frames import key_prefix
from walstream.positions import LSN_MAX

Header: TypeAlias = tuple[str, bytes | None]

KEPT_MAX: Final = 4_096
"""Contexts kept for one partition: tenants that take turns must not cost a parse each time."""

_OPS: Final[dict[bytes | None, bytes]] = {
    INSERT_OP.encode(): b"",
    UPDATE_OP.encode(): b"",
    READ_OP.encode(): b"",
    MESSAGE_OP.encode(): b"",
    DELETE_OP.encode(): wire.OP_DELETE,
    TRUNCATE_OP.encode(): wire.OP_TRUNCATE,
}
_DIGITS_MAX: Final = 20
_TENANT_BYTES_MAX: Final = 1024


class Context(NamedTuple):
    """The fields that records with the same headers have in common."""

    fields: bytes
    """Of a record with a value. Ends with the tag of the offset."""
    fields_of_null: bytes
    """Of a record without."""
    tenant: bytes
    is_timed: bool
    """Whether the time of the commit is among the fields."""
    is_plain: bool
    """Whether all headers became fields: none goes along."""


class Contexts:
    """The contexts of one partition."""

    def __init__(self, cluster: str, topic: str, partition: int) -> None:
        self._cluster = cluster.encode()
        self._topic = topic
        self._place = wire.text(10, topic.encode()) + wire.number(11, partition)
        self._kept: dict[tuple[Header, ...], Context] = {}
        self._common: list[Header] | None = None
        """What the last captured row and the ones before it have in common, and what that comes to."""
        self._common_is: tuple[Context, bytes] | None = None
        self.plain = self._make(())
        """That of a record without headers."""

    def of(self, headers: Sequence[Header]) -> tuple[Context, bytes]:
        """Return what these headers come to, and the fields of those that are not part of that."""
        key = tuple(headers)
        found = self._kept.get(key)
        if found is not None:
            return found, b""
        others = [header for header in key if header[0] not in _NAMES]
        if others:
            context, _ = self.of([header for header in key if header[0] in _NAMES])
            # Otherwise some of those go along as well, and all that do keep their order.
            if context.is_plain:
                return context, b"".join([wire.header(name.encode(), value or b"") for name, value in others])
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        found = self._kept[key] = self._make(key)
        return found, b""

    def of_row(self, headers: list[Header]) -> tuple[Context, bytes] | None:
        """Return the same for a row of a transaction, all but its sequence number; None when it is not such a row.

        Transactions are small and many, and each comes once: none is kept, but what all of them have in common is.
        """
        if len(headers) < 3:
            return None
        (first, lsn), (second, time), (third, txid) = headers[-3:]
        if first != "commit_lsn" or second != "commit_time_ms" or third != "txid" or not lsn or not time or not txid:
            return None
        if not (lsn + time + txid).isdigit() or max(len(lsn), len(time), len(txid)) >= _DIGITS_MAX:
            return None
        common = headers[:-3]
        if common != self._common:
            if not _NUMBERS.isdisjoint([name for name, _ in common]):
                return None
            self._common, self._common_is = common, self.of(common)
        assert self._common_is is not None
        (fields, fields_of_null, tenant, _, is_plain), others = self._common_is
        numbers = _transaction(int(lsn), int(time), int(txid))
        return Context(numbers + fields, numbers + fields_of_null, tenant, True, is_plain), others

    def _make(self, headers: tuple[Header, ...]) -> Context:
        said, others = _sort(headers)
        tenant, op = said.get("tenant", b""), said.get("op")
        numbers = {name: int(said[name]) for name in _NUMBERS if name in said}
        fields = b"".join(
            (
                _transaction(numbers.get("commit_lsn", 0), numbers.get("commit_time_ms", 0), numbers.get("txid", 0)),
                wire.text(3, tenant),
                wire.text(4, key_prefix(self._cluster, tenant, self._topic)),
                self._place,
                wire.number(14, numbers.get("seq", 0)),
                *(wire.header(name.encode(), value or b"") for name, value in others),
            )
        )
        with_value = _OPS[op] if op is not None else b""
        without = _OPS[op] if op is not None else wire.OP_DELETE
        return Context(
            fields + with_value + wire.OFFSET,
            fields + without + wire.OFFSET,
            tenant,
            is_timed="commit_time_ms" in numbers,
            is_plain=not others,
        )


_NUMBERS: Final = frozenset(("commit_lsn", "commit_time_ms", "seq", "txid"))
_NAMES: Final = _NUMBERS.union(("tenant", "op"))


def _transaction(commit_lsn: int, commit_time_ms: int, txid: int) -> bytes:
    """Write the fields of a transaction."""
    # A row's own LSN orders nothing: a change goes by that of its transaction in PostgreSQL, too.
    lsn = wire.varint(commit_lsn)
    if commit_lsn and commit_time_ms and txid:
        return b"\x68%b\x80\x01%b\x10%b\x78%b" % (lsn, lsn, wire.varint(commit_time_ms), wire.varint(txid))
    lsns = b"\x68%b\x80\x01%b" % (lsn, lsn) if commit_lsn else b""
    return lsns + wire.number(2, commit_time_ms) + wire.number(15, txid)


def is_number(value: bytes | None) -> bool:
    """Tell whether a header holds a number of 64 bits."""
    return value is not None and value.isdigit() and len(value) <= _DIGITS_MAX and int(value) <= LSN_MAX


def _sort(headers: Sequence[Header]) -> tuple[dict[str, bytes], list[Header]]:
    """Part the headers that say what the entry has fields for, each the first of its name, from the others."""
    said: dict[str, bytes] = {}
    others: list[Header] = []
    tenants = {value for name, value in headers if name == "tenant"}
    for name, value in headers:
        if value is not None and name not in said and _can_be(name, value, tenants):
            said[name] = value
        elif not (name == "tenant" and "tenant" in said):
            others.append((name, value))
    return said, others


def _can_be(name: str, value: bytes, tenants: set[bytes | None]) -> bool:
    if name == "tenant":
        return len(tenants) == 1 and 0 < len(value) <= _TENANT_BYTES_MAX and _is_text(value)
    if name == "op":
        return value in _OPS
    return name in _NUMBERS and is_number(value)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
