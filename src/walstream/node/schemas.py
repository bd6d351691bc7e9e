"""Schemas of Kafka's messages: `schemas.json`, read into plain descriptions that `node/wire.py` compiles.

The file is generated from kio's dataclasses (`make schemas`), and a test compares every schema with kio's: a node does
not import kio, whose dataclasses and their dependencies cost a third of its start. For every message of an offered API
it has the structs, the message itself first; for every struct the fields in the order of the wire as `[name, versions,
type, {"tag": …, "default": …}]`. A type is a format of the module `struct`, `bool`, `uuid`, `string`, `bytes` or a
struct, behind `[]` if it is an array, before `?` if it is nullable; a default that is not written is null, empty or 0.

A schema is read for all versions of one API at once, because a message has attributes for the fields of every version.
"""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

NO_UUID = uuid.UUID(int=0)
FILE = Path(__file__).with_name("schemas.json")

FORMAT_BYTES = {"b": 1, "B": 1, "?": 1, "h": 2, "H": 2, "i": 4, "I": 4, "q": 8, "Q": 8, "d": 8}


class Message:
    """A decoded request or a part of one: attributes by the schema's names."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"No version of this message has a field {name!r}; it has {sorted(self.__dict__)}.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Message({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


class Kind(enum.Enum):
    """How a field that is not a struct lies on the wire."""

    FIXED = enum.auto()
    UUID = enum.auto()
    STRING = enum.auto()
    BYTES = enum.auto()
    STRUCT = enum.auto()


@dataclass(frozen=True, slots=True)
class Field:
    """One field of one version. `bytes_min` is the least that it, or one element of it, can take on the wire."""

    name: str
    kind: Kind
    format: str
    is_array: bool
    is_nullable: bool
    is_flexible: bool
    tag: int
    entity: Entity | None
    default: Any
    bytes_min: int

    @property
    def is_plain(self) -> bool:
        """Say whether the field can share a struct with its neighbours."""
        return self.kind is Kind.FIXED and not self.is_array and self.tag < 0


Run = tuple[tuple[str, ...], str, tuple[Field, ...]]


@dataclass(frozen=True, slots=True)
class Entity:
    """A struct of one version. `defaults` names the fields of all versions; `present` those of this one."""

    name: str
    is_flexible: bool
    header_is_flexible: bool
    fields: tuple[Field, ...]
    defaults: dict[str, Any]
    present: frozenset[str]

    @property
    def tagged(self) -> tuple[Field, ...]:
        """Return the tagged fields in the order in which they are written."""
        return tuple(sorted((field for field in self.fields if field.tag >= 0), key=lambda field: field.tag))

    @property
    def runs(self) -> list[Run]:
        """Group the untagged fields: neighbours of fixed width with one struct layout, the others alone."""
        runs: list[Run] = []
        for field in self.fields:
            if field.tag >= 0:
                continue
            if field.is_plain and runs and runs[-1][1]:
                names, layout, fields = runs[-1]
                runs[-1] = ((*names, field.name), layout + field.format, (*fields, field))
            else:
                runs.append(((field.name,), ">" + field.format if field.is_plain else "", (field,)))
        return runs

    @property
    def bytes_min(self) -> int:
        """Return the least number of bytes the struct can take."""
        own = sum(_least_bytes(field) for field in self.fields if field.tag < 0)
        return own + self.is_flexible


@cache
def schema(api_key: int, direction: Literal["request", "response"]) -> dict[int, Entity]:
    """Read the schemas of all versions of an API's requests or responses."""
    message = _messages()[str(api_key)][direction]
    structs = {name: [_Row(*row) for row in rows] for name, rows in message["structs"].items()}
    root = next(iter(structs))
    first, last = message["versions"]
    return {version: _entity(root, structs, version, message) for version in range(first, last + 1)}


@cache
def _messages() -> dict[str, Any]:
    messages: dict[str, Any] = msgspec.json.decode(FILE.read_bytes())
    return messages


class _Row:
    """A field of a struct as the file has it: the same in all its versions."""

    def __init__(self, name: str, versions: str, kind: str, more: dict[str, Any] | None = None) -> None:
        self.name = name
        first, _, last = versions.partition("-")
        self.versions = range(int(first), int(last or first) + 1)
        self.is_array, self.is_nullable = kind.startswith("[]"), kind.endswith("?")
        self.kind = kind.removeprefix("[]").removesuffix("?")
        self.tag: int = (more or {}).get("tag", -1)
        self._more = more or {}

    def default(self, structs: dict[str, list[_Row]]) -> Any:
        """Return the value of an absent field."""
        if self.kind in structs and not self.is_array:
            own = self._more.get("default", None if self.is_nullable else {})
            return None if own is None else Message(_defaults(self.kind, structs) | own)
        if "default" in self._more:
            return self._more["default"]
        if self.kind == "uuid" and not self.is_array:
            return NO_UUID
        if self.is_nullable:
            return None
        return [] if self.is_array else {"string": "", "bytes": b"", "bool": False}.get(self.kind, 0)


def _defaults(name: str, structs: dict[str, list[_Row]]) -> dict[str, Any]:
    """Return the defaults of a struct's fields in all versions; the default of a later version wins."""
    rows = sorted(structs[name], key=lambda row: row.versions.stop)
    return {row.name: row.default(structs) for row in rows}


def _entity(name: str, structs: dict[str, list[_Row]], version: int, message: dict[str, Any]) -> Entity:
    is_flexible = version >= message["flexible"]
    rows = [row for row in structs[name] if version in row.versions]
    return Entity(
        name=name,
        is_flexible=is_flexible,
        header_is_flexible=version >= message["flexible_header"],
        fields=tuple(_field(row, structs, version, message) for row in rows),
        defaults=_defaults(name, structs),
        present=frozenset(row.name for row in rows),
    )


def _field(row: _Row, structs: dict[str, list[_Row]], version: int, message: dict[str, Any]) -> Field:
    is_flexible = version >= message["flexible"]
    entity = _entity(row.kind, structs, version, message) if row.kind in structs else None
    kind = _KINDS.get(row.kind, Kind.FIXED) if entity is None else Kind.STRUCT
    layout = "" if kind is not Kind.FIXED else "?" if row.kind == "bool" else row.kind
    if entity:
        bytes_min = entity.bytes_min
    elif kind is Kind.FIXED:
        bytes_min = FORMAT_BYTES[layout]
    elif kind is Kind.UUID:
        bytes_min = 16
    else:
        bytes_min = 1 if is_flexible else 2
    return Field(
        name=row.name,
        kind=kind,
        format=layout,
        is_array=row.is_array,
        is_nullable=row.is_nullable,
        is_flexible=is_flexible,
        tag=row.tag,
        entity=entity,
        default=row.default(structs),
        bytes_min=bytes_min,
    )


_KINDS = {"uuid": Kind.UUID, "string": Kind.STRING, "bytes": Kind.BYTES}


def _least_bytes(field: Field) -> int:
    if field.is_array or (field.entity and field.is_nullable):
        return 1
    return field.bytes_min
