"""Messages of pgoutput in the making, and the plainest possible renderer of them: the oracle of the fast one."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from walstream.capture.envelope import Output, Renderer, Stamp
from walstream.capture.streams import Streams
from walstream.postgres.messages import UNCHANGED, Value
from walstream.postgres.pgoutput import decode, decode_row
from walstream.postgres.relations import RelationInfo, Relations
from walstream.postgres.types import Kind, TypeInfo, Types

RELATION_ID = 16_384
STAMP = Stamp(commit_lsn=0x16_B374D848, xid=777, commit_time_us=1_700_000_000_123_456, now_ms=1_700_000_000_999)

BOOL, INT8, TEXT, FLOAT8, NUMERIC = 16, 20, 25, 701, 1700
TIMESTAMP, TIMESTAMPTZ, BYTEA, JSONB, UUID = 1114, 1184, 17, 3802, 2950
INT8S, TEXTS = 1016, 1009


class Col(NamedTuple):
    """A column of a table in a test."""

    name: str
    oid: int = TEXT
    is_key: bool = False


def relation(
    *columns: Col, identity: str = "d", schema: str = "public", table: str = "t", relation_id: int = RELATION_ID
) -> bytes:
    described = b"".join(
        (b"\1" if column.is_key or identity == "f" else b"\0")
        + column.name.encode()
        + b"\0"
        + column.oid.to_bytes(4)
        + b"\xff\xff\xff\xff"
        for column in columns
    )
    names = schema.encode() + b"\0" + table.encode() + b"\0" + identity.encode()
    return b"R" + relation_id.to_bytes(4) + names + len(columns).to_bytes(2) + described


def tuple_data(values: Iterable[Value]) -> bytes:
    written = [
        b"n" if value is None else b"t" + len(value).to_bytes(4) + value if isinstance(value, bytes) else b"u"
        for value in values
    ]
    return len(written).to_bytes(2) + b"".join(written)


def insert(*values: Value, relation_id: int = RELATION_ID) -> bytes:
    return b"I" + relation_id.to_bytes(4) + b"N" + tuple_data(values)


def update(
    new: Sequence[Value], old: Sequence[Value] | None = None, kind: bytes = b"K", relation_id: int = RELATION_ID
) -> bytes:
    before = b"" if old is None else kind + tuple_data(old)
    return b"U" + relation_id.to_bytes(4) + before + b"N" + tuple_data(new)


def delete(*old: Value, kind: bytes = b"K", relation_id: int = RELATION_ID) -> bytes:
    return b"D" + relation_id.to_bytes(4) + kind + tuple_data(old)


def truncate(*relation_ids: int) -> bytes:
    return b"T" + len(relation_ids).to_bytes(4) + b"\0" + b"".join(each.to_bytes(4) for each in relation_ids)


def message(prefix: str, content: bytes) -> bytes:
    return b"M\1" + bytes(8) + prefix.encode() + b"\0" + len(content).to_bytes(4) + content


def copy_line(*values: bytes | None) -> bytes:
    escapes = {8: rb"\b", 9: rb"\t", 10: rb"\n", 11: rb"\v", 12: rb"\f", 13: rb"\r", 92: rb"\\"}
    fields = [rb"\N" if v is None else b"".join(escapes.get(byte, bytes((byte,))) for byte in v) for v in values]
    return b"\t".join(fields) + b"\n"


class Table:
    """A relation, as the renderer and its oracle see it."""

    def __init__(
        self,
        *columns: Col,
        identity: str = "d",
        streams: Streams | None = None,
        primary_key: tuple[str, ...] = (),
        name: str = "t",
        types: Types | None = None,
    ) -> None:
        self.description = relation(*columns, identity=identity, table=name)
        self.relations = Relations()
        self.types = types or Types()
        self.primary_key = primary_key
        self.streams = streams or Streams("ws")
        self.info = self.describe(decode(self.description))
        self.renderer = Renderer(
            database="db",
            source_epoch=3,
            generation=41,
            streams=self.streams,
            types=self.types,
            describe=self.describe,
        )

    def describe(self, described: object) -> RelationInfo:
        info = self.relations.update(described)  # type: ignore[arg-type]
        if not self.primary_key:
            return info
        # What the catalogue would have said.
        columns = tuple(column._replace(is_key=column.name in self.primary_key) for column in info.columns)
        return info._replace(columns=columns, key_columns=self.primary_key)

    def render(self, *rows: bytes) -> list[Output]:
        return list(self.renderer.render([self.description, *rows], STAMP))

    def snapshot(self, *lines: bytes) -> list[Output]:
        stamp = STAMP._replace(xid=0, snapshot="snap-1")
        return self.renderer.copy(self.info, stamp)(lines)

    def expected(self, *rows: bytes) -> list[Output]:
        """What `render` should give for the default stream, made in the most obvious way."""
        seq, records = 1, []
        for data in rows:
            made = self._expected(data, seq)
            records += made
            seq += len(made)
        return records

    def _expected(self, data: bytes, seq: int) -> list[Output]:
        row = decode_row(data)
        columns = self.info.columns
        old = None if row.old is None else dict(zip((c.name for c in columns), row.old, strict=True))
        new = None if row.new is None else dict(zip((c.name for c in columns), row.new, strict=True))
        if old is not None and row.old_kind == "K":
            old = {c.name: old[c.name] for c in columns if c.is_key}
        if new is not None:
            new = {name: (old or {}).get(name, value) if value is UNCHANGED else value for name, value in new.items()}
        if row.kind == "D":
            return [self._record("d", seq, old, None)]
        if row.kind == "I":
            return [self._record("c", seq, None, new)]
        key = self.info.key_columns
        if old is not None and new is not None and any(old[name] != new[name] for name in key):
            deleted, created = self._record("d", seq, old, None), self._record("c", seq + 1, None, new)
            deleted[3].append(("__debezium.newkey", created[2] or b""))
            created[3].append(("__debezium.oldkey", deleted[2] or b""))
            return [deleted, created]
        return [self._record("u", seq, old, new)]

    def _record(
        self, op: str, seq: int, old: dict[str, Value] | None, new: dict[str, Value] | None, snapshot: str | None = None
    ) -> Output:
        there = new if new is not None else old
        assert there is not None
        unchanged = [name for name, value in (new or {}).items() if value is UNCHANGED]
        source = [
            ("db", '"db"'),
            ("schema", json.dumps(self.info.schema, ensure_ascii=False)),
            ("table", json.dumps(self.info.table, ensure_ascii=False)),
            ("txId", "null" if snapshot else "777"),
            ("lsn", str(0x16_B374D848)),
            ("source_epoch", "3"),
            ("commit_lsn", str(0x16_B374D848)),
            ("seq", str(seq)),
            ("gen", "41"),
            ("ts_ms", "1700000000123"),
            ("snapshot", json.dumps(snapshot) if snapshot else "false"),
            ("schema_version", str(self.info.version)),
            ("unchanged", json.dumps(unchanged, ensure_ascii=False, separators=(",", ":"))),
        ]
        value = json_object(
            [
                ("before", self._object(old)),
                ("after", self._object(new)),
                ("source", json_object(source)),
                ("op", json.dumps(op)),
                ("ts_ms", "1700000000999"),
            ]
        )
        key = self._object({name: there[name] for name in self.info.key_columns}) if self.info.key_columns else None
        headers = [
            ("tenant", b"default"),
            ("op", op.encode()),
            ("commit_lsn", b"%d" % 0x16_B374D848),
            ("commit_time_ms", b"1700000000123"),
            *([] if snapshot else [("txid", b"777")]),
            ("seq", b"%d" % seq),
        ]
        return self.streams.topic("public", self.info.table), value.encode(), key.encode() if key else None, headers

    def expected_snapshot(self, values: Sequence[bytes | None]) -> Output:
        named = dict(zip((column.name for column in self.info.columns), values, strict=True))
        return self._record("r", 0, None, named, snapshot="snap-1")

    def _object(self, values: dict[str, Value] | None) -> str:
        if values is None:
            return "null"
        oids = {column.name: column.type_oid for column in self.info.columns}
        return json_object(
            [
                (name, "null" if value is None else json_value(self.types.resolve(oids[name]), value.decode()))
                for name, value in values.items()
                if value is not UNCHANGED
            ]
        )


def json_object(members: Sequence[tuple[str, str]]) -> str:
    return "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{value}" for name, value in members) + "}"


def json_value(known: TypeInfo, text: str) -> str:
    """The obvious way to write a value."""
    match known.kind:
        case Kind.BOOL:
            return json.dumps(text == "t")
        case Kind.NUMBER:
            return text
        case Kind.FLOAT:
            return json.dumps(text) if text in ("NaN", "Infinity", "-Infinity") else text
        case Kind.TIMESTAMP:
            return json.dumps(re.sub(r"^(\S+) (?=\d)", r"\1T", text))
        case Kind.TIMESTAMPTZ:
            return json.dumps(re.sub(r"^(\S+) (\S+)\+00", r"\1T\2Z", text))
        case Kind.BYTEA:
            return json.dumps(base64.b64encode(bytes.fromhex(text[2:])).decode())
        case Kind.ARRAY:
            assert known.element is not None
            return json_array(known.element, text)
        case _:
            return json.dumps(text, ensure_ascii=False)


def json_array(element: TypeInfo, text: str) -> str:
    """Read an array character by character."""
    if text.startswith("["):
        return json.dumps(text, ensure_ascii=False)
    written, position = [], 0
    while position < len(text):
        letter = text[position]
        if letter in "{},":
            written.append({"{": "[", "}": "]", ",": ","}[letter])
            position += 1
        elif letter == '"':
            content = ""
            position += 1
            while text[position] != '"':
                position += text[position] == "\\"
                content += text[position]
                position += 1
            position += 1
            written.append(json_value(element, content))
        else:
            start = position
            while text[position] not in "{},":
                position += 1
            bare = text[start:position]
            written.append("null" if bare == "NULL" else json_value(element, bare))
    return "".join(written)
