"""Is a replica's state possible at all? Asked when it is loaded and whenever its role changes.

Owns the list of what must hold between offsets and epochs. Returns sentences and repairs nothing: a replica of which
one of these is not true has lost its memory or its disk, and is put into quarantine. Sans-IO.
"""

from __future__ import annotations

from itertools import pairwise

from walstream.replication.events import LogView


def violations(log: LogView, *, known_epoch: int) -> list[str]:
    """Return what cannot be, as sentences; none when all is well, or when the log is being cut and cannot be judged."""
    found: list[str] = []
    if log.is_held:
        return found
    offsets = {
        "log start": log.log_start,
        "high watermark": log.high_watermark,
        "durable end": log.durable_end,
        "log end": log.log_end,
    }
    found += [f"The {name} is negative: {offset}." for name, offset in offsets.items() if offset < 0]
    pairs = list(offsets.items())
    found += [
        f"The {name} {offset} is above the {next_name} {next_offset}."
        for (name, offset), (next_name, next_offset) in pairwise(pairs)
        if offset > next_offset
    ]
    return found + _violations_of_epochs(log, known_epoch)


def _violations_of_epochs(log: LogView, known_epoch: int) -> list[str]:
    entries = log.epochs.to_list()
    found = [
        f"Leader epoch {epoch} starting at {start} does not rise above epoch {before} starting at {start_before}."
        for (before, start_before), (epoch, start) in pairwise(entries)
        if epoch <= before or start <= start_before
    ]
    if entries and entries[0][0] < 0:
        found.append(f"Leader epoch {entries[0][0]} is negative.")
    if entries and entries[-1][0] > known_epoch:
        found.append(f"The log holds epoch {entries[-1][0]}; the newest epoch known is {known_epoch}.")
    if entries and entries[-1][1] > log.log_end:
        found.append(f"Leader epoch {entries[-1][0]} starts at {entries[-1][1]}, above the log end {log.log_end}.")
    return found
