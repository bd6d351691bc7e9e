"""Envelopes to columns: whole chunks by Arrow against value by value, several versions, what no type holds."""

from __future__ import annotations

import base64
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark.envelopes import arrow, column, envelope, numeric, version
from walstream.errors import UsageError, ValueUnrepresentable
from walstream.spark.decoding import Decoder, NotEnvelopes, is_of_snapshot
from walstream.spark.layouts import from_base64, layouts
from walstream.spark.types import TableVersion

_texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
_floats = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["NaN", "Infinity", "-Infinity"]))
_moments = st.datetimes().map(lambda moment: moment.isoformat())
_bytes = st.binary(max_size=20).map(lambda data: base64.b64encode(data).decode())
_decimals = st.integers(-(10**10), 10**10).map(lambda number: f"{number / 100:.2f}")
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int2": st.integers(-(2**15), 2**15 - 1),
    "int4": st.integers(-(2**31), 2**31 - 1),
    "int8": st.integers(-(2**63), 2**63 - 1),
    "oid": st.integers(0, 2**32 - 1),
    "float8": _floats,
    "bool": st.booleans(),
    "numeric": _decimals,
    "timestamp": _moments,
    "timestamptz": _moments.map(lambda text: text + "Z"),
    "date": st.dates().map(str),
    "bytea": _bytes,
    "uuid": st.uuids().map(str),
    "text": _texts,
}
MODIFIERS = {"numeric": numeric(14, 2)}


def everything() -> TableVersion:
    columns = [column("id", "int8")]
    for name in VALUES:
        columns.append(column(f"c_{name}", name, MODIFIERS.get(name, -1)))
        columns.append(column(f"a_{name}", f"{name}[]", MODIFIERS.get(name, -1)))
    return version(*columns)


rows = st.fixed_dictionaries(
    {"id": st.integers(0, 99)},
    optional={
        **{f"c_{name}": st.one_of(st.none(), values) for name, values in VALUES.items()},
        **{
            f"a_{name}": st.one_of(st.none(), st.lists(st.one_of(st.none(), values), max_size=3))
            for name, values in VALUES.items()
        },
    },
)
operations = st.sampled_from(["c", "u", "d", "t"])


def values_of(changes: list[tuple[str, dict[str, Any]]]) -> list[bytes]:
    found = []
    for number, (op, row) in enumerate(changes):
        before = row if op == "d" else {"id": 0} if op == "u" else None
        after = row if op in "cu" else None
        found.append(envelope(after, before=before, op=op, seq=number))
    return found


def listed(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    return [{name: _same(value) for name, value in row.items()} for row in batch.to_pylist()]


def _same(value: Any) -> Any:
    """NaN is NaN, and 0 is not -0."""
    if isinstance(value, list):
        return [_same(each) for each in value]
    return ("float", "NaN" if math.isnan(value) else repr(value)) if isinstance(value, float) else value


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(operations, rows), min_size=1, max_size=8))
@pytest.mark.parametrize("strings", [(), ("*",)], ids=["typed", "strings"])
def test_whole_chunks_and_single_values_agree(
    strings: tuple[str, ...], changes: list[tuple[str, dict[str, Any]]]
) -> None:
    wanted = everything()
    decoder = Decoder(arrow(wanted, strings), wanted, [wanted])
    values = values_of(changes)
    ((layout, _),) = decoder.groups(values)
    plainly = decoder.finish_plainly(layout, values)
    # The decoder has learned by now which columns to leave out, so that Arrow takes the rest.
    parsed = decoder.parse(layout, values, of_snapshot=False)
    whole = decoder.finish(layout, parsed, values)
    assert whole.schema == plainly.schema == decoder.schema
    assert listed(whole) == listed(plainly)
    (decoded,) = Decoder(arrow(wanted, strings), wanted, [wanted]).decode(values)
    assert listed(decoded) == listed(plainly)


def test_what_every_change_has() -> None:
    wanted = version(column("id", "int4"), column("name", "text"))
    decoder = Decoder(arrow(wanted), wanted, [wanted])
    values = [
        envelope({"id": 1}, op="u", unchanged=["name"], seq=3),
        envelope(None, before={"id": 2}, op="d", seq=4),
        envelope(None, op="t", seq=5),
        envelope({"id": 4, "name": "x"}, op="r", seq=0, snapshot="s-1"),
    ]
    stream, snapshot = (batch.to_pylist() for batch in decoder.decode(values))
    assert [(row["id"], row["name"], row["_op"], row["_seq"]) for row in stream] == [
        (1, None, "u", 3),
        (2, None, "d", 4),
        (None, None, "t", 5),
    ]
    assert [row["_unchanged"] for row in stream] == [["name"], [], []]
    first = stream[0]
    assert (first["_source_epoch"], first["_commit_lsn"], first["_txid"], first["_schema_version"]) == (1, 100, 771, 1)
    assert first["_snapshot"] is None
    assert first["_ts"].isoformat() == "2026-01-31T12:00:00.123000+00:00"
    assert (snapshot[0]["_snapshot"], snapshot[0]["_txid"], snapshot[0]["name"]) == ("s-1", None, "x")


def test_meta_columns_may_be_left_out() -> None:
    wanted = version(column("id", "int4"))
    schema = pa.schema([field for field in arrow(wanted) if field.name in ("id", "_op")])
    (batch,) = Decoder(schema, wanted, [wanted]).decode([envelope({"id": 1})])
    assert batch.to_pylist() == [{"id": 1, "_op": "c"}]


OLD = version(column("id", "int4", attnum=1), column("a", "int4", attnum=2), column("gone", "text", attnum=3))
NEW = version(
    column("id", "int8", attnum=1),
    column("b", "int8", attnum=2),
    column("gone", "bool", attnum=4),
    column("added", "text", attnum=5),
    number=2,
)


def test_rows_of_an_older_version_follow_their_columns() -> None:
    decoder = Decoder(arrow(NEW), NEW, [OLD, NEW])
    values = [
        envelope({"id": 1, "a": 10, "gone": "text"}, number=1),
        envelope({"id": 2, "b": 1 << 40, "gone": True, "added": "x"}, number=2),
        envelope({"id": 3, "gone": "more"}, number=1, op="u", unchanged=["a"]),
    ]
    found = {row["id"]: row for batch in decoder.decode(values) for row in batch.to_pylist()}
    assert [(row["b"], row["gone"], row["added"]) for _, row in sorted(found.items())] == [
        (10, None, None),
        (1 << 40, True, "x"),
        (None, None, None),
    ]
    assert found[3]["_unchanged"] == ["b"]
    assert found[3]["_schema_version"] == 1


def test_an_older_version_may_be_wanted() -> None:
    decoder = Decoder(arrow(OLD), OLD, [OLD, NEW])
    (batch,) = decoder.decode([envelope({"id": 2, "b": 5, "gone": True, "added": "x"}, number=2)])
    row = batch.to_pylist()[0]
    assert (row["id"], row["a"], row["gone"]) == (2, 5, None)


def test_versions_that_agree_are_parsed_together() -> None:
    one = version(column("id", "int4"), column("a", "text"))
    two = version(column("id", "int8"), column("a", "text"), column("b", "int4"), number=2)
    found = layouts([one, two], two, list(arrow(two))[:3])
    assert found[1] is found[2]
    changed = version(column("id", "int4"), column("a", "int4"), number=3)
    found = layouts([one, two, changed], two, list(arrow(two))[:3])
    assert found[1] is not found[3]


@pytest.mark.parametrize(
    ("old", "value", "new", "expected"),
    [
        ("int4", 7, "text", "7"),
        ("int4", 7, "int8", 7),
        ("int4", 7, "numeric", "7.00"),
        ("int4", 7, "float8", 7.0),
        ("bool", True, "text", "true"),
        ("float8", 1.5, "text", "1.5"),
        ("float4", 1.5, "float8", 1.5),
        ("numeric", "7", "int4", 7),
        ("timestamptz", "2026-01-31T12:00:00Z", "text", "2026-01-31T12:00:00Z"),
        ("int4[]", [1, None], "int8[]", [1, None]),
        ("int4[]", [1, None], "text", "[1,null]"),
        ("text", "x", "int4", ValueUnrepresentable),
        ("int8", 1 << 40, "int4", ValueUnrepresentable),
        ("float8", 1.5, "int4", ValueUnrepresentable),
        ("text", "x", "text[]", ValueUnrepresentable),
        ("int4", 1, "bool", ValueUnrepresentable),
        ("text", "AP8=", "bytea", ValueUnrepresentable),
        ("int4", 1, "date", ValueUnrepresentable),
    ],
)
def test_a_column_whose_type_has_changed(old: str, value: Any, new: str, expected: Any) -> None:
    before = version(column("id", "int4"), column("a", old))
    after = version(column("id", "int4"), column("a", new, MODIFIERS.get(new, -1)), number=2)
    decoder = Decoder(arrow(after), after, [before, after])
    values = [envelope({"id": 1, "a": value}, number=1), envelope({"id": 1, "a": None}, number=1)]
    if isinstance(expected, type):
        with pytest.raises(expected, match=r"public\.orders: the column a holds"):
            decoder.decode(values)
    else:
        (batch,) = decoder.decode(values)
        found = batch.to_pylist()[0]["a"]
        assert (str(found) if new == "numeric" else found) == expected
        assert batch.to_pylist()[1]["a"] is None


def test_a_value_that_cannot_be_is_told_with_its_place() -> None:
    wanted = version(column("id", "int4"), column("part", "text"), column("at", "timestamptz"), key=("id", "part"))
    decoder = Decoder(arrow(wanted), wanted, [wanted])
    values = [envelope({"id": 1, "part": "x", "at": "2026-01-31T12:00:00Z"})]
    values.append(envelope({"id": 2, "part": "y", "at": "infinity"}, seq=9, commit_lsn=0x16B374D848))
    with pytest.raises(ValueUnrepresentable) as raised:
        decoder.decode(values)
    assert raised.value.message == (
        'public.orders: the column at holds infinity at LSN 16/B374D848, seq 9, in the row with id 2, part "y"; '
        "its type, timestamp[us, tz=UTC], cannot."
    )
    assert raised.value.hint == "Read the column as a string: strings=at."


@pytest.mark.parametrize("value", [b"", b"x", b"{}", b"{}\n{}", b'{"source":{"gen":1}}', b"[1]"])
def test_what_is_no_envelope(value: bytes) -> None:
    wanted = version(column("id", "int4"))
    decoder = Decoder(arrow(wanted), wanted, [wanted])
    with pytest.raises(NotEnvelopes):
        decoder.decode([value])


def test_rows_of_snapshots_are_told_apart_whatever_columns_are_called() -> None:
    assert not is_of_snapshot(envelope({"snapshot": "x", "b": '"snapshot":"'}, unchanged=["snapshot"]))
    assert is_of_snapshot(envelope({"snapshot": False}, snapshot="s"))


@given(st.lists(st.one_of(st.none(), st.binary(max_size=12)), max_size=20), st.integers(0, 5))
def test_base64_of_a_column(found: list[bytes | None], skipped: int) -> None:
    written = [None if each is None else base64.b64encode(each).decode() for each in found]
    assert from_base64(pa.array(written, pa.string()).slice(skipped)).to_pylist() == found[skipped:]


def test_columns_of_the_same_name_as_those_of_every_change() -> None:
    with pytest.raises(UsageError, match="has a column _op, which every change has"):
        version(column("id", "int4"), column("_op", "text")).changes()
    assert version(column("id", "int4"), column("_op", "text")).changes(columns=["id"]).names[0] == "id"
    with pytest.raises(UsageError, match="has no column 'x'"):
        version(column("id", "int4")).changes(columns=["x"])


def test_nothing_for_arrow_to_parse() -> None:
    wanted = version(column("a", "float8[]"), key=())
    decoder = Decoder(arrow(wanted, ["a"]), wanted, [wanted])
    (batch,) = decoder.decode([envelope({"a": [1.5, "NaN"]}), envelope(None, before={"a": None}, op="d")])
    assert [row["a"] for row in batch.to_pylist()] == ['[1.5,"NaN"]', None]


def test_values_that_are_not_numbers_are_left_to_the_slower_way_from_then_on() -> None:
    wanted = version(column("id", "int4"), column("a", "float8"))
    decoder = Decoder(arrow(wanted), wanted, [wanted])
    ((layout, _),) = decoder.groups([])
    values = [envelope({"id": 1, "a": "NaN"})]
    with pytest.raises(pa.ArrowInvalid):
        decoder.parse(layout, values, of_snapshot=False)
    decoder.decode(values)
    parsed = decoder.parse(layout, values, of_snapshot=False)
    assert math.isnan(decoder.finish(layout, parsed, values).to_pylist()[0]["a"])
