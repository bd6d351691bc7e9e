"""What an entry says of the transaction that it belongs to, read from its bytes.

Owns reading it, fast for rows as a capture writes them; the rule that decides with it is `Span.admits`, and a test
holds what is written here against it. Sans-IO.

A row's `source` is the last object of its value, and what the rule asks stands in it side by side (capture/provenance):

    ,"source":{"db":…,"table":…,"txId":…,"lsn":…,"source_epoch":…,"commit_lsn":…,"seq":…,"gen":…,"ts_ms":…,"snapshot":…

Whatever a column holds comes before it, and in what follows, names of columns, a quotation mark within a text is
escaped. So the last `,"source":{"db":` of an entry begins it. Records of another form (tombstones, messages of an
outbox, what nobody understood) have a header `gen`, say it in headers, and are read by protobuf: in the value of an
outbox may stand anything, also what looks like a `source`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeAlias

from walstream.capture.commit_points import Span
from walstream.capture.escaping import quoted_name
from walstream.capture.reading import facts_of, first_of_each
from walstream.feed.wal_pb2 import WalBatch

NO_SNAPSHOT: Final = b"false"

_SOURCE: Final = b',"source":{"db":'
_HEADER: Final = b"\x0a\x03gen\x12"
"""As it stands among the fields of an entry, before its value."""
_search = re.compile(
    rb'"txId":(null|\d+),"lsn":\d+,"source_epoch":\d+,"commit_lsn":(\d+),"seq":(\d+),"gen":(\d+),"ts_ms":(\d+),'
    rb'"snapshot":(false|"[^"\\]*")'
).search


Facts: TypeAlias = tuple[bytes, bytes, int, int, int, int]
"""(generation in digits, snapshot as JSON has it or NO_SNAPSHOT, commit LSN, seq, txid, commit time in ms)"""


def tell(entry: bytes) -> Facts | None:
    """Return what an encoded entry says; None for one that no capture has written."""
    at = entry.rfind(_SOURCE)
    found = _search(entry, at) if at >= 0 and entry.find(_HEADER, 0, at) < 0 else None
    if found is None:
        return tell_slowly(entry)
    txid, commit_lsn, seq, gen, time_ms, snapshot = found.groups()
    return gen, snapshot, int(commit_lsn), int(seq), 0 if txid == b"null" else int(txid), int(time_ms)


def tell_slowly(entry: bytes) -> Facts | None:
    """Return the same, however the record is made."""
    (message,) = WalBatch.FromString(entry).entries
    headers = first_of_each((header.name, header.value) for header in message.headers)
    if "gen" in headers and message.commit_lsn:
        headers["commit_lsn"] = b"%d" % message.commit_lsn
    facts = facts_of(headers, message.value)
    if facts is None:
        return None
    snapshot = NO_SNAPSHOT if facts.snapshot is None else quoted_name(facts.snapshot)
    return b"%d" % facts.gen, snapshot, facts.commit_lsn, message.seq, message.txid, message.committed_at_ms


def rule_of(span: Span) -> Callable[[int, Facts], bool]:
    """Return what tells whether the record at an offset, with these facts, belongs to a point."""
    start, stop, gen = span.start, span.stop, b"%d" % span.gen
    lsn_from, lsn_to = span.lsn_from, span.lsn_to
    snapshot = NO_SNAPSHOT if span.snapshot is None else quoted_name(span.snapshot)
    is_stream = span.snapshot is None

    def admits(offset: int, facts: Facts) -> bool:
        if not start <= offset < stop or facts[0] != gen or facts[1] != snapshot:
            return False
        return lsn_from <= facts[2] < lsn_to if is_stream else True

    return admits
