"""What a Kafka message is made of: kio's dataclasses, read into plain descriptions that `node/wire.py` compiles.

This module owns everything that is peculiar to kio: how its types tell arrays from scalars and null from absent, which
of its Python values stand for which bytes, and the defaults. It reads and writes no bytes.

A schema is read for all versions of one API at once, because a message answers for the fields of every version.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import types
import typing
import uuid
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from kio.index import load_request_schema, load_response_schema
from kio.schema.index import api_key_map, schema_name_map

NO_UUID = uuid.UUID(int=0)

_FORMATS = {
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "float64": "d",
    "bool": "?",
    "error_code": "h",
    "timedelta_i32": "i",
    "timedelta_i64": "q",
    "datetime_i64": "q",
}
_FORMAT_BYTES = {"b": 1, "B": 1, "?": 1, "h": 2, "H": 2, "i": 4, "I": 4, "q": 8, "Q": 8, "d": 8}


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
    load = load_request_schema if direction == "request" else load_response_schema
    kinds = {version: load(api_key, version) for version in schema_name_map[api_key_map[api_key]]}
    defaults: dict[str, dict[str, Any]] = {}
    for version in sorted(kinds):
        _collect_defaults(kinds[version], defaults)
    return {version: _entity(kind, defaults) for version, kind in kinds.items()}


def _collect_defaults(kind: Any, defaults: dict[str, dict[str, Any]]) -> None:
    """Gather the fields of a struct and of those inside it; a later version's default wins."""
    own = defaults.setdefault(kind.__name__, {})
    for field in dataclasses.fields(kind):
        item, _, _ = _unwrap(field.type)
        if dataclasses.is_dataclass(item):
            _collect_defaults(item, defaults)
        own[field.name] = _default(field, defaults)


def _entity(kind: Any, defaults: dict[str, dict[str, Any]]) -> Entity:
    return Entity(
        name=kind.__name__,
        is_flexible=kind.__flexible__,
        header_is_flexible=kind.__header_schema__.__flexible__,
        fields=tuple(_field(field, kind.__flexible__, defaults) for field in dataclasses.fields(kind)),
        defaults=defaults[kind.__name__],
        present=frozenset(field.name for field in dataclasses.fields(kind)),
    )


def _field(field: dataclasses.Field[Any], is_flexible: bool, defaults: dict[str, dict[str, Any]]) -> Field:
    item, is_array, is_nullable = _unwrap(field.type)
    entity = _entity(item, defaults) if dataclasses.is_dataclass(item) else None
    kind, layout = (Kind.STRUCT, "") if entity else _kind(field.metadata["kafka_type"])
    if entity:
        bytes_min = entity.bytes_min
    elif kind is Kind.FIXED:
        bytes_min = _FORMAT_BYTES[layout]
    elif kind is Kind.UUID:
        bytes_min = 16
    else:
        bytes_min = 1 if is_flexible else 2
    return Field(
        name=field.name,
        kind=kind,
        format=layout,
        is_array=is_array,
        is_nullable=is_nullable,
        is_flexible=is_flexible,
        tag=field.metadata.get("tag", -1),
        entity=entity,
        default=_default(field, defaults),
        bytes_min=bytes_min,
    )


def _least_bytes(field: Field) -> int:
    if field.is_array or (field.entity and field.is_nullable):
        return 1
    return field.bytes_min


def _unwrap(kind: Any) -> tuple[Any, bool, bool]:
    """Return the innermost type of a field, whether it is an array and whether it may be null."""
    item, is_nullable = _without_none(kind)
    is_array = typing.get_origin(item) is tuple
    if is_array:
        # A nullable element is always a uuid, whose null is its zero.
        item, _ = _without_none(typing.get_args(item)[0])
    return item, is_array, is_nullable


def _without_none(kind: Any) -> tuple[Any, bool]:
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return kind, False
    (item,) = (argument for argument in typing.get_args(kind) if argument is not types.NoneType)
    return item, True


def _kind(kafka_type: str) -> tuple[Kind, str]:
    if kafka_type in _FORMATS:
        return Kind.FIXED, _FORMATS[kafka_type]
    return {"uuid": Kind.UUID, "string": Kind.STRING, "bytes": Kind.BYTES, "records": Kind.BYTES}[kafka_type], ""


def _default(field: dataclasses.Field[Any], defaults: dict[str, dict[str, Any]]) -> Any:
    """Return what an absent field means: the schema's default, else null where allowed, else the type's zero."""
    item, is_array, is_nullable = _unwrap(field.type)
    kafka_type = field.metadata.get("kafka_type", "")
    if not is_array and kafka_type == "uuid":
        return NO_UUID
    if not is_array and kafka_type == "datetime_i64" and field.default is None:
        return -1
    if field.default is not dataclasses.MISSING:
        return _plain(field.default, defaults)
    if is_nullable:
        return None
    if is_array:
        return []
    if dataclasses.is_dataclass(item):
        return Message(dict(defaults[_name(item)]))
    return {"string": "", "bytes": b"", "records": b"", "bool": False}.get(kafka_type, 0)


def _name(kind: Any) -> str:
    name: str = kind.__name__
    return name


def _plain(value: Any, defaults: dict[str, dict[str, Any]]) -> Any:
    """Turn kio's Python value into the one that the wire carries."""
    if isinstance(value, datetime.timedelta):
        return round(value.total_seconds() * 1000)
    if isinstance(value, datetime.datetime):
        return round(value.timestamp() * 1000)
    if isinstance(value, enum.IntEnum):
        return int(value)
    if isinstance(value, tuple):
        return [_plain(element, defaults) for element in value]
    if dataclasses.is_dataclass(value):
        own = {field.name: _plain(getattr(value, field.name), defaults) for field in dataclasses.fields(value)}
        return Message(defaults[type(value).__name__] | own)
    return value
