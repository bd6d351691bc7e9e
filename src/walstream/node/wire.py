"""The bounded codec of Kafka messages: bytes in, `Message` out; `Reply` in, bytes out.

The schemas come from `node/schemas.py`, one per API and version; the bytes are read and written here, because a node
reads what strangers send. Three rules hold for every read, and the tests try to break them:

* nothing is allocated from an announced length before the bytes are known to be there;
* one message makes at most `ELEMENTS_MAX` array elements, so that a small frame cannot become a large object graph;
* every failure is a `MalformedRequest`.

Bytes left over behind a message are passed over, as Kafka does it. Clients rely on that without knowing: librdkafka
2.x asks for the metadata of all topics with three bytes too many.

A `Message` has an attribute for every field that *any* version of its schema has; a field that this version lacks holds
its default. A `Reply` is a dict by the same names: missing keys take the default, keys that this version lacks are
dropped, and a key that no version has is a bug of ours and fails an assertion. Times are integers in milliseconds,
error codes are integers, a uuid is a `uuid.UUID` (`NO_UUID` when absent), arrays are lists.

Readers and writers are closures, compiled on first use per API and version; consecutive fixed-width fields share one
struct.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from walstream.errors import MalformedRequest
from walstream.node.primitives import ELEMENTS_MAX, Buffer, Source, write_uvarint
from walstream.node.schemas import NO_UUID, Entity, Field, Kind, Message, schema

__all__ = ["ELEMENTS_MAX", "NO_UUID", "Buffer", "Header", "Message", "Reply", "Source", "write_uvarint"]

Reply: TypeAlias = dict[str, Any]
_HEADER = struct.Struct(">hhih")

Read: TypeAlias = Callable[[Source], Any]
Write: TypeAlias = Callable[[bytearray, Any], None]
ReadStep: TypeAlias = Callable[[Source, dict[str, Any]], None]


class Header(NamedTuple):
    """What every request begins with. `position` is where the tags of a flexible header, or else the body, begin."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    position: int


def read_header(frame: Buffer) -> Header:
    """Read the part of the request header that all its versions share."""
    source = Source(frame)
    api_key, version, correlation_id, length = _HEADER.unpack_from(frame, source.advance(_HEADER.size))
    client_id = None if length == -1 else source.string(length)
    return Header(api_key, version, correlation_id, client_id, source.position)


def decode_request(frame: Buffer, header: Header) -> Message:
    """Read the body of a request whose API and version are known to be offered."""
    read, _, header_has_tags = _request_codec(header.api_key, header.version)
    source = Source(frame, header.position)
    if header_has_tags:
        source.skip_tags()
    message: Message = read(source)
    return message


def encode_response(api_key: int, version: int, correlation_id: int, reply: Reply) -> bytearray:
    """Write a whole response frame: size, header, body."""
    _, write, header_has_tags = _response_codec(api_key, version)
    out = bytearray(8)
    if header_has_tags:
        out.append(0)
    write(out, reply)
    struct.pack_into(">ii", out, 0, len(out) - 4, correlation_id)
    return out


class Codec(NamedTuple):
    """The compiled reader and writer of one message, and whether the header before it carries tags."""

    read: Read
    write: Write
    header_has_tags: bool


@cache
def _request_codec(api_key: int, version: int) -> Codec:
    return compile_message(schema(api_key, "request")[version])


@cache
def _response_codec(api_key: int, version: int) -> Codec:
    return compile_message(schema(api_key, "response")[version])


def compile_message(entity: Entity) -> Codec:
    """Compile both directions of a message. A server needs one of them; the tests use the other."""
    return Codec(_entity_reader(entity), _entity_writer(entity), entity.header_is_flexible)


# Reading


def _entity_reader(entity: Entity) -> Read:
    steps = tuple(_read_steps(entity))
    defaults = entity.defaults
    # A list in the defaults would be shared by every message: each gets its own.
    lists = tuple(name for name, value in defaults.items() if isinstance(value, list) and name not in entity.present)

    def read(source: Source) -> Message:
        values = defaults.copy()
        for name in lists:
            values[name] = []
        for step in steps:
            step(source, values)
        return Message(values)

    return read


def _read_steps(entity: Entity) -> list[ReadStep]:
    steps: list[ReadStep] = []
    for names, layout, fields in entity.runs:
        steps.append(
            _read_run(names, struct.Struct(layout)) if layout else _read_one(names[0], _field_reader(fields[0]))
        )
    if entity.is_flexible:
        steps.append(_read_tags({field.tag: (field.name, _field_reader(field)) for field in entity.tagged}))
    return steps


def _read_run(names: tuple[str, ...], layout: struct.Struct) -> ReadStep:
    def step(source: Source, values: dict[str, Any]) -> None:
        values.update(zip(names, layout.unpack_from(source.buffer, source.advance(layout.size)), strict=True))

    return step


def _read_one(name: str, read: Read) -> ReadStep:
    def step(source: Source, values: dict[str, Any]) -> None:
        values[name] = read(source)

    return step


def _read_tags(known: dict[int, tuple[str, Read]]) -> ReadStep:
    def step(source: Source, values: dict[str, Any]) -> None:
        count = source.uvarint()
        if not count:
            return
        for _ in range(source.count(count, 2)):
            tag, length = source.uvarint(), source.uvarint()
            start = source.advance(length)
            if tag not in known:
                continue
            name, read = known[tag]
            outer_end, source.end, source.position = source.end, source.position, start
            values[name] = read(source)
            source.finish()
            source.end = outer_end

    return step


def _field_reader(field: Field) -> Read:
    item = _entity_reader(field.entity) if field.entity else _scalar_reader(field)
    if field.is_array:
        return _array_reader(field, item)
    return _nullable_entity_reader(item) if field.entity and field.is_nullable else item


def _nullable_entity_reader(read: Read) -> Read:
    def read_nullable(source: Source) -> Message | None:
        return None if source.buffer[source.advance(1)] > 0x7F else read(source)

    return read_nullable


def _array_reader(field: Field, item: Read) -> Read:
    length_of = _length_reader(field.is_flexible, Source.int32, field.is_nullable)
    element_bytes_min = field.bytes_min

    def read(source: Source) -> list[Any] | None:
        length = length_of(source)
        return None if length < 0 else [item(source) for _ in range(source.count(length, element_bytes_min))]

    return read


def _length_reader(is_flexible: bool, legacy: Callable[[Source], int], is_nullable: bool) -> Callable[[Source], int]:
    """Read a length; -1 is null."""

    def read(source: Source) -> int:
        length = source.uvarint() - 1 if is_flexible else legacy(source)
        if length < (-1 if is_nullable else 0):
            raise MalformedRequest(f"A length of {length} is not possible here.")
        return length

    return read


def _scalar_reader(field: Field) -> Read:
    if field.kind is Kind.FIXED:
        layout = struct.Struct(">" + field.format)
        return lambda source: layout.unpack_from(source.buffer, source.advance(layout.size))[0]
    if field.kind is Kind.UUID:
        return _read_uuid
    is_nullable = field.is_nullable and not field.is_array
    if field.kind is Kind.STRING:
        length_of = _length_reader(field.is_flexible, Source.int16, is_nullable)
        return lambda source: None if (length := length_of(source)) < 0 else source.string(length)
    length_of = _length_reader(field.is_flexible, Source.int32, is_nullable)

    def read_bytes(source: Source) -> bytes | None:
        length = length_of(source)
        if length < 0:
            return None
        position = source.advance(length)
        return bytes(source.buffer[position : position + length])

    return read_bytes


def _read_uuid(source: Source) -> uuid.UUID:
    position = source.advance(16)
    return uuid.UUID(bytes=bytes(source.buffer[position : position + 16]))


# Writing


def _entity_writer(entity: Entity) -> Write:
    known = entity.defaults.keys()
    steps = [
        _write_run(names, struct.Struct(layout), entity.defaults) if layout else _write_one(fields[0])
        for names, layout, fields in entity.runs
    ]
    if entity.is_flexible:
        steps.append(_write_tags(tuple((field, _field_writer(field)) for field in entity.tagged)))

    def write(out: bytearray, reply: Reply) -> None:
        assert reply.keys() <= known, f"{entity.name} has no {sorted(reply.keys() - known)} in any version"
        for step in steps:
            step(out, reply)

    return write


def _write_run(names: tuple[str, ...], layout: struct.Struct, defaults: dict[str, Any]) -> Write:
    pairs = tuple((name, defaults[name]) for name in names)

    def step(out: bytearray, reply: Reply) -> None:
        out += layout.pack(*[reply.get(name, default) for name, default in pairs])

    return step


def _write_one(field: Field) -> Write:
    name, default, write = field.name, field.default, _field_writer(field)
    return lambda out, reply: write(out, reply.get(name, default))


def _write_tags(writers: tuple[tuple[Field, Write], ...]) -> Write:
    def step(out: bytearray, reply: Reply) -> None:
        present = [(f, write) for f, write in writers if f.name in reply and reply[f.name] != f.default]
        write_uvarint(out, len(present))
        for field, write in present:
            value = bytearray()
            write(value, reply[field.name])
            write_uvarint(out, field.tag)
            write_uvarint(out, len(value))
            out += value

    return step


def _field_writer(field: Field) -> Write:
    item = _entity_writer(field.entity) if field.entity else _scalar_writer(field)
    if field.is_array:
        return _array_writer(field, item)
    return _nullable_entity_writer(item) if field.entity and field.is_nullable else item


def _nullable_entity_writer(write: Write) -> Write:
    def write_nullable(out: bytearray, value: Any) -> None:
        out += b"\xff" if value is None else b"\x01"
        if value is not None:
            write(out, value)

    return write_nullable


def _array_writer(field: Field, item: Write) -> Write:
    write_length = _length_writer(field.is_flexible, ">i", field.is_nullable)

    def write(out: bytearray, value: Any) -> None:
        write_length(out, value)
        for element in value or ():
            item(out, element)

    return write


def _length_writer(is_flexible: bool, legacy: str, is_nullable: bool) -> Write:
    layout = struct.Struct(legacy)

    def write(out: bytearray, value: Any) -> None:
        assert value is not None or is_nullable, "null in a field that does not allow it"
        length = -1 if value is None else len(value)
        if is_flexible:
            write_uvarint(out, length + 1)
        else:
            out += layout.pack(length)

    return write


def _scalar_writer(field: Field) -> Write:
    if field.kind is Kind.FIXED:
        layout = struct.Struct(">" + field.format)
        return lambda out, value: out.extend(layout.pack(value))
    if field.kind is Kind.UUID:
        return lambda out, value: out.extend((value or NO_UUID).bytes)
    is_string = field.kind is Kind.STRING
    write_length = _length_writer(
        field.is_flexible, ">h" if is_string else ">i", field.is_nullable and not field.is_array
    )

    def write(out: bytearray, value: Any) -> None:
        encoded = value.encode() if isinstance(value, str) else value
        write_length(out, encoded)
        if encoded:
            out += encoded

    return write
