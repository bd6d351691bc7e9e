"""A value's JSON as a value of its Spark type, one by one: the plain way, right for every value.

Owns which values a type can hold; refuses to know rows. decoding.py parses whole columns with Arrow and comes here with
what that does not take: floats that are not numbers, columns that are strings of something else, values that no type
holds. The two agree wherever both have an answer, which a test proves. Sans-IO.

A converter takes the JSON text of a value that is not null and raises ValueError for what its type cannot hold: an
infinite date, a year BC or beyond 9999, NaN in a decimal, an array of arrays or one whose subscripts begin elsewhere.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from walstream.spark.types import Wire

Converter: TypeAlias = Callable[[bytes], Any]

NULL: Final = b"null"
_QUOTE: Final = ord('"')
_OPEN: Final = ord("[")

_text = msgspec.json.Decoder(str).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode

_is_integer = re.compile(r"-?\d+").fullmatch
_is_float = re.compile(r"-?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|Infinity)|NaN").fullmatch
_is_decimal = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?").fullmatch
_is_day = re.compile(r"\d{4}-\d\d-\d\d").fullmatch
_is_moment = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?Z?").fullmatch


def converter(written: tuple[Wire, bool], target: pa.DataType) -> Converter:
    """Return the function from the JSON of a column's values, written in that way, to values of an Arrow type."""
    wire, is_array = written
    if pa.types.is_string(target):
        return as_text
    if is_array != pa.types.is_list(target):
        return _refuse
    if is_array:
        return _array(_scalar(wire, target.value_type))
    return _scalar(wire, target)


def as_text(raw: bytes) -> str:
    """Return a string as itself, and anything else as its JSON."""
    return _text(raw) if raw[0] == _QUOTE else raw.decode()


def _refuse(raw: bytes) -> Any:
    raise ValueError(as_text(raw))


def _scalar(wire: Wire, target: pa.DataType) -> Converter:
    if pa.types.is_string(target):
        return _string
    if pa.types.is_binary(target):
        return _bytes if wire is Wire.BYTES else _refuse
    if wire is Wire.BYTES:
        return _refuse
    if pa.types.is_boolean(target):
        return _bool
    if wire is Wire.BOOL:
        return _refuse
    if pa.types.is_integer(target):
        return _integer(target.bit_width)
    if pa.types.is_floating(target):
        return _float
    if pa.types.is_decimal(target):
        return _decimal(target.precision, target.scale)
    if pa.types.is_timestamp(target):
        return _moment if target.tz is None else _instant
    assert pa.types.is_date(target), f"{target} is no type of a column"
    return _day


def _string(raw: bytes) -> str:
    if raw[0] == _OPEN:
        raise ValueError("an array in an array")
    return as_text(raw)


def _bool(raw: bytes) -> bool:
    if raw not in (b"true", b"false"):
        raise ValueError(as_text(raw))
    return raw == b"true"


def _integer(bits: int) -> Converter:
    limit = 1 << (bits - 1)

    def convert(raw: bytes) -> int:
        text = as_text(raw)
        if not _is_integer(text) or not -limit <= int(text) < limit:
            raise ValueError(text)
        return int(text)

    return convert


def _float(raw: bytes) -> float:
    text = as_text(raw)
    if not _is_float(text):
        raise ValueError(text)
    return float(text)


def _decimal(precision: int, scale: int) -> Converter:
    limit = Decimal(10) ** (precision - scale)

    def convert(raw: bytes) -> Decimal:
        text = as_text(raw)
        try:
            number = Decimal(text) if _is_decimal(text) else Decimal("NaN")
        except InvalidOperation:
            raise ValueError(text) from None
        exponent = number.as_tuple().exponent
        if not isinstance(exponent, int) or exponent < -scale or number.copy_abs() >= limit:
            raise ValueError(text)
        return number

    return convert


def _moment(raw: bytes) -> datetime:
    text = as_text(raw)
    if not _is_moment(text):
        raise ValueError(text)
    return datetime.fromisoformat(text.removesuffix("Z"))


def _instant(raw: bytes) -> datetime:
    return _moment(raw).replace(tzinfo=UTC)


def _day(raw: bytes) -> date:
    text = as_text(raw)
    if not _is_day(text):
        raise ValueError(text)
    return date.fromisoformat(text)


def _bytes(raw: bytes) -> bytes:
    try:
        return a2b_base64(_text(raw), strict_mode=True)
    except (ValueError, msgspec.DecodeError):
        raise ValueError(raw[:40].decode(errors="replace")) from None


def _array(element: Converter) -> Converter:
    def convert(raw: bytes) -> list[Any]:
        if raw[0] != _OPEN:
            raise ValueError(as_text(raw))
        found = []
        for each in _elements(raw):
            one = bytes(each)
            if one[0] == _OPEN:
                raise ValueError("an array of arrays")
            found.append(None if one == NULL else element(one))
        return found

    return convert
