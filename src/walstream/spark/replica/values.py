r"""Values on their way from the log into a replica: columns of strings become lines that COPY reads.

Owns the text that PostgreSQL is given; refuses to know tables and connections. Columns are read from the log as strings
(the option `strings` of the data source), which for most types is a text that PostgreSQL reads as the same value again:
numbers, timestamps with their T and Z, `infinity`, JSON. Two kinds are written otherwise in the log:

    bytea      base64          AP8=                    \x00ff
    arrays     JSON            [1,null] [["a"]]        {1,NULL} {{"a"}}        "[0:1]={a,b}" is the text already

The lines are CSV, which Arrow writes for whole batches at once: strings in quotes, null without.
"""

from __future__ import annotations

import io
from binascii import a2b_base64, hexlify
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.csv

_OPTIONS: Final = pyarrow.csv.WriteOptions(include_header=False)

ToText: TypeAlias = Callable[[str], str]


class ColumnText(NamedTuple):
    """How a column of strings becomes PostgreSQL's text; `delimiter` is for arrays alone."""

    is_bytes: bool = False
    is_array: bool = False
    delimiter: str = ","

    @property
    def is_text_already(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.is_bytes or self.is_array)

    def convert(self, value: str) -> str:
        """Return PostgreSQL's text of a value."""
        if self.is_array:
            return array_text(value, self.delimiter, is_bytes=self.is_bytes)
        return bytea_text(value) if self.is_bytes else value


def bytea_text(value: str) -> str:
    """Return the text of bytes that are written in base64."""
    return value if value.startswith("\\x") else "\\x" + hexlify(a2b_base64(value)).decode()


def array_text(value: str, delimiter: str = ",", *, is_bytes: bool = False) -> str:
    """Return the text of an array that is written in JSON; what is no JSON array is the text already."""
    try:
        found = msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value
    if isinstance(found, str):
        return found
    return _array(found, delimiter, is_bytes)


def _array(values: list[Any], delimiter: str, is_bytes: bool) -> str:
    return "{" + delimiter.join(_element(value, delimiter, is_bytes) for value in values) + "}"


def _element(value: Any, delimiter: str, is_bytes: bool) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list):
        return _array(value, delimiter, is_bytes)
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, str):
        text = bytea_text(value) if is_bytes else value
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def lines(batch: pa.RecordBatch, texts: Mapping[int, ColumnText], more: Sequence[pa.Array] = ()) -> bytes:
    """Write a batch, with `more` columns behind its own, as lines of CSV; `texts` tells which columns to convert."""
    columns: list[pa.Array] = list(batch.columns)
    for number, text in texts.items():
        if not text.is_text_already:
            columns[number] = pa.array(
                [None if value is None else text.convert(value) for value in columns[number].to_pylist()], pa.string()
            )
    whole = pa.table([*columns, *more], names=[f"c{number}" for number in range(len(columns) + len(more))])
    written = io.BytesIO()
    pyarrow.csv.write_csv(whole, written, _OPTIONS)
    return written.getvalue()
