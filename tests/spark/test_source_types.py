"""Every type of docs/capture.md, decoded by Spark, with PostgreSQL as the oracle.

A table has a column of each type. Its rows come by snapshot and by stream; what Spark reads must be what psycopg reads,
to the last digit: the value itself where Spark has a type for it, PostgreSQL's text where it is a string.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from pyspark.errors import PythonException
from pyspark.sql import DataFrame
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from spark.conftest import Captured, MakeCaptured

TYPES = """
create type mood as enum ('sad', 'so "so"', E'line\\nbreak');
create domain positive as int check (value > 0);
create domain money_like as numeric(12, 2);
create domain tags as text[];
create type pair as (a int, b text);
create type span as range (subtype = float8);
"""
PINNED = """
set timezone = 'UTC'; set datestyle = 'ISO'; set intervalstyle = 'iso_8601'; set bytea_output = 'hex';
set lc_monetary = 'C'; set extra_float_digits = 1
"""
S = StringType()


class Case(NamedTuple):
    type_name: str
    spark: DataType
    values: tuple[str, ...]


CASES = (
    Case("smallint", ShortType(), ("-32768", "32767", "0")),
    Case("integer", IntegerType(), ("-2147483648", "2147483647")),
    Case("bigint", LongType(), ("-9223372036854775808", "9223372036854775807")),
    Case("oid", LongType(), ("4294967295", "0")),
    Case("positive", IntegerType(), ("1",)),
    Case("real", FloatType(), ("1.1", "-0", "3.4028235e38", "1e-45", "NaN", "Infinity", "-Infinity")),
    Case("double precision", DoubleType(), ("0.1", "1e308", "5e-324", "-0", "NaN", "Infinity", "-Infinity")),
    Case("numeric(10, 2)", DecimalType(10, 2), ("12345678.90", "-0.01", "0")),
    Case("numeric(38, 10)", DecimalType(38, 10), ("9999999999999999999999999999.9999999999", "-1e-10")),
    Case("numeric(38)", DecimalType(38, 0), ("99999999999999999999999999999999999999",)),
    Case("numeric(3, -2)", DecimalType(5, 0), ("12300", "-99900")),
    Case("numeric(3, 5)", DecimalType(5, 5), ("0.00123",)),
    Case("money_like", DecimalType(12, 2), ("1.50",)),
    Case("numeric", S, ("1e300", "0.10", "-12345678901234567890.123456789", "NaN", "Infinity")),
    Case("numeric(39, 2)", S, ("1.25",)),
    Case("boolean", BooleanType(), ("t", "f")),
    Case(
        "timestamptz",
        TimestampType(),
        ("2026-01-31 12:00:00.123456+02", "0001-01-01 00:00:00+00", "1969-12-31 23:59:59.5+00"),
    ),
    Case("timestamptz(0)", TimestampType(), ("9999-12-31 23:59:59+00",)),
    Case(
        "timestamp", TimestampNTZType(), ("2026-01-31 12:00:00.1", "0001-01-01 00:00:00", "9999-12-31 23:59:59.999999")
    ),
    Case("date", DateType(), ("2024-02-29", "0001-01-01", "9999-12-31", "1582-10-10")),
    Case("bytea", BinaryType(), ("\\x", "\\x00", "\\x00ff", "\\x000102", "\\xdeadbeef", "\\x" + "ab" * 1000)),
    Case("text", S, ("", "NULL", 'say "hi" \\ back', "line\nbreak\ttab", "é€😀", "\x01\x1f")),
    Case("varchar(20)", S, ("ключ",)),
    Case("char(5)", S, ("ab",)),
    Case("name", S, ("Name",)),
    Case("uuid", S, ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",)),
    Case("json", S, ('{"a": [1, 2.50, "x\\"y"],  "b":null}', "null", '"text"')),
    Case("jsonb", S, ('{"a": {"b": []}}', "1.10")),
    Case("time", S, ("24:00:00", "12:34:56.789")),
    Case("timetz", S, ("12:00:00-03:30",)),
    Case("interval", S, ("1 year 2 mons -3 days 04:05:06.789", "-1 sec")),
    Case("money", S, ("12.50", "-0.01")),
    Case("inet", S, ("10.0.0.0/8", "::1")),
    Case("macaddr", S, ("08:00:2b:01:02:03",)),
    Case("bit(3)", S, ("101",)),
    Case("point", S, ("(1.5,-2)",)),
    Case("int4range", S, ("[1,5)", "empty")),
    Case("tstzrange", S, ("[2026-01-01 00:00:00+00,)",)),
    Case("span", S, ("[1.5,2)",)),
    Case("tsvector", S, ("'a b':1 'c'",)),
    Case("pg_lsn", S, ("16/B374D848",)),
    Case("mood", S, ("sad", 'so "so"', "line\nbreak")),
    Case("pair", S, ('(1,"x ""y""")',)),
    Case("smallint[]", ArrayType(ShortType()), ("{1,NULL,-3}", "{}")),
    Case("integer[]", ArrayType(IntegerType()), ("{1,NULL,3}", "{}", "{2147483647}")),
    Case("bigint[]", ArrayType(LongType()), ("{9223372036854775807}",)),
    Case("positive[]", ArrayType(IntegerType()), ("{1,2}",)),
    Case("double precision[]", ArrayType(DoubleType()), ("{0.1,NULL,NaN,-Infinity}", "{1}")),
    Case("numeric(10, 2)[]", ArrayType(DecimalType(10, 2)), ("{1.50,NULL,-0.01}", "{}")),
    Case("numeric[]", ArrayType(S), ("{1.50,NULL,NaN}",)),
    Case("boolean[]", ArrayType(BooleanType()), ("{t,f,NULL}",)),
    Case("timestamptz[]", ArrayType(TimestampType()), ('{"2026-01-31 12:00:00.5+00",NULL}',)),
    Case("timestamp[]", ArrayType(TimestampNTZType()), ('{"2026-01-31 12:00:00"}', "{}")),
    Case("date[]", ArrayType(DateType()), ("{2024-02-29,NULL}", "{}", "{0001-01-01}")),
    Case("bytea[]", ArrayType(BinaryType()), ('{"\\\\x00ff",NULL,"\\\\x"}', "{}")),
    Case("text[]", ArrayType(S), ('{"a b",NULL,"NULL","say \\"hi\\"","{}"}', "{}")),
    Case("tags", ArrayType(S), ("{x,y}",)),
    Case("uuid[]", ArrayType(S), ("{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}",)),
    Case("jsonb[]", ArrayType(S), ('{"{\\"a\\": 1}",NULL}',)),
    Case("mood[]", ArrayType(S), ("{sad,NULL}",)),
)
ROWS = max(len(case.values) for case in CASES)


def insert(captured: Captured, base: int) -> None:
    """Insert as many rows as the longest case has values, the others repeat theirs, and one row of nulls."""
    names = ", ".join(["id", *(f"c{number}" for number in range(len(CASES)))])
    for row in range(ROWS):
        values = [case.values[row % len(case.values)] for case in CASES]
        places = ", ".join(["%s", *(f"%s::{case.type_name}" for case in CASES)])
        captured.execute(f"insert into everything ({names}) values ({places})", [base + row, *values])
    captured.execute("insert into everything (id) values (%s)", [base + ROWS])


def stored(captured: Captured) -> dict[int, list[Any]]:
    """What PostgreSQL holds: values, and the text of what is a string to Spark."""
    # Casting char(n) to text drops its padding; its own output does not.
    chosen = [f"format('%%s', c{n})" if _is_text(case.spark) else f"c{n}" for n, case in enumerate(CASES)]
    # An array of strings: the texts of its elements.
    chosen = [
        f"array(select e::text from unnest(c{n}) with ordinality u(e, o) order by o)"
        if case.spark == ArrayType(S)
        else each
        for n, (case, each) in enumerate(zip(CASES, chosen, strict=True))
    ]
    # psycopg has not heard of arrays of this domain.
    chosen = [
        f"{each}::int[]" if case.type_name == "positive[]" else each for case, each in zip(CASES, chosen, strict=True)
    ]
    chosen = [f"case when c{n} is not null then {each} end" for n, each in enumerate(chosen)]
    captured.execute(PINNED)
    rows = captured.execute(f"select id, {', '.join(chosen)} from everything where %s", [True])
    return {row[0]: list(row[1:]) for row in rows}


def _is_text(spark: DataType) -> bool:
    return isinstance(spark, StringType)


def plain(value: Any) -> Any:
    """Make values comparable: what is not equal to itself is, and 0 is not -0."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return value


def expected(spark: DataType, value: Any) -> Any:
    """What Spark's rows have in Python for a value of psycopg's."""
    if isinstance(value, list):
        assert isinstance(spark, ArrayType)
        return [expected(spark.elementType, each) for each in value]
    if value is None:
        return None
    if isinstance(spark, FloatType):
        # psycopg gives the number that is written; Spark the nearest one that a real can be.
        return float(np.float32(value))
    if isinstance(spark, TimestampType):
        return value.replace(tzinfo=None)
    return value


def without_zones(frame: DataFrame) -> DataFrame:
    """Have the times in UTC: Spark would hand them out in the zone of this process."""
    zones = {TimestampType(): "timestamp_ntz", ArrayType(TimestampType()): "array<timestamp_ntz>"}
    return frame.select(
        *(
            frame[field.name].cast(zones[field.dataType]).alias(field.name) if field.dataType in zones else field.name
            for field in frame.schema
        )
    )


@pytest.fixture
def everything(make_captured: MakeCaptured) -> Captured:
    columns = ", ".join(f"c{number} {case.type_name}" for number, case in enumerate(CASES))
    captured = make_captured(f"{TYPES}; create table everything (id int primary key, {columns})", start=False)
    captured.execute("alter table everything replica identity full")
    return captured


def test_every_type_is_what_postgres_holds(everything: Captured) -> None:
    insert(everything, 0)
    everything.start()
    everything.wait_for_snapshots("public.everything")
    insert(everything, 100)
    source = stored(everything)
    everything.execute("update everything set id = id where id = 100; delete from everything where id = 101")
    everything.wait()
    frame = everything.read(table="public.everything")
    for number, case in enumerate(CASES):
        assert frame.schema[f"c{number}"].dataType == case.spark, case.type_name
    seen: dict[str, set[int]] = {}
    for row in without_zones(frame).collect():
        for number, case in enumerate(CASES):
            wanted = plain(expected(case.spark, source[row.id][number]))
            assert plain(row[f"c{number}"]) == wanted, f"{case.type_name} in row {row.id}, {row['_op']}"
        seen.setdefault(row["_op"], set()).add(row.id)
    assert seen == {
        "r": set(range(ROWS + 1)),
        "c": set(range(100, 100 + ROWS + 1)),
        "u": {100},
        "d": {101},
    }


def test_all_as_strings_is_what_the_log_says(everything: Captured) -> None:
    everything.start()
    insert(everything, 0)
    everything.wait()
    source = stored(everything)
    frame = everything.read(table="public.everything", strings="*", starting="earliest")
    assert {field.dataType for field in frame.schema if not field.name.startswith("_")} == {S}
    rows = {int(row.id): row for row in frame.collect()}
    by_name = {case.type_name: f"c{number}" for number, case in enumerate(CASES)}
    assert rows[0][by_name["bigint"]] == "-9223372036854775808"
    assert rows[0][by_name["boolean"]] == "true"
    assert rows[0][by_name["bytea"]] == ""
    assert rows[2][by_name["bytea"]] == "AP8="
    assert rows[0][by_name["timestamptz"]] == "2026-01-31T10:00:00.123456Z"
    assert rows[4][by_name["double precision"]] == "NaN"
    assert rows[1][by_name["double precision"]] == "1e+308"
    assert rows[0][by_name["integer[]"]] == "[1,null,3]"
    assert rows[0][by_name["double precision[]"]] == '[0.1,null,"NaN","-Infinity"]'
    for row_id, row in rows.items():
        for number, case in enumerate(CASES):
            if _is_text(case.spark):
                assert row[f"c{number}"] == source[row_id][number], case.type_name


UNREPRESENTABLE = (
    ("timestamptz", "infinity"),
    ("timestamp", "-infinity"),
    ("timestamp", "0044-03-15 12:00:00 BC"),
    ("timestamptz", "10000-01-01 00:00:00+00"),
    ("date", "infinity"),
    ("date", "5874897-12-31"),
    ("numeric(10, 2)", "NaN"),
    ("integer[]", "{{1,2},{3,4}}"),
    ("text[]", "{{a,b}}"),
    ("integer[]", "[0:1]={1,2}"),
    ("date[]", "{infinity}"),
)


def test_values_that_no_type_holds_are_named_and_strings_read_them(make_captured: MakeCaptured) -> None:
    columns = ", ".join(f"c{number} {type_name}" for number, (type_name, _) in enumerate(UNREPRESENTABLE))
    captured = make_captured(f"create table odd (id int primary key, name text, {columns})")
    for number, (type_name, value) in enumerate(UNREPRESENTABLE):
        captured.execute(f"insert into odd (id, name, c{number}) values ({number}, 'x', %s::{type_name})", [value])
    captured.wait()
    for number, (_, value) in enumerate(UNREPRESENTABLE):
        with pytest.raises(PythonException) as raised:
            captured.read(table="public.odd", columns=f"id,c{number}").collect()
        text = str(raised.value)
        assert f"walstream.errors.ValueUnrepresentable: public.odd: the column c{number} holds " in text
        assert f"in the row with id {number}" in text
        assert f"strings=c{number}" in text
        assert " at LSN " in text
        (row,) = (
            captured.read(table="public.odd", columns=f"id,c{number}", strings=f"c{number}")
            .where(f"id = {number}")
            .collect()
        )
        assert row[f"c{number}"] is not None
        if value[0] not in "{[":
            assert row[f"c{number}"] == value.replace(" ", "T", 1).replace("+00", "Z")
    both = captured.read(table="public.odd", strings="*").collect()
    assert len(both) == len(UNREPRESENTABLE)
    assert captured.read(table="public.odd", columns="name").where("name = 'x'").count() == len(UNREPRESENTABLE)
