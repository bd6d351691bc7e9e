"""Options: what they are called, what they may be."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from walstream.errors import UsageError
from walstream.positions import Lsn
from walstream.spark.options import Earliest, Latest, Options, parse_names, parse_place, parse_table
from walstream.spark.types import table_name

HERE = {"bootstrap": "127.0.0.1:9092"}


def test_defaults() -> None:
    assert Options.of(HERE) == Options(bootstrap="127.0.0.1:9092")
    assert Options.of(HERE).starting == Earliest()
    assert Options.of(HERE).ending == Latest()


def test_names_in_any_case() -> None:
    given = {**HERE, "MAXROWSPERTRIGGER": "5", "maxbytespertrigger": "6", "rowsPerTask": "7", "Counted": "False"}
    options = Options.of(given)
    assert (options.rows_per_trigger, options.bytes_per_trigger, options.rows_per_task) == (5, 6, 7)
    assert options.counted is False


def test_settings_of_the_client() -> None:
    options = Options.of({**HERE, "kafka.security.protocol": "SASL_SSL", "kafka.sasl.password": "hidden"})
    assert options.kafka == {"security.protocol": "SASL_SSL", "sasl.password": "hidden"}
    assert "hidden" not in repr(options)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"bootstrp": "x"}, "has no option 'bootstrp'"),
        ({"path": "x"}, "has no option 'path'"),
        ({"bootstrap": ""}, "option bootstrap is missing"),
        ({"kafka.group.id": "x"}, "kafka.group.id is not yours"),
        ({"table": "orders"}, "The option table: 'orders' is not a table"),
        ({"table": ".orders"}, "is not a table"),
        ({"starting": "yesterday"}, "The option starting: 'yesterday' is no place"),
        ({"starting": "16/x"}, "The option starting: '16/x' is not an LSN"),
        ({"maxRowsPerTrigger": "0"}, "The option maxRowsPerTrigger: '0' is not a number above 0"),
        ({"rowsPerTask": "1e3"}, "rowsPerTask"),
        ({"counted": "yes"}, "neither true nor false"),
        ({"after": "-2"}, "no offset"),
        ({"columns": "a,b"}, "columns is for a table"),
        ({"strings": "a"}, "strings is for a table"),
        ({"table": "a.b", "tables": "a.b"}, "exclude each other"),
        ({"after": "1", "starting": "latest"}, "after and starting exclude each other"),
        ({"upto": "1", "ending": "latest"}, "upto and ending exclude each other"),
        ({"table": "a.b", "columns": "a,,b"}, "no list of names"),
    ],
)
def test_what_cannot_be_is_told(given: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Options.of({**HERE, **given})


@pytest.mark.parametrize(
    ("text", "schema", "table"),
    [
        ("public.orders", "public", "orders"),
        ("public.or.ders", "public", "or.ders"),
        ('"a.b".c', "a.b", "c"),
        ('"say ""hi"".x".t', 'say "hi".x', "t"),
        ("Ünï.Größe x", "Ünï", "Größe x"),
    ],
)
def test_tables(text: str, schema: str, table: str) -> None:
    assert parse_table(text) == (schema, table)
    assert parse_table(table_name(schema, table)) == (schema, table)


def test_places() -> None:
    assert parse_place("EARLIEST") == Earliest()
    assert parse_place("16/B374D848") == Lsn(0x16B374D848)
    assert parse_place("2026-01-31T12:00:00") == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert parse_place("2026-01-31T12:00:00+02:00") == datetime(2026, 1, 31, 10, tzinfo=UTC)


def test_names() -> None:
    assert parse_names("a, b ,c") == ("a", "b", "c")
    assert parse_names('"a,b",c,"say ""hi"""') == ("a,b", "c", 'say "hi"')
    assert parse_names("*") == ("*",)
