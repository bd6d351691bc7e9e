"""Values as JSON: the ones that are easily got wrong, by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture import wal
from capture.wal import json_array
from walstream.capture.columns import converter
from walstream.capture.escaping import quoted
from walstream.postgres.types import TypeFacts, TypeInfo, Types

TYPES = Types()


def written(oid: int, text: str) -> str:
    return converter(TYPES.resolve(oid))(text.encode()).decode()


@pytest.mark.parametrize(
    ("oid", "text", "expected"),
    [
        (wal.BOOL, "t", "true"),
        (wal.BOOL, "f", "false"),
        (wal.INT8, "-9223372036854775808", "-9223372036854775808"),
        (wal.FLOAT8, "1e+20", "1e+20"),
        (wal.FLOAT8, "-0", "-0"),
        (wal.FLOAT8, "NaN", '"NaN"'),
        (wal.FLOAT8, "-Infinity", '"-Infinity"'),
        (wal.NUMERIC, "1.50", '"1.50"'),
        (wal.NUMERIC, "NaN", '"NaN"'),
        (wal.TIMESTAMP, "2024-02-29 12:00:00.5", '"2024-02-29T12:00:00.5"'),
        (wal.TIMESTAMP, "0044-03-15 00:00:00 BC", '"0044-03-15T00:00:00 BC"'),
        (wal.TIMESTAMP, "-infinity", '"-infinity"'),
        (wal.TIMESTAMPTZ, "2024-02-29 12:00:00+00", '"2024-02-29T12:00:00Z"'),
        (wal.TIMESTAMPTZ, "0044-03-15 00:00:00.25+00 BC", '"0044-03-15T00:00:00.25Z BC"'),
        (wal.TIMESTAMPTZ, "2024-02-29 12:00:00+05:30", '"2024-02-29T12:00:00+05:30"'),
        (wal.TIMESTAMPTZ, "infinity", '"infinity"'),
        (wal.BYTEA, r"\x", '""'),
        (wal.BYTEA, r"\x00ff", '"AP8="'),
        (wal.JSONB, '{"a": "\\n"}', '"{\\"a\\": \\"\\\\n\\"}"'),
        (wal.TEXT, 'say "hi"\\\n\x01\x7fé', '"say \\"hi\\"\\\\\\n\\u0001\x7fé"'),
        (wal.INT8S, "{}", "[]"),
        (wal.INT8S, "{1,NULL,-3}", "[1,null,-3]"),
        (wal.INT8S, "{{1,2},{3,NULL}}", "[[1,2],[3,null]]"),
        (wal.INT8S, "[0:1]={1,2}", '"[0:1]={1,2}"'),
        (1022, "{1.5,NaN,1e+20}", '[1.5,"NaN",1e+20]'),
        (1000, "{t,f,NULL}", "[true,false,null]"),
        (wal.TEXTS, '{a,"b,c","NULL",NULL,"say \\"hi\\"","back\\\\slash",""}', None),
        (wal.TEXTS, '{"{not an array}"}', '["{not an array}"]'),
        (1115, '{"2024-02-29 12:00:00",infinity}', '["2024-02-29T12:00:00","infinity"]'),
        (1001, r'{"\\x00ff"}', '["AP8="]'),
        (1020, "{(1,1),(0,0);(2,2),(1,1)}", '["(1,1),(0,0)","(2,2),(1,1)"]'),
        (1231, "{1.50,NULL}", '["1.50",null]'),
        (22, "1 2 3", '"1 2 3"'),
    ],
)
def test_values(oid: int, text: str, expected: str | None) -> None:
    if expected is None:
        expected = json.dumps(["a", "b,c", "NULL", None, 'say "hi"', "back\\slash", ""], separators=(",", ":"))
    assert written(oid, text) == expected


def test_domains_are_written_as_what_they_are_made_of() -> None:
    types = Types([TypeFacts(90_000, "public", "positive", "d", base_oid=wal.INT8)])
    assert converter(types.resolve(90_000))(b"5") == b"5"
    assert converter(types.resolve(90_001))(b'a"b') == b'"a\\"b"'


@pytest.mark.parametrize("text", ["", "1", "{1", "1}", "{1}}", "{{1}", '{"a}', "{a\\}", "x{1}"])
def test_text_that_is_no_array_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no array"):
        written(wal.TEXTS, text)


@pytest.mark.parametrize(
    ("oid", "text"), [(wal.BOOL, "true"), (wal.BYTEA, "abc"), (wal.BYTEA, r"\x0"), (wal.BYTEA, r"\xzz")]
)
def test_text_of_another_type_is_refused(oid: int, text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        written(oid, text)


_element = st.one_of(st.none(), st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])))


def _array_out(value: object) -> str:
    """As PostgreSQL's array_out has it: quotes where they are needed."""
    if isinstance(value, list):
        return "{" + ",".join(map(_array_out, value)) + "}"
    if value is None:
        return "NULL"
    text = str(value)
    if text and text.upper() != "NULL" and not any(letter in '{},"\\' or letter.isspace() for letter in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@given(st.one_of(st.lists(_element), st.lists(st.lists(_element, min_size=3, max_size=3), min_size=1)))
def test_arrays_of_texts(values: list[object]) -> None:
    text = _array_out(values)
    assert json.loads(written(wal.TEXTS, text)) == values
    assert written(wal.TEXTS, text) == json_array(_text_type(), text)


def _text_type() -> TypeInfo:
    return TYPES.resolve(wal.TEXT)


@given(st.text(st.characters(blacklist_categories=["Cs"])))
def test_strings_are_those_of_json(text: str) -> None:
    assert quoted(text.encode()) == json.dumps(text, ensure_ascii=False).encode()
