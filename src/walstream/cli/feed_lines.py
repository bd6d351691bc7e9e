"""How `feed subscribe` shows an entry: a line for people, a line of JSON.

Pure: an entry in, text out. What others wrote may hold anything, so it is escaped for people, as `tail` does it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from walstream.cli.output import plural, printable
from walstream.cli.rendering import CYAN, DIM, RESET, YELLOW, json_bytes, shown_bytes

if TYPE_CHECKING:
    from walstream.feed import Entry

_STYLES: Final = {"put": "", "delete": YELLOW, "truncate": YELLOW, "batch": ""}


def to_json(entry: Entry) -> str:
    """Write one line of JSON."""
    return json.dumps(_document(entry), ensure_ascii=False)


def _document(entry: Entry) -> dict[str, Any]:
    document: dict[str, Any] = {
        "lsn": str(entry.lsn),
        "op": entry.op.value,
        "tenant": entry.tenant,
        "topic": entry.topic,
        "partition": entry.partition,
        "offset": entry.offset,
        "committed_at_ms": entry.committed_at_ms,
        "commit_lsn": int(entry.commit_lsn),
        "seq": entry.seq,
        "txid": entry.txid,
        "key_prefix": entry.key_prefix,
        **json_bytes("key", entry.key),
    }
    if entry.op == "batch":
        transaction = entry.transaction
        document |= {
            "commit_lsn": int(transaction.commit_lsn),
            "txid": transaction.txid,
            "commit_time_ms": transaction.commit_time_ms,
            "part": transaction.part,
            "is_last": transaction.is_last,
            "snapshot": transaction.snapshot,
            "entries": [_document(one) for one in transaction.entries],
        }
    else:
        document |= json_bytes("value", entry.value)
    document["headers"] = [{"name": name, **json_bytes("value", value)} for name, value in entry.headers]
    return document


def line(entry: Entry, *, is_coloured: bool = False) -> str:
    """Write a line, or for a transaction one for it and one for each of its changes."""
    if entry.op == "batch":
        transaction = entry.transaction
        what = f"snapshot {transaction.snapshot}" if transaction.snapshot else f"commit {transaction.commit_lsn}"
        more = "" if transaction.is_last and not transaction.part else f", part {transaction.part + 1}"
        head = [(DIM, str(entry.lsn)), ("", f"{what}: {plural(len(transaction.entries), 'change')}{more}")]
        inner = [f"    {_one(one, is_coloured=is_coloured)}" for one in transaction.entries]
        return "\n".join((_joined(head, is_coloured=is_coloured), *inner))
    return f"{_joined([(DIM, str(entry.lsn))], is_coloured=is_coloured)}  {_one(entry, is_coloured=is_coloured)}"


def _one(entry: Entry, *, is_coloured: bool) -> str:
    topic = printable(f"{entry.tenant}/{entry.topic}" if entry.tenant else entry.topic)
    parts = [(_STYLES[entry.op], entry.op.value), (CYAN, topic), (YELLOW, shown_bytes(entry.key))]
    parts.append(("", shown_bytes(entry.value)))
    return _joined(parts, is_coloured=is_coloured)


def _joined(parts: list[tuple[str, str]], *, is_coloured: bool) -> str:
    if not is_coloured:
        return "  ".join(text for _, text in parts)
    return "  ".join(f"{style}{text}{RESET}" if style else text for style, text in parts)
