"""Shapes of rows: which columns are there, which are null, which PostgreSQL did not send, which are out of the usual.

Owns the learning of them; refuses to know how a row is read and written. A generated function (codegen.py) takes rows
of one shape. Every operation of a relation has one for the plainest shape, all columns there; this module keeps a few
more for the shapes that come often, because a null column is often null in the next row as well.

Nothing depends on what was learned but speed: a row that no function takes is read column by column, and all ways of
reading write the same bytes. What learning may cost is bounded: a few functions, one look at a row in sixteen that had
to be read column by column, and none of it for a table whose rows have too many shapes. Sans-IO.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from walstream.capture.columns import form
from walstream.capture.provenance import Context
from walstream.postgres.messages import Unchanged, Value
from walstream.postgres.types import TypeInfo

SENT: Final = 0
"""There, and as the form of its type has it."""
ODD: Final = 1
"""There, but only the converter knows how to write it: infinity, NaN, a string that needs escapes."""
NULL: Final = 2
UNSENT: Final = 3
"""Not sent, because an update left it alone."""

Shape: TypeAlias = bytes
"""One of the above for each column. The plainest is all zeros."""

RowFunction: TypeAlias = Callable[[bytes, Context, int], int]
"""(row, context, sequence number) -> the next sequence number, or 0: not taken. The records go to the context."""

SAMPLED_ROWS: Final = 16
"""One of so many rows that were read column by column is looked at."""
SAMPLES_MIN: Final = 4
"""A shape that was seen in so many samples gets a function."""
LEARNED_MAX: Final = 6
"""Functions of an operation beside its first: a row that none takes has tried them all."""
SHAPES_MAX: Final = 1_000
"""Shapes that are counted before counting starts again."""
TRIAL_ROWS: Final = 4_096
"""After so many rows that none took, the functions must have taken as many, or all are given up as not worth trying."""


class Learned:
    """The functions for an operation's frequent shapes, and the plain reading for all the rest."""

    def __init__(
        self, plainly: RowFunction, shape_of: Callable[[bytes], Shape | None], build: Callable[[Shape], RowFunction]
    ) -> None:
        """Take the plain reading, what tells a row's shape (None: not worth a function), and what makes functions."""
        self._plainly = plainly
        self._shape_of = shape_of
        self._build = build
        self._functions: list[RowFunction] = []
        self._taken_count = 0
        self._plain_count = 0
        self._learns = True
        self._samples: Counter[Shape] = Counter()

    def __call__(self, data: bytes, context: Context, seq: int) -> int:
        """Render a row that the first function did not take."""
        functions = self._functions
        for index, function in enumerate(functions):
            if following := function(data, context, seq):
                self._taken_count += 1
                if index:
                    # One place forward: in time the order is that of their frequency.
                    functions[index - 1], functions[index] = function, functions[index - 1]
                return following
        following = self._plainly(data, context, seq)
        if self._learns:
            self._plain_count += 1
            if self._plain_count % SAMPLED_ROWS == 0 and len(functions) < LEARNED_MAX:
                self._learn(data)
            if self._plain_count == TRIAL_ROWS:
                self._judge()
        return following

    def _judge(self) -> None:
        if self._taken_count < self._plain_count:
            self._functions.clear()
            self._learns = False
        self._taken_count = self._plain_count = 0

    def _learn(self, data: bytes) -> None:
        shape = self._shape_of(data)
        if shape is None:
            return
        if len(self._samples) >= SHAPES_MAX:
            self._samples.clear()
        self._samples[shape] += 1
        # Once only: a function that does not take its own shape, whyever, is not made again.
        if self._samples[shape] == SAMPLES_MIN:
            self._functions.append(self._build(shape))


def values_shape(types: Iterable[TypeInfo], values: Sequence[Value]) -> Shape:
    """Return the shape of a tuple."""
    return bytes(_code(known, value) for known, value in zip(types, values, strict=True))


def _code(known: TypeInfo, value: Value) -> int:
    if value is None:
        return NULL
    if isinstance(value, Unchanged):
        return UNSENT
    return SENT if re.fullmatch(form(known, in_copy=False).pattern, value, re.DOTALL) else ODD


def fields_shape(types: Sequence[TypeInfo], line: bytes) -> Shape | None:
    """Return the shape of a row of COPY's text format, whose escapes no function reads."""
    fields = line[:-1].split(b"\t")
    if len(fields) != len(types):
        return None
    codes = [_field_code(known, field) for known, field in zip(types, fields, strict=True)]
    return None if -1 in codes else bytes(codes)


def _field_code(known: TypeInfo, field: bytes) -> int:
    if field == rb"\N":
        return NULL
    if re.fullmatch(form(known, in_copy=True).pattern, field, re.DOTALL):
        return SENT
    return -1 if b"\\" in field else ODD
