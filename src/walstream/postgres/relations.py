"""The tables whose rows arrive: their columns, their key, and which version of them a row was written under.

Owns the versions: a relation gets a new one exactly when something about it has changed, and the same content always
has the same number, across restarts too, because what `<prefix>.schema` holds is loaded before the first message.
Numbers count from 1 per table name. Refuses to know where messages and facts come from. Sans-IO.

A Relation message is true for the moment of the WAL it stands in. Catalogue facts are read later and may already be
another table's, so to speak: they are believed only when each column of the message is among them, with the same type,
in the same order. From them come attribute numbers (what proves a rename) and the primary key of a table whose replica
identity is FULL or NOTHING. Without them a relation takes the known version that agrees with all that is known; a new
version still has the numbers that its columns must have had (`_numbered`), and the primary key that was there before
and is there now (`_keyed`).

The key of a row, `key_columns`, is in the order of the columns: the replica identity's columns where that is an index
(the primary key by default), the primary key where it is FULL or NOTHING, empty when there is none or when a column of
it is not sent: a part of a key would give different rows the same one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

from walstream.errors import DecodeError
from walstream.postgres.messages import Relation
from walstream.postgres.types import Kind, TypeInfo, Types

IDENTITY_NAMES: Final = {"d": "default", "n": "nothing", "f": "full", "i": "index"}
_IDENTITY_LETTERS: Final = {name: letter for letter, name in IDENTITY_NAMES.items()}


class ColumnFacts(NamedTuple):
    """A column as pg_attribute has it; `generated` is empty, `s` (stored) or `v` (virtual)."""

    attnum: int
    name: str
    type_oid: int
    type_modifier: int
    type_name: str
    not_null: bool
    generated: str


class RelationFacts(NamedTuple):
    """A table as the catalogue has it now. `kind` is `r` or `p`, the names of key columns are in column order."""

    id: int
    schema: str
    table: str
    kind: str
    replica_identity: str
    columns: tuple[ColumnFacts, ...]
    primary_key: tuple[str, ...]
    identity_key: tuple[str, ...]
    partition_root: tuple[str, str] | None


class Column(NamedTuple):
    """A column of one version; what only the catalogue knows is None where it could not be believed."""

    name: str
    type_oid: int
    type_modifier: int
    is_key: bool
    attnum: int | None = None
    type_name: str | None = None
    not_null: bool | None = None
    generated: bool | None = None


class RelationInfo(NamedTuple):
    """One version of a table; `replica_identity` is one of d n f i, `key_columns` are names."""

    id: int
    schema: str
    table: str
    replica_identity: str
    columns: tuple[Column, ...]
    key_columns: tuple[str, ...]
    version: int

    def to_json(self, types: Types) -> bytes:
        """Write the form that `<prefix>.schema` keeps: what a reader needs to give each value its type."""
        return json.dumps(
            {
                "schema": self.schema,
                "table": self.table,
                "version": self.version,
                "relation_id": self.id,
                "replica_identity": IDENTITY_NAMES[self.replica_identity],
                "key": self.key_columns,
                "columns": [_column_to_json(column, types.resolve(column.type_oid)) for column in self.columns],
            },
            ensure_ascii=False,
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RelationInfo:
        """Read what `to_json` wrote. Raises DecodeError."""
        try:
            found = json.loads(data)
            key = tuple(map(str, found["key"]))
            return cls(
                id=int(found["relation_id"]),
                schema=str(found["schema"]),
                table=str(found["table"]),
                replica_identity=_IDENTITY_LETTERS[found["replica_identity"]],
                columns=tuple(_column_from_json(column, key) for column in found["columns"]),
                key_columns=key,
                version=int(found["version"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"A record of the schema topic is not what walstream writes ({type(error).__name__}: {error})."
            raise DecodeError(message, data=data) from None


class Relations:
    """The versions of every table, and which of them is in force now for each relation id."""

    def __init__(self, known: Iterable[RelationInfo] = ()) -> None:
        """Take the versions that earlier generations have written, in any order."""
        self._versions: dict[tuple[str, str], list[RelationInfo]] = {}
        self._current: dict[int, RelationInfo] = {}
        for info in sorted(known, key=lambda info: info.version):
            self._versions.setdefault((info.schema, info.table), []).append(info)

    def update(self, message: Relation, facts: RelationFacts | None = None) -> RelationInfo:
        """Take a Relation message, with what the catalogue says of the table, and return the version now in force."""
        believed = facts if facts is not None and _agrees(message, facts) else None
        versions = self._versions.setdefault((message.schema, message.table), [])
        candidate = _describe(message, believed, version=versions[-1].version + 1 if versions else 1)
        if unsent_key(message, facts):
            candidate = _with_key(candidate, frozenset())
        info = next((known for known in reversed(versions) if _same(known, candidate, believed is not None)), None)
        if info is None:
            info = candidate if believed else _completed(candidate, versions, facts)
            versions.append(info)
        self._current[message.id] = info
        return info

    def __getitem__(self, relation_id: int) -> RelationInfo:
        """Return the version in force. Raises DecodeError for a relation that PostgreSQL never described."""
        try:
            return self._current[relation_id]
        except KeyError:
            raise DecodeError(f"A row of relation {relation_id} came before its description.") from None

    def __contains__(self, relation_id: int) -> bool:
        return relation_id in self._current

    def __iter__(self) -> Iterator[RelationInfo]:
        """Yield every version known, table by table, oldest first."""
        for versions in self._versions.values():
            yield from versions


def unsent_key(message: Relation, facts: RelationFacts | None) -> tuple[str, ...]:
    """Return the columns of the replica identity's index that PostgreSQL does not send.

    Before version 18 it sends no generated columns; a publication of inserts alone may leave out any.
    """
    if message.replica_identity not in "di" or facts is None:
        return ()
    if (facts.id, facts.replica_identity) != (message.id, message.replica_identity):
        return ()
    sent = {column.name for column in message.columns}
    # When the catalogue is ahead, a column that is missing may have been added since.
    doubtful = set() if _agrees(message, facts) else {column.name for column in facts.columns if not column.generated}
    return tuple(name for name in facts.identity_key if name not in sent | doubtful)


def _agrees(message: Relation, facts: RelationFacts) -> bool:
    """Whether the catalogue still shows the table that the message describes; a publication may leave columns out."""
    if (message.id, message.schema, message.table) != (facts.id, facts.schema, facts.table):
        return False
    remaining = iter(facts.columns)
    return all(
        any((fact.name, fact.type_oid, fact.type_modifier) == column[:3] for fact in remaining)
        for column in message.columns
    )


def _describe(message: Relation, facts: RelationFacts | None, version: int) -> RelationInfo:
    if message.replica_identity in "di":
        key = {column.name for column in message.columns if column.is_key}
    else:
        names = {column.name for column in message.columns}
        key = set(facts.primary_key) if facts is not None and names.issuperset(facts.primary_key) else set()
    by_name = {fact.name: fact for fact in facts.columns} if facts is not None else {}
    columns = []
    for name, type_oid, type_modifier, _ in message.columns:
        column = Column(name, type_oid, type_modifier, name in key)
        if fact := by_name.get(name):
            column = column._replace(
                attnum=fact.attnum,
                type_name=fact.type_name,
                not_null=fact.not_null,
                generated=fact.generated != "",
            )
        columns.append(column)
    return RelationInfo(
        message.id,
        message.schema,
        message.table,
        message.replica_identity,
        tuple(columns),
        tuple(column.name for column in columns if column.is_key),
        version,
    )


def _with_key(info: RelationInfo, positions: frozenset[int]) -> RelationInfo:
    columns = tuple(column._replace(is_key=at in positions) for at, column in enumerate(info.columns))
    return info._replace(columns=columns, key_columns=tuple(column.name for column in columns if column.is_key))


def _completed(info: RelationInfo, earlier: Sequence[RelationInfo], facts: RelationFacts | None) -> RelationInfo:
    """Add to a version that the catalogue has outrun what is certain all the same."""
    if facts is not None:
        info = _numbered(info, earlier, facts)
    return info if info.replica_identity in "di" else _keyed(info, earlier, facts)


def _keyed(info: RelationInfo, earlier: Sequence[RelationInfo], facts: RelationFacts | None) -> RelationInfo:
    """Give a version with the replica identity FULL or NOTHING the primary key that it must have had.

    A key that was there earlier and is there now was there in between. Where only one of the two can be asked, that one
    is believed; where they differ, the key is unknown, and the version has none.
    """
    before = next((known for known in reversed(earlier) if known.id == info.id and _tells_primary_key(known)), None)
    keys: list[frozenset[int] | None] = []
    if before is not None:
        keys.append(_located(info, [column for column in before.columns if column.is_key]))
    if facts is not None and facts.id == info.id:
        keys.append(_located(info, [column for column in facts.columns if column.name in facts.primary_key]))
    if not keys or keys[0] is None or any(key != keys[0] for key in keys):
        return info
    return _with_key(info, keys[0])


def _tells_primary_key(known: RelationInfo) -> bool:
    """Whether a version's key is the primary key, or there was none; under another index it is that one's."""
    if known.replica_identity in "fn":
        return known.key_columns != () or any(column.type_name is not None for column in known.columns)
    return known.replica_identity == "d" and known.key_columns != ()


def _located(info: RelationInfo, wanted: Iterable[Column | ColumnFacts]) -> frozenset[int] | None:
    """Return the positions of columns in a version, by number or else by name and type; None: one is not there."""
    found = set()
    for column in wanted:
        for at, own in enumerate(info.columns):
            is_numbered = own.attnum is not None and column.attnum is not None
            if own.attnum == column.attnum if is_numbered else own[:2] == (column.name, column.type_oid):
                found.add(at)
                break
        else:
            return None
    return frozenset(found)


def _numbered(info: RelationInfo, earlier: Sequence[RelationInfo], facts: RelationFacts) -> RelationInfo:
    """Give the columns of a version that the catalogue has outrun the attribute numbers that are certain all the same.

    PostgreSQL gives numbers in order and none twice, and a message has its columns in that order. A column that was
    there earlier and is there now was there in between: so from the first column on, up to one that has gone or came
    into view since, they are counted off. Only a publication that had a list of columns just then would be in the way:
    where a column's name is neither the earlier nor the later one, nothing is certain.
    """
    before = next((known for known in reversed(earlier) if known.id == info.id == facts.id), None)
    if before is None:
        return info
    pairs = zip(before.columns, sorted(facts.columns), strict=False)
    stayed = list(takewhile(lambda pair: pair[0].attnum == pair[1].attnum, pairs))
    if len(stayed) > len(info.columns):
        return info
    columns = list(info.columns)
    for at, (was, fact) in enumerate(stayed):
        if columns[at].name not in (was.name, fact.name):
            return info
        columns[at] = columns[at]._replace(attnum=fact.attnum)
    return info._replace(columns=tuple(columns))


def _same(known: RelationInfo, new: RelationInfo, facts_believed: bool) -> bool:
    """Whether a known version is what the new description says, as far as that knows."""
    if known[:4] != new[:4] or len(known.columns) != len(new.columns):
        return False
    if facts_believed:
        return known.columns == new.columns
    compared = 4 if new.replica_identity in "di" else 3
    return all(a[:compared] == b[:compared] for a, b in zip(known.columns, new.columns, strict=True))


def _column_to_json(column: Column, type_info: TypeInfo) -> dict[str, Any]:
    written: dict[str, Any] = {
        "name": column.name,
        "type": column.type_name or type_info.name,
        "type_oid": column.type_oid,
        "type_modifier": column.type_modifier,
        "base": type_info.base_name,
        "base_oid": type_info.base_oid,
        "base_modifier": type_info.base_modifier if column.type_modifier == -1 else column.type_modifier,
        "kind": type_info.kind.value,
        "attnum": column.attnum,
        "not_null": column.not_null,
        "generated": column.generated,
    }
    if type_info.kind is Kind.ARRAY:
        assert type_info.element is not None, "an array has an element"
        written["element"] = type_info.element.base_name
        written["element_kind"] = type_info.element.kind.value
    return written


def _column_from_json(found: dict[str, Any], key: tuple[str, ...]) -> Column:
    return Column(
        name=str(found["name"]),
        type_oid=int(found["type_oid"]),
        type_modifier=int(found["type_modifier"]),
        is_key=found["name"] in key,
        attnum=found["attnum"],
        type_name=found["type"] if found["not_null"] is not None else None,
        not_null=found["not_null"],
        generated=found["generated"],
    )
