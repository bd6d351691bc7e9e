"""COPY's text format, against PostgreSQL's documentation of it; tests/integration has PostgreSQL itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.capture.snapshot_copy import fields, unescaped
from walstream.errors import DecodeError

WRITTEN = {
    "\b": r"\b",
    "\f": r"\f",
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
    "\v": r"\v",
    "\\": r"\\",
}

texts = st.text(st.one_of(st.sampled_from([*WRITTEN, '"', "N", "x", "0", "7", "."]), st.characters(codec="utf-8")))


def as_postgres_writes(value: str | None) -> bytes:
    """What CopyAttributeOutText does."""
    return rb"\N" if value is None else "".join(WRITTEN.get(letter, letter) for letter in value).encode()


@given(st.lists(st.none() | texts, min_size=1))
def test_what_postgresql_writes_is_read_back(values: list[str | None]) -> None:
    line = b"\t".join(map(as_postgres_writes, values)) + b"\n"
    assert fields(line) == [None if value is None else value.encode() for value in values]


ESCAPES = st.one_of(
    st.sampled_from(
        [(rb"\b", b"\b"), (rb"\f", b"\f"), (rb"\n", b"\n"), (rb"\r", b"\r"), (rb"\t", b"\t"), (rb"\v", b"\v")]
    ),
    st.integers(0, 255).map(lambda byte: (b"\\%03o" % byte, bytes((byte,)))),
    st.integers(0, 255).map(lambda byte: (b"\\x%02x" % byte, bytes((byte,)))),
    st.integers(0, 255).map(lambda byte: (b"\\x%02X" % byte, bytes((byte,)))),
    st.sampled_from([byte for byte in range(256) if byte not in b"01234567bfnrtvxN\t\n"]).map(
        lambda byte: (b"\\" + bytes((byte,)), bytes((byte,)))
    ),
    st.sampled_from([byte for byte in range(256) if byte not in b"\\\t\n"]).map(
        lambda byte: (bytes((byte,)), bytes((byte,)))
    ),
)


@given(st.lists(ESCAPES))
def test_every_documented_escape_is_understood(pieces: list[tuple[bytes, bytes]]) -> None:
    assert unescaped(b"".join(written for written, _ in pieces)) == b"".join(meant for _, meant in pieces)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        (b"\n", [b""]),
        (b"\t\n", [b"", b""]),
        (b"\\N\n", [None]),
        (b"\\\\N\n", [b"\\N"]),
        (b"a\\N\t\\N\n", [b"aN", None]),
        (b"\\1\\12\\1234\n", [b"\x01\x0aS4"]),
        (b"\\x\\xg\\x4\\x414\n", [b"xxg\x04A4"]),
        (b"\\777\n", [b"\xff"]),
    ],
)
def test_corners(line: bytes, values: list[bytes | None]) -> None:
    assert fields(line) == values


@pytest.mark.parametrize("line", [b"", b"1\t2"])
def test_a_line_without_an_end_is_refused(line: bytes) -> None:
    with pytest.raises(DecodeError):
        fields(line)
