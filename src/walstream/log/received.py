"""What a follower demands of batches before it takes them from its leader.

Owns the checks that make a follower's log a continuation: whole batches with matching CRCs, offsets that go on where
the log ends, epochs that never go back and never pass the one the leader was followed in. Sans-IO, all or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from walstream.errors import CorruptBatch, FencedLeaderEpoch
from walstream.log.batch import HEADER_BYTES, BatchHeader, Buffer, parse_header, verified_prefix, walk


def check_received(
    received: Sequence[Buffer],
    offset: int,
    log_end: int,
    epoch_min: int,
    epoch_max: int,
    *,
    dense: bool,
    first: int | None = None,
) -> list[tuple[Buffer, list[BatchHeader]]]:
    """Return each buffer with the headers of its batches; raises CorruptBatch or FencedLeaderEpoch.

    `offset` is where the leader says that they begin. In a compacted topic (not `dense`) the first batch may begin
    later, and there may be gaps. `first` is where the first batch begins, if that is earlier.
    """
    if offset != log_end:
        raise CorruptBatch(f"The log ends at {log_end}; batches from {offset} on do not continue it.")
    expected, epoch = log_end if first is None else first, epoch_min
    parsed: list[tuple[Buffer, list[BatchHeader]]] = []
    for buffer in received:
        good, _ = verified_prefix(buffer, dense=dense)
        if good != len(buffer):
            raise CorruptBatch(f"Bytes {good} to {len(buffer)} after offset {expected} are no whole, sound batch.")
        headers = [header for _, header in walk(buffer)]
        for header in headers:
            if header.base_offset < expected or (dense and header.base_offset != expected):
                raise CorruptBatch(f"A batch at offset {header.base_offset} came where {expected} is next.")
            if not epoch <= header.leader_epoch <= epoch_max:
                raise FencedLeaderEpoch(
                    f"The batch at offset {header.base_offset} is of leader epoch {header.leader_epoch}; "
                    f"{epoch} to {epoch_max} may follow."
                )
            expected, epoch = header.next_offset, header.leader_epoch
        parsed.append((buffer, headers))
    return parsed


def first_offset(received: Sequence[Buffer], start: int) -> int:
    """Return where the first batch begins if it holds `start`, where a log may begin in the middle of one; or `start`.

    Raises CorruptBatch.
    """
    if not received or len(received[0]) < HEADER_BYTES:
        return start
    header = parse_header(received[0])
    return header.base_offset if 0 <= header.base_offset < start <= header.last_offset else start
