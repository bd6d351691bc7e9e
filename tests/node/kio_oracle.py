"""Builds random kio messages, and says what walstream should see in them."""

from __future__ import annotations

import dataclasses
import datetime
import io
import types
import typing
import uuid
from typing import Any

from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import Records

from walstream.node.schemas import NO_UUID

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


def messages(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy of instances of one of kio's dataclasses."""
    return st.fixed_dictionaries({f.name: values(f, f.type) for f in dataclasses.fields(kind)}).map(lambda d: kind(**d))


def values(field: dataclasses.Field[Any], kind: Any) -> st.SearchStrategy[Any]:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (a for a in typing.get_args(kind) if a is not types.NoneType)
        return st.none() | values(field, inner)
    if origin is tuple:
        return st.lists(values(field, typing.get_args(kind)[0]), max_size=3).map(tuple)
    if dataclasses.is_dataclass(kind):
        return messages(kind)
    return scalars(field.metadata["kafka_type"])


def scalars(kafka_type: str) -> st.SearchStrategy[Any]:
    match kafka_type:
        case "int8" | "int16" | "int32" | "int64":
            half = 1 << (BITS[kafka_type] - 1)
            return st.integers(-half, half - 1)
        case "uint16":
            return st.integers(0, 65535)
        case "float64":
            return st.floats(allow_nan=False)
        case "bool":
            return st.booleans()
        case "error_code":
            return st.sampled_from(list(ErrorCode))
        case "timedelta_i32" | "timedelta_i64":
            return st.integers(-(1 << 31), (1 << 31) - 1).map(lambda ms: datetime.timedelta(milliseconds=ms))
        case "datetime_i64":
            return st.integers(0, 1 << 41).map(lambda ms: EPOCH + datetime.timedelta(milliseconds=ms))
        case "string":
            return TEXT
        case "bytes":
            return st.binary(max_size=40)
        case "records":
            return st.binary(max_size=40).map(Records)
        case "uuid":
            return st.integers(1, (1 << 128) - 1).map(lambda n: uuid.UUID(int=n))
    raise AssertionError(kafka_type)


def plain(value: Any, kafka_type: str = "") -> Any:
    """Turn a kio value into nested dicts and lists: what a Message holds and what a Reply is written from."""
    if dataclasses.is_dataclass(value):
        return {
            f.name: plain(getattr(value, f.name), f.metadata.get("kafka_type", "")) for f in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [plain(element, kafka_type) for element in value]
    if isinstance(value, datetime.timedelta):
        return round(value.total_seconds() * 1000)
    if isinstance(value, datetime.datetime):
        return round((value - EPOCH).total_seconds() * 1000)
    if value is None and kafka_type in ("uuid", "datetime_i64"):
        return NO_UUID if kafka_type == "uuid" else -1
    return value


def kio_write(message: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(type(message))(out, message)
    return out.getvalue()


def kio_read(kind: Any, body: bytes) -> Any:
    message, length = entity_reader(kind)(body, 0)
    assert length == len(body)
    return message
