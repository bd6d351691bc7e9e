"""A record as `tail` shows it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from walstream.cli.rendering import Line, Seen, Template, to_json
from walstream.errors import UsageError

RECORD = Seen("orders", 3, 42, 1_769_860_800_123, b"k", b'{"id": 1}', (("op", b"c"), ("none", None)))


def test_line_for_people() -> None:
    line = '2026-01-31T12:00:00.123Z  3@42  k  op=c  none=(null)  {"id": 1}'
    assert Line().show(RECORD) == line


def test_json_that_does_not_fit_is_indented() -> None:
    shown = Line(width=30).show(replace(RECORD, headers=()))
    assert shown.splitlines()[1:] == ["    {", '      "id": 1', "    }"]


def test_text_that_does_not_fit_stays_a_line() -> None:
    assert "\n" not in Line(width=30).show(replace(RECORD, value=b"x" * 500))


def test_null_and_empty_are_told_apart() -> None:
    assert Line().show(replace(RECORD, value=None, headers=())).endswith("k  (null)")
    assert Line().show(replace(RECORD, value=b"", headers=())).endswith("k  ")


def test_bytes_that_are_no_text() -> None:
    assert "0xff00" in Line().show(replace(RECORD, value=b"\xff\x00"))
    assert "(1,000 bytes)" in Line().show(replace(RECORD, value=b"\xff" * 1000))


def test_control_characters_are_escaped() -> None:
    shown = Line().show(replace(RECORD, key=b"\x1b[2J", value=b"a\nb", headers=(("\x07", b"\x08"),)))
    assert not any(ord(character) < 32 for character in shown)


def test_colours() -> None:
    plain, coloured = Line().show(RECORD), Line(is_coloured=True).show(RECORD)
    assert "\x1b[36m3@42\x1b[0m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


def test_json() -> None:
    assert json.loads(to_json(RECORD)) == {
        "topic": "orders",
        "partition": 3,
        "offset": 42,
        "timestamp_ms": 1_769_860_800_123,
        "key": "k",
        "value": '{"id": 1}',
        "headers": [{"name": "op", "value": "c"}, {"name": "none", "value": None}],
    }


def test_json_of_bytes_that_are_no_text() -> None:
    document = json.loads(to_json(replace(RECORD, value=b"\xff\x00", key=None)))
    assert (document["value"], document["value_base64"], document["key"]) == (None, "/wA=", None)
    assert "key_base64" not in document


def test_template() -> None:
    assert Template(r"{partition}@{offset:05d}\t{key}={value}").fill(RECORD) == '3@00042\tk={"id": 1}'
    assert Template("{timestamp} {timestamp_ms} {key_bytes} {value_bytes} {headers}").fill(RECORD) == (
        "2026-01-31T12:00:00.123Z 1769860800123 1 9 op=c,none=(null)"
    )


def test_template_with_an_unknown_field() -> None:
    with pytest.raises(UsageError, match=r"knows no field \{ofset\}; the nearest is \{offset\}"):
        Template("{ofset}")


@pytest.mark.parametrize("text", ["{", "{}", "{key.__class__}", "{0}"])
def test_template_that_is_none(text: str) -> None:
    with pytest.raises(UsageError):
        Template(text)


def test_template_that_cannot_be_filled() -> None:
    with pytest.raises(UsageError, match="cannot be filled"):
        Template("{key:d}").fill(RECORD)
