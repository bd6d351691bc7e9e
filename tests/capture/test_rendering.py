"""All ways of rendering a row write the same bytes: the generated functions, the plain reading, and the oracle."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture import wal
from capture.wal import Col, Table, delete, insert, update
from walstream.capture import shapes
from walstream.errors import DecodeError
from walstream.postgres.messages import UNCHANGED, Value


@pytest.fixture(autouse=True)
def _learn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape gets its function after one row, so that each row is rendered in all ways."""
    monkeypatch.setattr(shapes, "SAMPLED_ROWS", 1)
    monkeypatch.setattr(shapes, "SAMPLES_MIN", 1)
    monkeypatch.setattr(shapes, "LEARNED_MAX", 100)


# Text that is easily taken for something else: letters of the protocol, quotes, controls, the edges of lengths.
_tricky = st.sampled_from('tnuNKO"\\{},;\x01\n\t\r\x7f é€😀 ')
_text = st.one_of(
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=20),
    st.text(_tricky, max_size=12),
    st.sampled_from(["", "t", "n", "u", "nn", "tn", "x" * 255, "x" * 256, "n" * 257, "\x01t" * 40, "y" * 70_000]),
)


def _texts(*examples: str) -> st.SearchStrategy[str]:
    return st.sampled_from(examples)


def _array_text(values: object) -> str:
    if isinstance(values, list):
        return "{" + ",".join(map(_array_text, values)) + "}"
    if values is None:
        return "NULL"
    return '"' + str(values).replace("\\", "\\\\").replace('"', '\\"') + '"'


_arrays = st.one_of(
    st.lists(st.one_of(_text, st.none()), max_size=5),
    st.lists(st.lists(st.one_of(_text, st.none()), min_size=2, max_size=2), min_size=1, max_size=3),
).map(_array_text)

VALUES: dict[int, st.SearchStrategy[str]] = {
    wal.BOOL: _texts("t", "f"),
    wal.INT8: st.integers(-(2**63), 2**63 - 1).map(str),
    wal.TEXT: _text,
    wal.JSONB: st.recursive(st.one_of(st.none(), st.booleans(), _text), lambda c: st.lists(c, max_size=3)).map(
        lambda value: json.dumps(value, ensure_ascii=False)
    ),
    wal.FLOAT8: st.one_of(st.floats().map(repr), _texts("NaN", "Infinity", "-Infinity", "1e+20", "-0", "5e-324")),
    wal.NUMERIC: _texts("0", "-12.50", "NaN", "Infinity", "1" * 300),
    wal.TIMESTAMP: _texts(
        "2024-02-29 12:00:00.5", "infinity", "-infinity", "0044-03-15 00:00:00 BC", "294276-12-31 23:59:59"
    ),
    wal.TIMESTAMPTZ: _texts(
        "2024-02-29 12:00:00+00", "infinity", "0044-03-15 00:00:00.25+00 BC", "12024-01-01 00:00:00+00"
    ),
    wal.BYTEA: st.binary(max_size=40).map(lambda value: "\\x" + value.hex()),
    wal.UUID: st.uuids().map(str),
    wal.INT8S: _texts("{}", "{1,2}", "{1,NULL}", "{{1,2},{3,4}}", "[0:1]={1,2}"),
    wal.TEXTS: st.one_of(_arrays, _texts("{a,b c,NULL}", '{"NULL"}', '[2:3]={a,"b"}')),
}
VALUES[wal.FLOAT8] = VALUES[wal.FLOAT8].map(
    lambda text: {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
)

_names = st.one_of(st.text("abct_", min_size=1, max_size=4), _text.filter(lambda name: 0 < len(name) < 63))


@st.composite
def _tables(draw: st.DrawFn) -> tuple[list[Col], str]:
    names = draw(st.lists(_names, min_size=0, max_size=6, unique=True))
    identity = draw(st.sampled_from("dfi"))
    oids = draw(st.lists(st.sampled_from(list(VALUES)), min_size=len(names), max_size=len(names)))
    keys = draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    return [Col(*column) for column in zip(names, oids, keys, strict=True)], identity


@st.composite
def _stories(draw: st.DrawFn) -> tuple[Table, list[bytes]]:
    """A table and some messages about it, each of them three times."""
    columns, identity = draw(_tables())
    key = tuple(column.name for column in columns if column.is_key)
    table = Table(*columns, identity=identity, primary_key=key if identity == "f" else ())

    def values(*, may_be_unsent: bool = False) -> list[Value]:
        return [
            draw(VALUES[column.oid]).encode()
            if column.is_key or (choice := draw(st.integers(0, 3 if may_be_unsent else 2))) < 2
            else None
            if choice == 2
            else UNCHANGED
            for column in columns
        ]

    def old() -> tuple[list[Value], bytes]:
        if identity == "f":
            return values(), b"O"
        return [value if column.is_key else None for column, value in zip(columns, values(), strict=True)], b"K"

    rows = []
    for kind in draw(st.lists(st.sampled_from("IUUD"), min_size=1, max_size=3)):
        if kind == "I":
            rows.append(insert(*values()))
        elif kind == "D":
            before, letter = old()
            rows.append(delete(*before, kind=letter))
        else:
            new = values(may_be_unsent=True)
            before, letter = old()
            if draw(st.booleans()):
                before = [b if n is None or not c.is_key else n for c, b, n in zip(columns, before, new, strict=True)]
            has_old = identity == "f" or (key and draw(st.booleans()))
            if has_old and draw(st.booleans()):
                new = [UNCHANGED if c.is_key else n for c, n in zip(columns, new, strict=True)]
            rows.append(update(new, before if has_old else None, letter))
    return table, [row for row in rows for _ in range(3)]


@settings(max_examples=400, deadline=None)
@given(_stories())
def test_every_way_of_rendering_writes_the_same_bytes(story: tuple[Table, list[bytes]]) -> None:
    table, rows = story
    assert table.render(*rows) == table.expected(*rows)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rows_of_a_snapshot_are_the_same_as_inserted_ones(data: st.DataObject) -> None:
    columns, _ = data.draw(_tables())
    table = Table(*columns)
    values = [data.draw(st.one_of(VALUES[column.oid].map(str.encode), st.none())) for column in columns]
    assert table.snapshot(*[wal.copy_line(*values)] * 3) == [table.expected_snapshot(values)] * 3


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.sampled_from([b"I", b"U", b"D"]), st.sampled_from("df"))
def test_whatever_the_bytes_the_error_is_named_and_carries_them(data: bytes, kind: bytes, identity: str) -> None:
    table = Table(Col("id", wal.INT8, True), Col("name"), identity=identity)
    row = kind + wal.RELATION_ID.to_bytes(4) + data
    refused: list[DecodeError] = []
    list(table.renderer.render([table.description, row], wal.STAMP, lambda error, _: refused.append(error)))
    assert all(error.data == row for error in refused)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(_text.map(str.encode), st.none()), min_size=2, max_size=2), st.data())
def test_a_row_that_lacks_a_column_is_refused(values: list[bytes | None], data: st.DataObject) -> None:
    table = Table(Col("a"), Col("b"))
    row = insert(*values)
    cut = data.draw(st.integers(6, len(row) - len(values[1] or b"") - 1))
    with pytest.raises(DecodeError):
        table.render(row[:cut])
    with pytest.raises(DecodeError):
        table.render(insert(*values, b"x"))
    with pytest.raises(DecodeError):
        table.render(insert(*values[:1]))


@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 257, 1600])
def test_any_number_of_columns(count: int) -> None:
    for identity in "df":
        table = Table(*(Col(f"c{index}", is_key=index == 0) for index in range(count)), identity=identity)
        whole = [b"tn%d" % index for index in range(count)]
        holes = [None if index % 3 == 1 else value for index, value in enumerate(whole)]
        old, letter = (whole, b"O") if identity == "f" else ([*whole[:1], *[None] * (count - 1)][:count], b"K")
        rows = [
            *(insert(*values) for values in (whole, holes, holes, holes)),
            update(whole, old if identity == "f" else None, letter),
            delete(*old, kind=letter),
        ]
        assert table.render(*rows) == table.expected(*rows)
        line = wal.copy_line(*holes)
        assert table.snapshot(line, line) == [table.expected_snapshot(holes)] * 2


def test_a_value_of_sixteen_mebibytes_is_read_plainly() -> None:
    # Its length begins with a byte other than zero, and goes on with what looks like a column.
    table = Table(Col("a"), Col("b"))
    for size in (0x01_74_00_01, 0x01_00_00_00, 0x00_FF_FF_FF):
        row = insert(b"x", b"y" * size)
        assert table.render(row) == table.expected(row)


def test_relation_ids_that_look_like_columns() -> None:
    for relation_id in (0x74_00_00_00, 0x00_74_00_00, 0x00_00_00_74, 0x4E_00_02_74):
        table = Table(Col("a"), Col("b"))
        described = wal.relation(Col("a"), Col("b"), relation_id=relation_id)
        (record,) = table.renderer.render([described, insert(b"x", b"y", relation_id=relation_id)], wal.STAMP)
        assert json.loads(record[1] or b"")["after"] == {"a": "x", "b": "y"}
