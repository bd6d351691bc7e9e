r"""The generated functions: for a relation, an operation and a shape of row, from its bytes straight to its records.

Owns their source, which is readable and kept (`function.source`); refuses to know which records an operation makes
(rendering.py) and which shapes are worth it (shapes.py). A generated function does one thing: it matches the whole row
with one expression made of the columns' forms, and joins the groups with constants.

Why a match is right, given a whole message as PostgreSQL frames it. In a tuple, a column that is sent is `t`, a length
of four bytes, and text, which holds no zero byte; any other column is one letter. A message is shorter than 16 MiB
here, so a length begins with a zero byte. The expression has, in order, `t\0...` and a part without zero bytes for each
column that its shape has as sent, and `n` or `u` for the others. Letters before the first `t` are met literally. From
then on each part runs to the `t\0` of the next column sent, for there is no zero byte before that: so the k-th part
begins at the k-th column sent, and as many columns are sent as the shape has. But where does a text end, and where do
the letters after it begin? A text could end in `n`. So the length is compared for each part that has letters behind it:
all of these have exactly their letters. As the letters add up to the number of columns that are not sent, none is left
for the other parts, which are texts and nothing else.

The same source is compiled once, whichever relation asks: the partitions of a table share it. Sans-IO.
"""

from __future__ import annotations

import re
from binascii import a2b_hex, b2a_base64
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from struct import Struct
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias

from walstream.capture.columns import BOOLS, converter, form
from walstream.capture.escaping import is_unclean, quoted, quoted_name
from walstream.capture.provenance import Context
from walstream.capture.shapes import NULL, ODD, SENT, UNSENT, RowFunction, Shape
from walstream.postgres.types import Kind, TypeInfo

FIRST_PART: Final = 5
"""Where the first tuple of a row message begins: after the kind and the relation id."""

MATCHED_BYTES_MAX: Final = (1 << 24) - 1
"""The longest message in which every length begins with a zero byte."""

NUMBERS: Final = tuple(b"%d" % number for number in range(10_000))
"""The sequence numbers of most rows, written."""

COMPILED_MAX: Final = 1_024
"""How many compiled sources and expressions are kept, the last used ones: at some 10 KB each for ten columns."""


class NamedType(NamedTuple):
    """A column, as far as its JSON depends on it."""

    name: str
    type_info: TypeInfo


class Target(NamedTuple):
    """Where a record goes, and the columns of its key by number; none: no key."""

    topic: str
    key: tuple[int, ...]
    tombstones: bool = False


class Table(NamedTuple):
    """What is generated for: the columns, which of them are the replica identity, and which names the tenant."""

    columns: tuple[NamedType, ...]
    identity: tuple[int, ...]
    tenant: int | None


class Part(NamedTuple):
    """A tuple of a message: N (new), O (old), or K (the old key, which says nothing of the other columns)."""

    letter: bytes
    shape: Shape


def moving_columns(table: Table, targets: Iterable[Target]) -> set[int]:
    """Return the columns of which a new value makes an update a delete and an insert: the keys' and the tenant's."""
    keys = {index for target in targets for index in target.key}
    return keys if table.tenant is None else keys | {table.tenant}


def object_function(table: Table, chosen: Iterable[int]) -> Callable[[Sequence[Any]], bytes]:
    """Generate a function from the values of a row (bytes or None) to a JSON object of the chosen columns."""
    pieces: list[bytes | str] = [b"{"]
    names: dict[str, Any] = {"is_unclean": is_unclean, "quoted": quoted}
    for count, index in enumerate(chosen):
        name, type_info = table.columns[index]
        written = _WRITTEN.get(type_info.kind, f"convert_{index}(value)")
        names[f"convert_{index}"] = converter(type_info)
        pieces.append(_name_piece(name, count))
        pieces.append(f"b'null' if (value := values[{index}]) is None else {written}")
    pieces.append(b"}")
    return _function(f"def render(values):\n    return {_join(pieces)}\n", names)


# What the converters of frequent kinds do, in line.
_WRITTEN: Final = {
    Kind.NUMBER: "value",
    Kind.BOOL: "BOOLS[value]",
    Kind.PLAIN: "b'\"' + value + b'\"'",
    Kind.STRING: "b'\"' + value + b'\"' if is_unclean(value) is None else quoted(value)",
}


def message_function(
    table: Table, parts: Sequence[Part], targets: Sequence[Target], otherwise: RowFunction | None = None
) -> RowFunction:
    """Generate the function for messages of these parts: old, new, or old and new with the same keys and tenant.

    What does not match goes to `otherwise`; without that, it is not taken.
    """
    tuples = [_Tuple(table, part) for part in parts]
    old = tuples[0] if parts[0].letter != b"N" else None
    new = tuples[-1] if parts[-1].letter == b"N" else None
    checks = [check for each in tuples for check in each.length_checks()]
    if old and new:
        keys = sorted(moving_columns(table, targets))
        checks += [f"{a} != {b}" for key in keys for a, b in zip(old.of(key), new.of(key), strict=True)]
    end = f"context.end_without({new.unchanged!r})" if new and new.unchanged else "context.end"
    source = _row_source(
        f"MATCH(data, {FIRST_PART})",
        f"len(data) <= {MATCHED_BYTES_MAX}",
        [name for each in tuples for name in each.groups],
        checks,
        (old.row_pieces() if old else [b"null"], new.row_pieces() if new else [b"null"], end),
        tuples[-1],
        targets,
    )
    names = {name: value for each in tuples for name, value in each.names.items()}
    return _row_function(source, names, _message_pattern(tuples), targets, otherwise)


def copy_function(
    table: Table, shape: Shape, targets: Sequence[Target], otherwise: RowFunction | None = None
) -> RowFunction:
    r"""Generate the function for rows of COPY's text format: values between tabs, `\N` for null, no other escapes."""
    new = _Tuple(table, Part(b"", shape), in_copy=True)
    written: _Written = ([b"null"], new.row_pieces(), "context.end")
    source = _row_source("MATCH(data)", "True", new.groups, [], written, new, targets)
    pattern = rb"\t".join(found.pattern if found else rb"\\N" for found in new.forms) + rb"\n\Z"
    return _row_function(source, new.names, pattern, targets, otherwise)


def walking_function(table: Table, targets: Sequence[Target], otherwise: RowFunction) -> RowFunction:
    """Generate the function for messages with one new tuple, whichever of its columns are null.

    It reads column by column: slower than an expression, and right for all combinations of nulls. Columns that were not
    sent, and what is no row, go to `otherwise`.
    """
    give_up = "return otherwise(data, context, seq)"
    head = b"N" + len(table.columns).to_bytes(2)
    lines = [
        "def render(data, context, seq):",
        f"    if data[{FIRST_PART}:{FIRST_PART + len(head)}] != {head!r}:",
        f"        {give_up}",
        f"    at = {FIRST_PART + len(head)}",
        *(["    tenant = None"] if table.tenant is not None else []),
    ]
    for index, (_, type_info) in enumerate(table.columns):
        lines += [
            "    kind = data[at]",
            "    if kind == 116:",
            "        start = at + 5",
            "        at = start + length_at(data, at + 1)[0]",
            "        value = data[start:at]",
            *(["        tenant = value"] if index == table.tenant else []),
            f"        new_{index} = {_WRITTEN.get(type_info.kind, f'convert_{index}(value)')}",
            "    elif kind == 110:",
            f"        new_{index} = b'null'",
            "        at += 1",
            "    else:",
            f"        {give_up}",
        ]
    lines += ["    if at != len(data):", f"        {give_up}"]
    written: _Written = ([b"null"], _walked(table, range(len(table.columns))), "context.end")
    fixed = "context.headers if tenant is None else [('tenant', tenant), *context.headers]"
    keys = [_join(_walked(table, target.key)) if target.key else "None" for target in targets]
    lines += _record_lines(written, fixed if table.tenant is not None else "context.headers", keys)
    names: dict[str, Any] = {f"convert_{index}": converter(known) for index, (_, known) in enumerate(table.columns)}
    names |= {"is_unclean": is_unclean, "quoted": quoted, "length_at": Struct(">I").unpack_from, "otherwise": otherwise}
    return _function("\n".join(lines), names | _topics(targets))


def _walked(table: Table, chosen: Iterable[int]) -> list[bytes | str]:
    """What to write for a JSON object of columns that are written already."""
    pieces: list[bytes | str] = [b"{"]
    for count, index in enumerate(chosen):
        pieces += [_name_piece(table.columns[index].name, count), f"new_{index}"]
    return [*pieces, b"}"]


def _row_source(
    match: str,
    condition: str,
    groups: list[str],
    checks: list[str],
    written: _Written,
    keyed: _Tuple,
    targets: Sequence[Target],
) -> str:
    """Write the source of a function; `keyed` is the tuple that tells key and tenant."""
    lines = [
        "def render(data, context, seq):",
        f"    match = {match} if {condition} else None",
        "    if match is None:",
        "        return otherwise(data, context, seq)",
        *([f"    {', '.join(groups)}, = match.groups()"] if groups else []),
        *([f"    if {' or '.join(checks)}:", "        return otherwise(data, context, seq)"] if checks else []),
    ]
    keys = [_join(keyed.object_pieces(target.key)) if target.key else "None" for target in targets]
    return "\n".join([*lines, *_record_lines(written, keyed.fixed_headers(), keys)])


def _record_lines(written: _Written, fixed: str, keys: Sequence[str]) -> list[str]:
    """Write the end of a function: the record of each target, with its key."""
    before, after, end = written
    pieces = [b'{"before":', *before, b',"after":', *after, "context.source", "number", end]
    return [
        f"    number = NUMBERS[seq] if seq < {len(NUMBERS)} else b'%d' % seq",
        f"    value = {_join(pieces)}",
        f"    fixed = {fixed}",
        # Every record gets a list of headers of its own.
        *(f"    context.emit((TOPIC_{n}, value, {key}, [*fixed, ('seq', number)]))" for n, key in enumerate(keys)),
        "    return seq + 1",
        "",
    ]


def _message_pattern(tuples: Sequence[_Tuple]) -> bytes:
    """Write the expression for tuples that follow each other.

    A text with all that follows it up to the next one is an atomic group: there is one way to read a row, so a row that
    does not match need not be tried in others.
    """
    pieces: list[bytes] = []
    close = b""
    for each in tuples:
        pieces.append(re.escape(each.part.letter + len(each.forms).to_bytes(2)))
        for index, found in enumerate(each.forms):
            if found is None:
                pieces.append(b"n" if each.part.shape[index] == NULL else b"u")
            else:
                length = rb"(...)" if each.length_name(index) else rb"..."
                pieces += [rb"t\x00", close, length, rb"(?>", found.pattern]
                close = b")"
    return b"".join([*pieces, rb"\Z", close])


class _Tuple:
    """One tuple of a row in the making: the forms of its columns, the names of their groups, what to write."""

    def __init__(self, table: Table, part: Part, *, in_copy: bool = False) -> None:
        self.part = part
        self._table = table
        self._prefix = "new" if part.letter in (b"N", b"") else "old"
        self.forms = [
            form(type_info, in_copy=in_copy, is_odd=code == ODD, as_text=index == table.tenant)
            if code in (SENT, ODD)
            else None
            for index, ((_, type_info), code) in enumerate(zip(table.columns, part.shape, strict=True))
        ]
        """None for a column that is not there."""
        self.names: dict[str, Any] = {
            f"convert_{index}": converter(table.columns[index].type_info)
            for index, found in enumerate(self.forms)
            if found is not None
        }

    @property
    def groups(self) -> list[str]:
        """The names of all groups, in order, those of lengths among them."""
        return [name for index in range(len(self.forms)) for name in (*self.length_name(index), *self.of(index))]

    @property
    def unchanged(self) -> list[bytes]:
        """The names of the columns that were not sent."""
        shape = self.part.shape
        return [quoted_name(name) for (name, _), code in zip(self._table.columns, shape, strict=True) if code == UNSENT]

    def of(self, index: int) -> list[str]:
        """The names of a column's groups."""
        found = self.forms[index]
        return [f"{self._prefix}_{index}" + "_" * count for count in range(found.group_count if found else 0)]

    def length_name(self, index: int) -> list[str]:
        """The name of the group for a text's length, when letters follow the text and it could end in letters too."""
        found = self.forms[index]
        is_followed = index + 1 < len(self.forms) and self.forms[index + 1] is None
        is_doubtful = is_followed and found is not None and found.is_open and self.part.letter != b""
        return [f"{self._prefix}_length_{index}"] if is_doubtful else []

    def length_checks(self) -> list[str]:
        """What is true when a text is not as long as its length says."""
        return [
            f"len({self.of(index)[0]}) != int.from_bytes({name})"
            for index in range(len(self.forms))
            for name in self.length_name(index)
        ]

    def row_pieces(self) -> list[bytes | str]:
        """What to write for all that was sent; of the columns beside an old key nothing was."""
        if self.part.letter == b"K":
            return self.object_pieces(self._table.identity)
        return self.object_pieces(index for index, code in enumerate(self.part.shape) if code != UNSENT)

    def object_pieces(self, chosen: Iterable[int]) -> list[bytes | str]:
        """What to write for a JSON object of the chosen columns."""
        pieces: list[bytes | str] = [b"{"]
        for count, index in enumerate(chosen):
            found = self.forms[index]
            pieces.append(_name_piece(self._table.columns[index].name, count))
            pieces += [
                piece if isinstance(piece, bytes) else piece.format(*self.of(index), convert=f"convert_{index}")
                for piece in (found.pieces if found else (b"null",))
            ]
        return [*pieces, b"}"]

    def fixed_headers(self) -> str:
        """The source of the headers that are the same for all targets, but for the sequence number."""
        tenant = self._table.tenant
        if tenant is None or self.forms[tenant] is None:
            return "context.headers"
        return f"[('tenant', {self.of(tenant)[0]}), *context.headers]"


_Written: TypeAlias = "tuple[list[bytes | str], list[bytes | str], str]"
"""What is written for `before`, for `after`, and after the sequence number."""


def _name_piece(name: str, count: int) -> bytes:
    return (b"," if count else b"") + quoted_name(name) + b":"


def _join(pieces: Iterable[bytes | str]) -> str:
    """Write the source that joins the pieces; neighbouring constants become one."""
    merged: list[bytes | str] = []
    for piece in pieces:
        if isinstance(piece, bytes) and merged and isinstance(merged[-1], bytes):
            merged[-1] += piece
        else:
            merged.append(piece)
    sources = [repr(piece) if isinstance(piece, bytes) else piece for piece in merged]
    return sources[0] if len(sources) == 1 else f"b''.join(({', '.join(sources)}))"


@lru_cache(COMPILED_MAX)
def _compiled(source: str) -> CodeType:
    return compile(source, "<generated by walstream.capture.codegen>", "exec")


@lru_cache(COMPILED_MAX)
def _expression(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)


def _not_taken(_data: bytes, _context: Context, _seq: int) -> int:
    return 0


def _row_function(
    source: str, names: dict[str, Any], pattern: bytes, targets: Sequence[Target], otherwise: RowFunction | None
) -> RowFunction:
    match = _expression(pattern).match
    return _function(source, {**names, **_topics(targets), "MATCH": match, "otherwise": otherwise or _not_taken})


def _topics(targets: Sequence[Target]) -> dict[str, str]:
    return {f"TOPIC_{count}": target.topic for count, target in enumerate(targets)}


def _function(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    scope = {"BOOLS": BOOLS, "NUMBERS": NUMBERS, "a2b_hex": a2b_hex, "b2a_base64": b2a_base64, **names}
    exec(_compiled(source), scope)
    function: Callable[..., Any] = scope["render"]
    function.source = source  # type: ignore[attr-defined]
    return function
