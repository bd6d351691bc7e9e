"""All of PostgreSQL's types, with PostgreSQL as the oracle: what is captured, read back by it, is what it stores.

One table has a column of every type and one of its arrays. Random rows are inserted, updated and deleted; what pgoutput
and COPY say of them is rendered; and every value in the JSON, cast to its type by PostgreSQL, must be written as the
stored one is, to the last digit.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import date
from typing import Any, NamedTuple

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postgres.servers import Database, fresh
from walstream.capture.envelope import Output, Renderer, Stamp
from walstream.capture.streams import Streams
from walstream.postgres import catalogue
from walstream.postgres.messages import Relation
from walstream.postgres.relations import RelationInfo, Relations
from walstream.postgres.session import connect
from walstream.postgres.types import Kind, TypeInfo, Types

STAMP = Stamp(commit_lsn=1, xid=2, commit_time_us=3, now_ms=4)

SET_UP = r"""
create schema "Ünï ""x"" y";
create type mood as enum ('sad', 'so "so"', E'line\nbreak', 'comma, {brace}', 'ключ', '');
create domain positive as int check (value > 0);
create domain tags as text[];
create domain label as varchar(20);
create type inner_row as (a int, b text);
create type outer_row as (x inner_row, y text[], z timestamptz);
create type span as range (subtype = float8);
create type textspan as range (subtype = text, collation = "C");
create publication everything for all tables;
"""

_text = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=30)
_tricky = st.text(st.sampled_from("tnu\"\\{}(),;' \n\t\x01é€😀NULL"), max_size=12)
_strings = st.one_of(_text, _tricky, st.sampled_from(["", "NULL", "null", "x" * 300, "y" * 3000, "\\N", "\\."]))
_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), _strings),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_strings, inner, max_size=3)),
    max_leaves=8,
).map(lambda value: json.dumps(value, ensure_ascii=False))
_days = st.one_of(
    st.dates().map(str),
    st.sampled_from(["infinity", "-infinity", "0044-03-15 BC", "4713-01-01 BC", "5874897-12-31", "10000-01-01"]),
)
_moments = st.one_of(
    st.datetimes().map(str),
    st.sampled_from(
        ["infinity", "-infinity", "0044-03-15 12:00:00.5 BC", "4713-01-02 BC", "294276-12-31 23:59:59.999999"]
    ),
)
_zones = st.sampled_from(["", "+00", "-03:30", "+14"])
_finite = st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr)


def _ordered(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, str]]:
    return st.tuples(values, values).map(lambda pair: (str(min(pair)), str(max(pair))))


def _range_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    def written(pair: tuple[str, str], left: str, right: str, has_low: bool, has_high: bool) -> str:
        low, high = pair
        return f"{left}{_quoted(low) if has_low else ''},{_quoted(high) if has_high else ''}{right}"

    made = st.builds(
        written, _ordered(values), st.sampled_from("[("), st.sampled_from("])"), st.booleans(), st.booleans()
    )
    return st.one_of(st.just("empty"), made)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _multirange_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    return st.lists(_range_of(values), max_size=3).map(lambda ranges: "{" + ",".join(ranges) + "}")


_numbers = st.one_of(
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30).map("{:f}".format),
    st.sampled_from(["NaN", "Infinity", "-Infinity", "0", "-0.000", "1e300", "1e-300", "12345678901234567890.10"]),
)
_addresses = st.one_of(st.ip_addresses().map(str), st.sampled_from(["10.0.0.0/8", "::/0", "2001:db8::1/64"]))
_times = st.one_of(st.times().map(str), st.just("24:00:00"))
_intervals = st.one_of(
    st.builds(
        "{} mons {} days {}:{:02d}:{:02d}.{:06d}".format,
        st.integers(-100_000, 100_000),
        st.integers(-100_000, 100_000),
        st.integers(-1_000, 1_000),
        st.integers(0, 59),
        st.integers(0, 59),
        st.integers(0, 999_999),
    ),
    st.sampled_from(["0", "-178000000 years", "1 year -2 mons +3 days -04:05:06.789", "-1 sec"]),
)
_points = st.builds("({},{})".format, _finite, st.one_of(_finite, st.sampled_from(["NaN", "Infinity"])))
_point_pairs = st.builds("{},{}".format, *[st.builds("({},{})".format, _finite, _finite)] * 2)


def _row_text(fields: list[str | None]) -> str:
    quoted = ["" if field is None else '"' + field.replace("\\", "\\\\").replace('"', '""') + '"' for field in fields]
    return "(" + ",".join(quoted) + ")"


def _array_text(values: Any) -> str:
    if isinstance(values, list):
        return "{" + ",".join(map(_array_text, values)) + "}"
    return "NULL" if values is None else _quoted(values)


_inner_rows = st.tuples(st.one_of(st.none(), st.integers(-9, 9).map(str)), st.one_of(st.none(), _strings)).map(
    lambda fields: _row_text(list(fields))
)
_text_arrays = st.lists(st.one_of(st.none(), _strings), max_size=3).map(_array_text)

VALUES: dict[str, st.SearchStrategy[str]] = {
    "bool": st.sampled_from(["t", "f"]),
    "int2": st.integers(-(2**15), 2**15 - 1).map(str),
    "int4": st.integers(-(2**31), 2**31 - 1).map(str),
    "int8": st.integers(-(2**63), 2**63 - 1).map(str),
    "oid": st.integers(0, 2**32 - 1).map(str),
    "float4": st.floats(width=32).map(repr),
    "float8": st.floats().map(repr),
    "numeric": _numbers,
    "numeric(12,3)": st.integers(-(10**11), 10**11).map(lambda number: f"{number / 1000:.3f}"),
    "money": st.integers(-(10**15), 10**15).map(lambda number: f"{number / 100:.2f}"),
    "text": _strings,
    "varchar(40)": _strings.map(lambda text: text[:40]),
    "char(7)": _strings.map(lambda text: text[:7]),
    "name": _tricky.map(lambda text: text.encode()[:60].decode(errors="ignore")),
    '"char"': st.sampled_from(["a", "", '"', "\\", "\t"]),
    "bytea": st.binary(max_size=300).map(lambda value: "\\x" + value.hex()),
    "uuid": st.uuids().map(str),
    "json": _json,
    "jsonb": _json,
    "jsonpath": st.sampled_from(['$."a b"[*] ? (@ > 1)', "$", 'strict $."\\"" starts with "x"']),
    "xml": st.sampled_from(['<a>b &amp; "c"</a>', "<a x='1'/>", "text"]),
    "date": _days,
    "time": _times,
    "timetz": st.builds("{}{}".format, _times, st.sampled_from(["+00", "-03:30", "+14", "+01:02:03"])),
    "timestamp": _moments,
    "timestamptz": st.one_of(st.builds("{}{}".format, st.datetimes(), _zones), _moments),
    "timestamp(2)": st.datetimes().map(str),
    "interval": _intervals,
    "inet": _addresses,
    "cidr": st.ip_addresses().map(str),
    "macaddr": st.binary(min_size=6, max_size=6).map(lambda value: value.hex(":")),
    "macaddr8": st.binary(min_size=8, max_size=8).map(lambda value: value.hex(":")),
    "bit(5)": st.text("01", min_size=5, max_size=5),
    "varbit": st.text("01", max_size=20),
    "point": _points,
    "lseg": _point_pairs.map("[{}]".format),
    "path": st.builds("{}{}{}".format, st.just("["), _point_pairs, st.just("]")),
    "box": _point_pairs,
    "polygon": _point_pairs.map("({})".format),
    "line": st.sampled_from(["{1,-1,0}", "{0.5,2,3}"]),
    "circle": st.builds("<({},{}),{}>".format, _finite, _finite, st.integers(0, 9)),
    "int4range": _range_of(st.integers(-100, 100)),
    "int8range": _range_of(st.integers(-(10**12), 10**12)),
    "numrange": _range_of(st.decimals(-100, 100, places=2)),
    "tsrange": _range_of(st.datetimes()),
    "tstzrange": _range_of(st.datetimes()),
    "daterange": _range_of(st.dates(max_value=date(9990, 1, 1))),
    "int4multirange": _multirange_of(st.integers(-100, 100)),
    "nummultirange": _multirange_of(st.integers(-100, 100)),
    "tstzmultirange": _multirange_of(st.datetimes()),
    "tsvector": st.sampled_from(["", "'a b':1,2A 'it''s' \"q\":3", "'back\\\\slash'"]),
    "tsquery": st.sampled_from(["", "'a b' & !'c'", "'x':*AB <-> 'y'"]),
    "pg_lsn": st.sampled_from(["0/0", "16/B374D848"]),
    "xid8": st.integers(0, 2**63).map(str),
    "tid": st.just("(4294967295,65535)"),
    "pg_snapshot": st.just("10:20:10,14,15"),
    "int2vector": st.lists(st.integers(-9, 9), max_size=4).map(lambda numbers: " ".join(map(str, numbers))),
    "regclass": st.just("pg_class"),
    "public.mood": st.sampled_from(["sad", 'so "so"', "line\nbreak", "comma, {brace}", "ключ", ""]),
    "public.positive": st.integers(1, 1000).map(str),
    "public.tags": _text_arrays,
    "public.label": _strings.map(lambda text: text[:20]),
    "public.inner_row": _inner_rows,
    "public.outer_row": st.tuples(_inner_rows, _text_arrays, st.just("2024-01-01 00:00:00+05")).map(
        lambda fields: _row_text(list(fields))
    ),
    "public.span": _range_of(st.floats(-100, 100)),
    "public.textspan": _range_of(st.text('ab"\\,é', min_size=1, max_size=3).map(lambda text: text)),
    "public.hstore": st.dictionaries(_tricky, st.one_of(st.none(), _tricky), max_size=3).map(
        lambda pairs: ",".join(f"{_quoted(k)}=>{'NULL' if v is None else _quoted(v)}" for k, v in pairs.items())
    ),
    "public.vector": st.lists(st.integers(-9, 9), min_size=1, max_size=3).map(lambda numbers: str(numbers)),
}
NO_ARRAYS = {"public.tags"}


class Column(NamedTuple):
    name: str
    type_name: str
    values: st.SearchStrategy[str]

    def __repr__(self) -> str:
        return f"{self.name} {self.type_name}"


def _arrays(type_name: str, values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Arrays of one dimension, of two, and with a first subscript of 0."""
    delimiter = ";" if type_name == "box" else ","
    element = st.one_of(st.none(), values)

    def written(found: Any) -> str:
        if isinstance(found, list):
            return "{" + delimiter.join(map(written, found)) + "}"
        return "NULL" if found is None else _quoted(found)

    flat = st.lists(element, max_size=4)
    square = st.lists(st.lists(element, min_size=2, max_size=2), min_size=1, max_size=3)
    shifted = st.lists(element, min_size=2, max_size=2).map(lambda found: f"[0:1]={written(found)}")
    return st.one_of(flat.map(written), square.map(written), shifted)


class World:
    """A database with the table of all types, and the renderer of its changes."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.session: psycopg.Connection[Any] = connect(database.dsn)
        database.execute(SET_UP)
        for extension in ("hstore", "vector"):
            if database.execute("select 1 from pg_available_extensions where name = %s", [extension]):
                database.execute(f"create extension {extension} schema public")
        self.columns = list(self._columns())
        declared = ", ".join(f'"{column.name}" {column.type_name}' for column in self.columns)
        database.execute(f"create table public.everything (id int primary key, {declared})")
        database.execute("alter table public.everything replica identity full")
        # Slots have names of their own for the whole server.
        self.slot = f"types_{database.name}"
        database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [self.slot])
        self.types = Types()
        self.relations = Relations()
        self.renderer = Renderer(
            database="db",
            source_epoch=1,
            generation=1,
            streams=Streams("ws"),
            types=self.types,
            describe=self.describe,
        )
        self.next_id = 0

    def _columns(self) -> Iterator[Column]:
        for number, (type_name, values) in enumerate(VALUES.items()):
            if self._exists(type_name):
                yield Column(f"c{number}", type_name, values)
                if type_name not in NO_ARRAYS:
                    yield Column(f"a{number} [é]", f"{type_name}[]", _arrays(type_name, values))

    def _exists(self, type_name: str) -> bool:
        try:
            sample = {"xml": "<a/>"}.get(type_name)
            self.database.execute(f"select {'null' if sample is None else repr(sample)}::{type_name}")
        except (psycopg.errors.UndefinedObject, psycopg.errors.FeatureNotSupported):
            return False
        return True

    def describe(self, message: Relation) -> RelationInfo:
        self.types.learn(
            catalogue.type_facts(self.session, self.types.unknown(column.type_oid for column in message.columns))
        )
        facts = catalogue.relation_facts(self.session, [message.id])
        return self.relations.update(message, facts.get(message.id))

    def changes(self) -> list[Output]:
        """Take what has been committed since the last time, whole transactions together."""
        query = (
            f"select data from pg_logical_slot_get_binary_changes('{self.slot}', null, null,"
            " 'proto_version', '1', 'publication_names', 'everything', 'messages', 'true')"
        )
        rows = [row for (row,) in self.session.execute(query) if row[:1] in (b"R", b"I", b"U", b"D", b"T", b"M")]
        return list(self.renderer.render(rows, STAMP))

    def stored(self, row_id: int) -> dict[str, str | None]:
        """What PostgreSQL stores, in its own words."""
        written = ", ".join(
            f'case when "{c.name}" is distinct from null then format(\'%%s\', "{c.name}") end' for c in self.columns
        )
        (row,) = self.session.execute(f"select {written} from public.everything where id = %s", [row_id]).fetchall()
        return dict(zip((column.name for column in self.columns), row, strict=True))

    def read_back(self, captured: dict[str, Any]) -> dict[str, str | None]:
        """What PostgreSQL makes of the captured values, in its own words."""
        kinds = {column.name: self.types.resolve(column.type_oid) for column in self.info.columns}
        there = [column for column in self.columns if captured[column.name] is not None]
        parameters = [_sql_text(kinds[column.name], captured[column.name]) for column in there]
        written = ", ".join(f"format('%%s', %s::{column.type_name})" for column in there)
        row = self.session.execute(f"select {written}", parameters).fetchone() if there else ()
        assert row is not None
        found: dict[str, str | None] = dict.fromkeys(captured)
        del found["id"]
        return found | dict(zip((column.name for column in there), row, strict=True))

    @property
    def info(self) -> RelationInfo:
        return next(info for info in reversed(list(self.relations)) if info.table == "everything")

    def insert(self, values: dict[str, str]) -> int:
        self.next_id += 1
        types = {column.name: column.type_name for column in self.columns}
        names = ", ".join(["id", *(f'"{name}"' for name in values)])
        places = ", ".join(["%s", *(f"%s::{types[name]}" for name in values)])
        self.database.execute(
            f"insert into public.everything ({names}) values ({places})", [self.next_id, *values.values()]
        )
        return self.next_id


def _sql_text(known: TypeInfo, value: Any) -> str:
    """Return the text that PostgreSQL reads: what a reader of the JSON who knows the type would do."""
    if isinstance(value, list):
        assert known.element is not None
        element = known.element
        inner = [
            "NULL"
            if each is None
            else _sql_text(known, each)
            if isinstance(each, list)
            else _quoted(_sql_text(element, each))
            for each in value
        ]
        return "{" + known.delimiter.join(inner) + "}"
    if isinstance(value, bool):
        assert known.kind is Kind.BOOL
        return str(value)
    assert isinstance(value, str)
    if known.kind is Kind.BYTEA:
        return "\\x" + base64.b64decode(value, validate=True).hex()
    return value


def _parsed(document: bytes | None) -> Any:
    # Numbers stay text, so that not a digit is lost on the way back.
    return json.loads(document or b"null", parse_int=str, parse_float=str)


@pytest.fixture(scope="module", params=[18, 16], ids=lambda version: f"postgres{version}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with fresh(request.getfixturevalue(f"postgres{request.param}")) as database:
        world = World(database)
        try:
            yield world
        finally:
            world.session.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_every_value_comes_back_as_it_is_stored(world: World, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(world.columns), min_size=1, max_size=25, unique_by=lambda c: c.name))
    values = {column.name: data.draw(column.values, label=column.type_name) for column in chosen}
    row_id = world.insert(values)
    stored = world.stored(row_id)
    copied = [bytes(line) for line in _copied(world, row_id)]
    world.database.execute("update public.everything set id = id where id = %s", [row_id])
    world.database.execute("delete from public.everything where id = %s", [row_id])
    inserted, updated, deleted = world.changes()
    rows = [_parsed(inserted[1])["after"], _parsed(updated[1])["before"], _parsed(updated[1])["after"]]
    rows += [_parsed(deleted[1])["before"]]
    (read,) = world.renderer.copy(world.info, STAMP._replace(snapshot="s"))(copied)
    rows += [_parsed(read[1])["after"]]
    for row in rows[1:]:
        assert row == rows[0]
    assert world.read_back(rows[0]) == stored
    assert inserted[2] == read[2] == b'{"id":%d}' % row_id


def _copied(world: World, row_id: int) -> Iterator[bytes]:
    query = f"copy (select * from public.everything where id = {row_id}) to stdout"
    with world.session.cursor() as cursor, cursor.copy(query) as copy:
        yield from map(bytes, copy)


def test_values_of_every_type_are_tried(world: World) -> None:
    """One row in which no column is null: what the random rows may have missed."""
    values = {column.name: _example(column) for column in world.columns}
    row_id = world.insert(values)
    (inserted,) = world.changes()
    row = _parsed(inserted[1])["after"]
    assert world.read_back(row) == world.stored(row_id)
    assert None not in row.values()
    numbers = {c.name for c in world.columns if c.type_name in ("int2", "int4", "int8", "oid", "public.positive")}
    plain = json.loads(inserted[1] or b"")["after"]
    assert {name for name, value in plain.items() if isinstance(value, int) and not isinstance(value, bool)} >= numbers


_EXAMPLES = {
    "bool": "t",
    "float4": "0.1",
    "float8": "-Infinity",
    "numeric": "1.50",
    "bytea": "\\x00ff",
    "json": '{"a": "\\n"}',
    "jsonb": '{"a": "\\n"}',
    "xml": "<a>b</a>",
    "date": "0044-03-15 BC",
    "timestamp": "0044-03-15 12:00:00.5 BC",
    "timestamptz": "0044-03-15 12:00:00.5+00 BC",
    "timestamp(2)": "2024-02-29 12:00:00.25",
    "time": "24:00:00",
    "timetz": "24:00:00-03:30",
    "interval": "-1 year 2 days",
    "inet": "::1/64",
    "cidr": "10.0.0.0/8",
    "macaddr": "08:00:2b:01:02:03",
    "macaddr8": "08:00:2b:01:02:03:04:05",
    "bit(5)": "10101",
    "varbit": "1",
    "uuid": "00000000-0000-0000-0000-000000000001",
    "point": "(1,NaN)",
    "lseg": "[(1,2),(3,4)]",
    "path": "[(1,2),(3,4)]",
    "box": "(1,2),(3,4)",
    "polygon": "((1,2),(3,4))",
    "line": "{1,-1,0}",
    "circle": "<(1,2),3>",
    "tsvector": "'it''s' \"q\":3",
    "tsquery": "'a b' & !'c'",
    "jsonpath": '$."a b"',
    "pg_lsn": "16/B374D848",
    "tid": "(1,2)",
    "pg_snapshot": "10:20:10,14,15",
    "regclass": "pg_class",
    "public.mood": 'so "so"',
    "public.tags": '{a,NULL,"b,c"}',
    "public.inner_row": '(1,"a ""b""")',
    "public.outer_row": '("(1,x)","{a,b}","2024-01-01 00:00:00+05")',
    "public.hstore": '"a b"=>"c", d=>NULL',
    "public.vector": "[1,2]",
}


def _example(column: Column) -> str:
    base = column.type_name.removesuffix("[]")
    value = _EXAMPLES.get(base, "empty" if "range" in base or "span" in base else "7")
    value = "{}" if "multirange" in base else value
    delimiter = ";" if base == "box" else ","
    return "{" + delimiter.join([_quoted(value), "NULL"]) + "}" if column.type_name.endswith("[]") else value


def test_what_an_update_did_not_touch_and_all_identities(each_database: Database) -> None:
    """Values that are stored out of line, under every replica identity; names in need of quotes."""
    world = World(each_database)
    with world.session:
        each_database.execute(
            'create table "Ünï ""x"" y"."ta\\ble" ("k\\ey" int primary key, "b.ig" text, other int);'
            ' alter table "Ünï ""x"" y"."ta\\ble" alter column "b.ig" set storage external'
        )
        big = "x\n" * 5000
        table = '"Ünï ""x"" y"."ta\\ble"'
        each_database.execute(f"insert into {table} values (1, %s, 1), (2, %s, 1)", [big, big])
        each_database.execute(f'update {table} set other = 2 where other = 1 and "k\\ey" = 1')
        each_database.execute(f'update {table} set "k\\ey" = 3 where "k\\ey" = 2')
        each_database.execute(f"alter table {table} replica identity full")
        each_database.execute(f"update {table} set other = 3")
        each_database.execute(f"truncate {table}")
        records = [_parsed(value) for _, value, _, _ in world.changes()]
        keys = ["k\\ey", "b.ig", "other"]
        assert [record["op"] for record in records] == ["c", "c", "u", "d", "c", "u", "u", "t"]
        assert records[0]["after"] == dict(zip(keys, ["1", big, "1"], strict=True))
        assert records[2]["after"] == {"k\\ey": "1", "other": "2"}
        assert records[2]["source"]["unchanged"] == ["b.ig"]
        assert records[3]["before"] == {"k\\ey": "2"}
        assert records[4]["after"] == {"k\\ey": "3", "other": "1"}
        assert records[4]["source"]["unchanged"] == ["b.ig"]
        assert [record["after"] for record in records[5:7]] == [
            dict(zip(keys, ["1", big, "3"], strict=True)),
            dict(zip(keys, ["3", big, "3"], strict=True)),
        ]
        assert records[5]["before"] == dict(zip(keys, ["1", big, "2"], strict=True))
        assert all(record["source"]["schema"] == 'Ünï "x" y' for record in records)


def test_generated_columns_and_partitions(each_database: Database) -> None:
    world = World(each_database)
    with world.session:
        options = "publish_via_partition_root = true"
        if each_database.version >= 18:
            options += ", publish_generated_columns = stored"
        each_database.execute(f"alter publication everything set ({options})")
        each_database.execute(
            "create table public.parts (id int primary key, twice int generated always as (id * 2) stored)"
            " partition by range (id);"
            "create table public.low partition of public.parts for values from (0) to (10);"
            "create table public.high partition of public.parts for values from (10) to (20)"
        )
        each_database.execute("insert into public.parts values (1)")
        each_database.execute("update public.parts set id = 11")
        records = world.changes()
        rows = [(topic, _parsed(value)["op"], _parsed(value)["after"]) for topic, value, _, _ in records]
        generated = each_database.version >= 18
        topic = "ws.public.parts"
        assert rows == [
            (topic, "c", {"id": "1", **({"twice": "2"} if generated else {})}),
            (topic, "d", None),
            (topic, "c", {"id": "11", **({"twice": "22"} if generated else {})}),
        ]
