"""How `tail` shows a record: a line for people, a line of JSON, or a line by the user's template.

Pure: a record in, text out. What others wrote may hold anything, so for people and templates control characters are
escaped and bytes that are no text are shown as hexadecimal; JSON has them as base64 under a name of its own.
"""

from __future__ import annotations

import base64
import difflib
import json
import string
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from walstream.cli.output import printable
from walstream.errors import UsageError

# Written by hand: a terminal library takes longer to paint a line than the node to send it.
DIM, CYAN, YELLOW, RESET = "\x1b[2m", "\x1b[36m", "\x1b[33m", "\x1b[0m"

HEX_BYTES_MAX = 64
TEMPLATE_FIELDS = (
    "topic", "partition", "offset", "timestamp", "timestamp_ms", "key", "value", "headers", "key_bytes", "value_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """A record as it was read."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def to_json(record: Seen) -> str:
    """Write one line of JSON."""
    document: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        **json_bytes("key", record.key),
        **json_bytes("value", record.value),
        "headers": [{"name": name, **json_bytes("value", value)} for name, value in record.headers],
    }
    return json.dumps(document, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Line:
    """How lines for people look: in colours or not, and how wide a terminal there is; None: none, all is one line."""

    is_coloured: bool = False
    width: int | None = None

    def show(self, record: Seen) -> str:
        """Write a line, or more when the value is JSON that does not fit into the width."""
        parts = [(DIM, _clock(record.timestamp_ms)), (CYAN, f"{record.partition}@{record.offset}")]
        if record.key is not None:
            parts.append((YELLOW, shown_bytes(record.key)))
        parts += [(DIM, f"{printable(name)}={shown_bytes(value)}") for name, value in record.headers]
        value = shown_bytes(record.value)
        if self.width is not None and sum(len(text) + 2 for _, text in parts) + len(value) > self.width:
            indented = _indented(record.value)
            if indented is not None:
                return self._join(parts) + "\n" + indented
        return self._join([*parts, (DIM if record.value is None else "", value)])

    def _join(self, parts: list[tuple[str, str]]) -> str:
        if not self.is_coloured:
            return "  ".join(text for _, text in parts)
        return "  ".join(f"{style}{text}{RESET}" if style else text for style, text in parts)


class Template:
    """The user's own line: `{offset} {key}={value}`, with `\\n` and `\\t` for a line end and a tab."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\\n", "\n").replace("\\t", "\t")
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(self._text) if name is not None]
        except ValueError as error:
            raise UsageError(f"--format {text!r} is no template: {error}.", _TEMPLATE_HINT) from None
        for name in names:
            if name not in TEMPLATE_FIELDS:
                nearest = difflib.get_close_matches(name, TEMPLATE_FIELDS, n=1, cutoff=0.0)[0]
                raise UsageError(f"--format knows no field {{{name}}}; the nearest is {{{nearest}}}.", _TEMPLATE_HINT)

    def fill(self, record: Seen) -> str:
        """Write the line of one record."""
        try:
            return self._text.format_map(_fields(record))
        except ValueError as error:
            raise UsageError(f"--format cannot be filled: {error}.", _TEMPLATE_HINT) from None


_TEMPLATE_HINT = "Fields: " + " ".join(f"{{{name}}}" for name in TEMPLATE_FIELDS) + "."


def _fields(record: Seen) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": _clock(record.timestamp_ms),
        "timestamp_ms": -1 if record.timestamp_ms is None else record.timestamp_ms,
        "key": "" if record.key is None else shown_bytes(record.key),
        "value": "" if record.value is None else shown_bytes(record.value),
        "headers": ",".join(f"{printable(name)}={shown_bytes(value)}" for name, value in record.headers),
        "key_bytes": len(record.key or b""),
        "value_bytes": len(record.value or b""),
    }


def _clock(timestamp_ms: int | None) -> str:
    if timestamp_ms is None:
        return "-"
    moment = datetime.fromtimestamp(timestamp_ms / 1000, tz=UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{timestamp_ms % 1000:03d}Z"


def shown_bytes(value: bytes | None) -> str:
    """Show bytes to people: as text if they are, otherwise in hexadecimal."""
    if value is None:
        return "(null)"
    try:
        return printable(value.decode())
    except UnicodeDecodeError:
        more = f"… ({len(value):,} bytes)" if len(value) > HEX_BYTES_MAX else ""
        return f"0x{value[:HEX_BYTES_MAX].hex()}{more}"


def _indented(value: bytes | None) -> str | None:
    if not value or value[:1] not in b"{[":
        return None
    try:
        document = json.dumps(json.loads(value), ensure_ascii=False, indent=2)
    except ValueError:
        return None
    return "\n".join("    " + printable(line) for line in document.splitlines())


def json_bytes(name: str, value: bytes | None) -> dict[str, str | None]:
    """Return the field of JSON that holds bytes: text, or under a name of its own base64."""
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": base64.b64encode(value).decode()}
