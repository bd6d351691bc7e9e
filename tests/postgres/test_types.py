"""Kinds of types: the built-in table against real catalogues, and the rules for all others."""

from __future__ import annotations

import re

import psycopg
from hypothesis import given
from hypothesis import strategies as st

from postgres.servers import Database
from walstream.postgres import catalogue
from walstream.postgres.session import connect
from walstream.postgres.types import Kind, TypeFacts, Types

NEEDS_ESCAPING = re.compile(r'["\\\x00-\x1f]')
JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
FLOAT_WORDS = {"NaN", "Infinity", "-Infinity"}

# Values whose text is as strange as their type allows. Every PLAIN type must be here.
VALUES = {
    "bool": ["true", "false"],
    "int2": ["-32768", "32767"],
    "int4": ["-2147483648", "2147483647"],
    "int8": ["-9223372036854775808", "9223372036854775807"],
    "oid": ["0", "4294967295"],
    "float4": ["NaN", "Infinity", "-Infinity", "-0", "1e-45", "3.4028235e38", "0.1", "1e15", "123456.789"],
    "float8": ["NaN", "Infinity", "-Infinity", "-0", "5e-324", "1.7976931348623157e308", "0.1", "1e15", "1e-5"],
    "numeric": ["NaN", "Infinity", "-Infinity", "0", "-0.000", "1e300", "12345678901234567890.123456789"],
    "money": ["-92233720368547758.08", "92233720368547758.07", "0"],
    "uuid": ["00000000-0000-0000-0000-000000000000", "FFFFFFFF-ffff-FFFF-ffff-ffffffffffff"],
    "date": ["infinity", "-infinity", "4713-01-01 BC", "5874897-12-31", "2024-02-29"],
    "time": ["00:00", "24:00", "23:59:59.999999"],
    "timetz": ["00:00+15:59:59", "24:00-15:59:59", "12:34:56.789012-03:30"],
    "timestamp": ["infinity", "-infinity", "4713-01-01 BC", "294276-12-31 23:59:59.999999", "2024-02-29 12:00"],
    "timestamptz": ["infinity", "-infinity", "4713-01-02 BC", "294276-12-31 00:00+00", "2024-02-29 12:00-03:30"],
    "interval": ["0", "-178000000 years", "1 year -2 mons +3 days -04:05:06.789", "-1 sec"],
    "inet": ["::1", "255.255.255.255/0", "::ffff:1.2.3.4/128", "2001:db8::/32"],
    "cidr": ["0.0.0.0/0", "2001:db8::/32"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "bit": ["1", "0"],
    "varbit": ["", "10101"],
    "bytea": ["", "\\x00ff5c22", "abc"],
    "point": ["(1,-2.5e-300)", "(NaN,Infinity)"],
    "lseg": ["[(1,2),(3,4)]"],
    "path": ["((1,2),(3,4))", "[(1,2)]"],
    "box": ["(1,2),(3,4)"],
    "polygon": ["((1,2),(3,4))"],
    "line": ["{1,-1,NaN}", "{1,2,3}"],
    "circle": ["<(1,2),Infinity>"],
    "int4range": ["empty", "(,)", "[1,5)", "(,5]"],
    "int8range": ["empty", "[-9223372036854775808,9223372036854775806]"],
    "numrange": ["empty", "[-Infinity,NaN]", "[1.50,2]"],
    "int4multirange": ["{}", "{[1,2),[5,)}"],
    "int8multirange": ["{}", "{[1,2),[5,)}"],
    "nummultirange": ["{}", "{[-Infinity,1.5],(2,NaN]}"],
    "tid": ["(4294967295,65535)"],
    "xid": ["4294967295"],
    "cid": ["4294967295"],
    "xid8": ["18446744073709551615"],
    "pg_lsn": ["FFFFFFFF/FFFFFFFF"],
    "txid_snapshot": ["10:20:10,14,15"],
    "pg_snapshot": ["10:20:10,14,15", "1:1:"],
    "int2vector": ["", "1 -2 3"],
    "oidvector": ["", "1 2 4294967295"],
}

# Types of kind STRING, each with a value that proves that PLAIN would be wrong.
ESCAPED = {
    "text": 'a"b\\c\nd',
    "varchar": '"',
    "bpchar": "\t",
    '"char"': "\\377",
    "name": '"',
    "json": '{"a": "b"}',
    "jsonb": '{"a": "b"}',
    "jsonpath": '$."a"',
    "xml": '<a b="c"/>',
    "tsrange": "[2020-01-01,2021-01-01)",
    "tstzrange": "[2020-01-01,2021-01-01)",
    "daterange": "[0044-01-01 BC,2021-01-01)",
    "tsmultirange": "{[2020-01-01,2021-01-01)}",
    "tstzmultirange": "{[2020-01-01,2021-01-01)}",
    "datemultirange": "{[0044-01-01 BC,2021-01-01)}",
    "tsquery": "'a\"b'",
    "tsvector": "'a\"b':1",
    "aclitem": '"a b"=r/"a b"',
    "refcursor": '"',
}

BUILT_IN = """
    select t.oid, t.typname, t.typtype::text, t.typdelim::text,
           case when t.typoutput = 'pg_catalog.array_out'::regproc then t.typelem else 0::oid end
    from pg_type t left join pg_type e on e.oid = t.typelem
    where t.oid < 10000 and t.typtype not in ('p', 'c') and coalesce(e.typtype, '') <> 'c'
"""


def test_table_agrees_with_the_catalogue(each_database: Database) -> None:
    types = Types()
    rows = each_database.execute(BUILT_IN)
    assert len(rows) > 100
    assert not types.unknown(oid for oid, *_ in rows)
    for oid, name, _, delimiter, element_oid in rows:
        found = types.resolve(oid)
        assert (found.oid, found.name, found.base_oid) == (oid, name, oid)
        assert (found.kind is Kind.ARRAY) == bool(element_oid), name
        if found.element is not None:
            assert (found.element.oid, found.delimiter) == (element_oid, delimiter), name


def test_every_kind_keeps_its_promise(each_database: Database) -> None:
    types = Types()
    with connect(each_database.dsn) as session:
        for name, values in VALUES.items():
            kind = types.resolve(session.execute("select %s::regtype::oid", [name]).fetchone()[0]).kind
            for value in values:
                text = session.execute(f"select %s::{name}::text", [value]).fetchone()[0]
                if kind is Kind.BOOL:
                    assert session.execute(f"select %s::{name}", [value]).fetchone()[0] in (True, False)
                elif kind in (Kind.NUMBER, Kind.FLOAT):
                    assert JSON_NUMBER.fullmatch(text) or (kind is Kind.FLOAT and text in FLOAT_WORDS), (name, text)
                elif kind is Kind.BYTEA:
                    assert re.fullmatch(r"\\x[0-9a-f]*", text), text
                else:
                    assert kind in (Kind.PLAIN, Kind.TIMESTAMP, Kind.TIMESTAMPTZ), name
                    assert not NEEDS_ESCAPING.search(text), (name, text)
                    assert text.isascii()


def test_every_plain_type_is_among_the_values(database: Database) -> None:
    types = Types()
    plain = {
        name for oid, name, *_ in database.execute(BUILT_IN) if types.resolve(oid).kind not in (Kind.STRING, Kind.ARRAY)
    }
    assert plain == VALUES.keys()


def test_every_other_type_needs_to_be_a_string(database: Database) -> None:
    types = Types()
    if not database.execute("select count(*) from pg_roles where rolname = 'a b'")[0][0]:
        database.execute('create role "a b"')
    with connect(database.dsn) as session:
        for name, value in ESCAPED.items():
            oid = session.execute("select %s::regtype::oid", [name]).fetchone()[0]
            assert types.resolve(oid).kind is Kind.STRING
            try:
                text = session.execute(f"select %s::{name}::text", [value]).fetchone()[0]
            except psycopg.errors.FeatureNotSupported:
                assert name == "xml", "the wheel's servers are built without libxml"
                continue
            assert NEEDS_ESCAPING.search(text) or not text.isascii() or name == '"char"', (name, text)


def test_types_that_are_not_built_in(each_database: Database) -> None:
    each_database.execute("""
        create type mood as enum ('sad', 'ok');
        create domain price as numeric(10, 2);
        create domain net_price as price check (value > 0);
        create domain matrix as int4[];
        create type pair as (a int, b text);
        create type floats as range (subtype = float8);
        create table t (m mood, p net_price, x matrix, c pair, r floats, ms mood[], ps net_price[], cs pair[],
                        bs box[], v int2vector, xs matrix[]);
    """)
    types = Types()
    with connect(each_database.dsn) as session:
        relation = catalogue.find_relation(session, "public", "t")
        assert relation is not None
        oids = {column.name: column.type_oid for column in relation.columns}
        missing = types.unknown(oids.values())
        assert missing == {oids[name] for name in ("m", "p", "x", "c", "r", "ms", "ps", "cs", "xs")}
        types.learn(catalogue.type_facts(session, missing))
        assert not types.unknown(oids.values())
    found = {name: types.resolve(oid) for name, oid in oids.items()}
    assert {name: info.kind for name, info in found.items() if info.kind is not Kind.ARRAY} == {
        "m": Kind.STRING,
        "p": Kind.PLAIN,
        "c": Kind.STRING,
        "r": Kind.STRING,
        "v": Kind.PLAIN,
    }
    assert (found["p"].name, found["p"].base_name, found["p"].base_modifier) == ("net_price", "numeric", (10 << 16) + 6)
    elements = {name: (info.element.kind, info.delimiter) for name, info in found.items() if info.element}
    assert elements == {
        "x": (Kind.NUMBER, ","),
        "ms": (Kind.STRING, ","),
        "ps": (Kind.PLAIN, ","),
        "cs": (Kind.STRING, ","),
        "bs": (Kind.PLAIN, ";"),
        "xs": (Kind.ARRAY, ","),
    }


def test_type_without_facts_is_a_string() -> None:
    found = Types().resolve(99_999)
    assert (found.kind, found.name) == (Kind.STRING, "type 99999")
    assert Types().unknown([23, 1007, 99_999]) == {99_999}


def test_domains_in_a_circle_end() -> None:
    types = Types(
        [TypeFacts(50_001, "s", "a", "d", base_oid=50_002), TypeFacts(50_002, "s", "b", "d", base_oid=50_001)]
    )
    assert types.resolve(50_001).kind is Kind.STRING


def test_oid_that_is_used_again_is_learned_again() -> None:
    types = Types([TypeFacts(50_001, "s", "a", "d", base_oid=23)])
    assert types.resolve(50_001).kind is Kind.NUMBER
    types.learn([TypeFacts(50_001, "s", "a", "e")])
    assert types.resolve(50_001).kind is Kind.STRING


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_facts_never_change_a_built_in_type(oid: int, base: int) -> None:
    before = Types().resolve(23)
    assert Types([TypeFacts(23, "s", "x", "d", base_oid=base), TypeFacts(oid, "s", "y", "e")]).resolve(23) == before
