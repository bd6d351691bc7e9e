r"""How a column's text becomes JSON, kind by kind, in two ways that agree.

Owns the conversions; refuses to know rows, messages and envelopes. Sans-IO.

- `converter` is a function from any text of the type to JSON: the plain way, right for every value.
- `form` is the fast way for the usual values: a regular expression for them and what to write between its groups. It is
  put into the expression for a whole row, so whatever a form does not match takes the plain way, and a form may be as
  narrow as it likes: `infinity`, years BC, NaN and strings that need escapes are all left to the converters.

    bool        t                               true
    numbers     -12   1e+20   NaN               -12   1e+20   "NaN"
    timestamp   2024-02-29 12:00:00.5           "2024-02-29T12:00:00.5"        infinity stays, BC stays at the end
    timestamptz 2024-02-29 12:00:00.5+00        "2024-02-29T12:00:00.5Z"       the session's time zone is UTC
    bytea       \x00ff                          "AP8="
    array       {1,NULL}                        [1,null]
    others      text                            "text"
"""

from __future__ import annotations

from binascii import a2b_hex, b2a_base64
from typing import Final, NamedTuple

from walstream.capture.arrays import Converter, array_converter
from walstream.capture.escaping import CLEAN_CLASS, QUOTE, quoted
from walstream.postgres.types import Kind, TypeInfo

BOOLS: Final = {b"t": b"true", b"f": b"false"}

_QUOTED_TYPES: Final = {114, 3802}
"""json and jsonb: all but scalars have quotes in them, so their form does not hope for none."""


def plain(text: bytes) -> bytes:
    """Write a string that is known to need no escapes."""
    return QUOTE + text + QUOTE


def number(text: bytes) -> bytes:
    """Write an integer."""
    return text


def boolean(text: bytes) -> bytes:
    """Write a bool. Raises KeyError."""
    return BOOLS[text]


def floating(text: bytes) -> bytes:
    """Write a float: a number when JSON has one, otherwise a string (NaN, Infinity, -Infinity)."""
    return QUOTE + text + QUOTE if text[-1:] in (b"N", b"y") else text


def timestamp(text: bytes) -> bytes:
    """Write a timestamp without zone."""
    return QUOTE + text.replace(b" ", b"T", 1) + QUOTE


def timestamptz(text: bytes) -> bytes:
    """Write a timestamp in UTC; another zone than that, which our sessions never have, would stay as it is."""
    instant, space, era = text.partition(b" BC")
    if instant.endswith(b"+00"):
        instant = instant[:-3] + b"Z"
    return QUOTE + instant.replace(b" ", b"T", 1) + space + era + QUOTE


def binary(text: bytes) -> bytes:
    """Write bytea in base64. Raises ValueError."""
    return QUOTE + b2a_base64(unhex(text), newline=False) + QUOTE


def unhex(text: bytes) -> bytes:
    r"""Return the bytes behind `\x00ff`. Raises ValueError."""
    if text[:2] != rb"\x":
        raise ValueError(f"{text[:40]!r} is no bytea in hexadecimal")
    return a2b_hex(text[2:])


_CONVERTERS: Final[dict[Kind, Converter]] = {
    Kind.BOOL: boolean,
    Kind.NUMBER: number,
    Kind.FLOAT: floating,
    Kind.STRING: quoted,
    Kind.PLAIN: plain,
    Kind.TIMESTAMP: timestamp,
    Kind.TIMESTAMPTZ: timestamptz,
    Kind.BYTEA: binary,
}


def converter(type_info: TypeInfo) -> Converter:
    """Return the function that writes any value of the type, which raises ValueError or KeyError for other text."""
    if type_info.kind is not Kind.ARRAY:
        return _CONVERTERS[type_info.kind]
    element = type_info.element
    assert element is not None, "an array has an element"
    is_number = element.kind in (Kind.NUMBER, Kind.FLOAT)
    return array_converter(converter(element), type_info.delimiter, is_number=is_number)


class Form(NamedTuple):
    """The usual values of a type: an expression with groups, and Python source that writes them.

    `pieces` are bytes to write as they are, or the source of an expression, in which `{0}` and `{1}` are the groups
    and `{convert}` is the type's converter.
    """

    pattern: bytes
    pieces: tuple[bytes | str, ...]
    group_count: int = 1
    is_open: bool = False
    """Whether the text, which is the only group then, may end in any letter."""


_DAY: Final = rb"([0-9]+-[0-9][0-9]-[0-9][0-9])"
_TIME: Final = rb"([0-9:.]+)"
_ANY: Final = rb"(ANY*)"

_FORMS: Final[dict[Kind, Form]] = {
    Kind.BOOL: Form(rb"([tf])", ("BOOLS[{0}]",)),
    Kind.NUMBER: Form(rb"(-?[0-9]+)", ("{0}",)),
    Kind.FLOAT: Form(rb"(-?[0-9][-+.0-9e]*)", ("{0}",)),
    Kind.STRING: Form(b"(" + CLEAN_CLASS + b"*)", (QUOTE, "{0}", QUOTE), is_open=True),
    Kind.PLAIN: Form(_ANY, (QUOTE, "{0}", QUOTE), is_open=True),
    Kind.TIMESTAMP: Form(_DAY + b" " + _TIME, (QUOTE, "{0}", b"T", "{1}", QUOTE), 2),
    Kind.TIMESTAMPTZ: Form(_DAY + b" " + _TIME + rb"\+00", (QUOTE, "{0}", b"T", "{1}", b'Z"'), 2),
    Kind.BYTEA: Form(rb"BACKSLASHx([0-9a-f]*)", (QUOTE, "b2a_base64(a2b_hex({0}), newline=False)", QUOTE)),
}
_CONVERTED: Final = Form(_ANY, ("{convert}({0})",), is_open=True)
"""For any text of any type."""

# What stands for a byte of a value, and for a backslash in it, in the two places a text comes from. In a pgoutput
# message a value ends where the next zero byte says so; COPY ends it with a tab and writes a backslash twice.
_IN_MESSAGE: Final = {b"ANY": rb"[^\x00]", b"BACKSLASH": rb"\\"}
_IN_COPY: Final = {b"ANY": rb"[^\t\n\\]", b"BACKSLASH": rb"\\\\"}


def form(type_info: TypeInfo, *, in_copy: bool, is_odd: bool = False, as_text: bool = False) -> Form:
    """Return the form of a type: for values that are odd the one for any text; `as_text` wants a group of the text."""
    found = _FORMS.get(type_info.kind, _CONVERTED)
    is_text = found.group_count == 1 and found.pattern[:1] == b"("
    if is_odd or type_info.base_oid in _QUOTED_TYPES or (as_text and not is_text):
        found = _CONVERTED
    pattern = found.pattern
    for name, expression in (_IN_COPY if in_copy else _IN_MESSAGE).items():
        pattern = pattern.replace(name, expression)
    return found._replace(pattern=pattern)
