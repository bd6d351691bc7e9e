"""kio's dataclasses, read into the descriptions of `walstream.node.schemas`, and `schemas.json` written from them.

`python tests/node/kio_schemas.py` prints the file (`make schemas`). Everything that is peculiar to kio is here: how its
types tell arrays from scalars and null from absent, which of its Python values stand for which bytes, and the defaults.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import types
import typing
from typing import Any, Literal

from kio.index import load_request_schema, load_response_schema
from kio.schema.index import api_key_map, schema_name_map

from walstream.node.api import APIS
from walstream.node.schemas import FORMAT_BYTES, NO_UUID, Entity, Field, Kind, Message

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


def kio_schema(api_key: int, direction: Literal["request", "response"]) -> dict[int, Entity]:
    """Read kio's schemas of all versions of an API's requests or responses."""
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
        bytes_min = FORMAT_BYTES[layout]
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


# The file


def schemas_json() -> str:
    """Return the file of the schemas of all APIs that a node offers."""
    messages = {}
    for key in sorted(APIS):
        request, response = (_message(kio_schema(key, direction)) for direction in ("request", "response"))
        messages[str(key)] = f'{{\n  "request": {request},\n  "response": {response}\n }}'
    return "{\n" + ",\n".join(f' "{key}": {message}' for key, message in messages.items()) + "\n}\n"


def _message(entities: dict[int, Entity]) -> str:
    versions = sorted(entities)
    assert versions == [*range(versions[0], versions[-1] + 1)]
    structs: dict[str, list[dict[str, Any]]] = {}
    for version in versions:
        _add(entities[version], version, structs)
    written = {name: ",\n".join(f"     {json.dumps(_row(row))}" for row in rows) for name, rows in structs.items()}
    facts = {
        "versions": [versions[0], versions[-1]],
        "flexible": min((v for v in versions if entities[v].is_flexible), default=versions[-1] + 1),
        "flexible_header": min((v for v in versions if entities[v].header_is_flexible), default=versions[-1] + 1),
    }
    lines = [f'   "{name}": {json.dumps(value)}' for name, value in facts.items()]
    lines.append('   "structs": {\n' + ",\n".join(f'    "{k}": [\n{v}]' for k, v in written.items()) + "\n   }")
    return "{\n" + ",\n".join(lines) + "\n  }"


def _add(entity: Entity, version: int, structs: dict[str, list[dict[str, Any]]]) -> None:
    """Add a version to the rows of a struct and of those inside it; a new row comes behind the field before it."""
    rows = structs.setdefault(entity.name, [])
    position = 0
    for field in entity.fields:
        row = _described(field)
        old = [i for i, one in enumerate(rows) if one["field"] == row["field"] and one["last"] >= version - 1]
        if old:
            rows[old[0]]["last"] = version
            position = old[0] + 1
        else:
            rows.insert(position, {**row, "first": version, "last": version})
            position += 1
        if field.entity:
            _add(field.entity, version, structs)


def _described(field: Field) -> dict[str, Any]:
    item = field.entity.name if field.entity else field.format.replace("?", "bool") or field.kind.name.lower()
    kind = "[]" * field.is_array + item + "?" * field.is_nullable
    more: dict[str, Any] = {"tag": field.tag} if field.tag >= 0 else {}
    if item == "uuid" and not field.is_array:
        zero: Any = NO_UUID
    elif field.is_nullable or field.is_array:
        zero = None if field.is_nullable else []
    else:
        zero = {"string": "", "bytes": b"", "bool": False}.get(item, 0)
    if field.entity and not field.is_array:
        if isinstance(field.default, Message):
            own = {k: v for k, v in vars(field.default).items() if v != field.entity.defaults[k]}
            if own or field.is_nullable:
                more["default"] = own
    elif field.default != zero:
        more["default"] = field.default
    return {"field": (field.name, kind, more)}


def _row(row: dict[str, Any]) -> list[Any]:
    name, kind, more = row["field"]
    versions = f"{row['first']}-{row['last']}" if row["last"] > row["first"] else str(row["first"])
    return [name, versions, kind, more] if more else [name, versions, kind]


if __name__ == "__main__":
    print(schemas_json(), end="")
