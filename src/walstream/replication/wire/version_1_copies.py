"""What a follower of version 1 does with a pushed batch: copies that nobody leads.

Version 1 carries no epochs to reconcile by and cannot ask for what is missing. So a copy is only ever what came in one
unbroken row: a batch that does not begin where the copy ends makes the copy begin anew, at that batch. Nothing is kept
in front of a gap as if it belonged to what follows, and nothing that may differ from the leader's log is kept at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from walstream.errors import BadChecksum, CorruptBatch, MalformedFrame
from walstream.log.batch import BatchHeader, compute_crc, parse_header
from walstream.replication.wire.version_1 import PushedBatch


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a batch goes in the copy."""

    header: BatchHeader
    begins_anew: bool
    """The copy is emptied first, and starts at the batch; a warning, unless it was empty."""


def place(pushed: PushedBatch, log_end: int | None) -> Placement:
    """Check a batch against what the leader says of it, and say where it goes; `log_end` None: there is no copy yet.

    Raises LinkError: the frame was whole, but its batch is not what it claims. Nothing of it may be applied, and the
    link is closed, because skipping it would leave a gap.
    """
    where = f"{pushed.topic}-{pushed.partition} at offset {pushed.base_offset}"
    try:
        header = parse_header(pushed.data)
    except CorruptBatch as error:
        raise MalformedFrame(f"What was pushed for {where} is no record batch: {error.message}") from error
    if header.length != len(pushed.data):
        raise MalformedFrame(f"The batch for {where} has {header.length} bytes, and {len(pushed.data)} were pushed.")
    if header.crc != compute_crc(pushed.data):
        raise BadChecksum(f"The batch for {where} fails its CRC-32C.")
    if header.base_offset != pushed.base_offset or header.record_count != pushed.record_count:
        raise MalformedFrame(
            f"The batch for {where} says that it has {header.record_count} records from {header.base_offset} on; "
            f"the frame around it says {pushed.record_count}."
        )
    if header.base_offset < 0 or pushed.partition < 0:
        raise MalformedFrame(f"There is no such place as {where}.")
    return Placement(header, log_end != header.base_offset)
