"""The leader-epoch map of one partition: from which offset on each leader wrote.

Owns the arithmetic of leader epochs (the replication rules, after Kafka's KIP-101 and KIP-279) and nothing else: the
caller makes the map durable, synchronously, before a new leader appends or answers. Sans-IO.

Invariant: epochs and start offsets both rise strictly. A leader that wrote nothing therefore vanishes when the next
one starts at the same offset; its end and its predecessor's are the same, so no answer about divergence changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from walstream.errors import CorruptLog
from walstream.log.batch import OFFSET_MAX

NO_EPOCH: Final = -1


class EpochMap:
    """Epoch → first offset of that epoch, for as far back as the log reaches.

    Changed on one thread; others may ask `epoch_at` and `span_at` meanwhile, and get the answer of before or after.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: tuple[list[int], list[int]] = ([], [])
        """Epochs and starts. Replaced and never changed, so that readers on other threads see both or neither."""

    @property
    def _epochs(self) -> list[int]:
        return self._entries[0]

    @property
    def _starts(self) -> list[int]:
        return self._entries[1]

    @classmethod
    def from_list(cls, entries: Iterable[Iterable[int]]) -> EpochMap:
        """Build the map from what `to_list` gave. Raises CorruptLog if it cannot have come from there."""
        epoch_map = cls()
        try:
            pairs = [(epoch, start) for epoch, start in entries]
        except (TypeError, ValueError) as error:
            raise CorruptLog("The stored leader epochs are not a list of pairs.") from error
        for epoch, start in pairs:
            if type(epoch) is not int or type(start) is not int or epoch < 0 or start < 0:
                raise CorruptLog(f"Leader epoch {epoch!r} starting at {start!r} is not possible.")
            if epoch_map._epochs and (epoch <= epoch_map._epochs[-1] or start <= epoch_map._starts[-1]):
                raise CorruptLog(f"Leader epoch {epoch} starting at {start} does not rise above the one before it.")
            epoch_map._add(epoch, start)
        return epoch_map

    def _add(self, epoch: int, start: int) -> None:
        self._entries = ([*self._epochs, epoch], [*self._starts, start])

    def to_list(self) -> list[list[int]]:
        """Return the map as plain data: pairs of epoch and start, rising."""
        return [[epoch, start] for epoch, start in zip(self._epochs, self._starts, strict=True)]

    def __len__(self) -> int:
        return len(self._epochs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EpochMap):
            return NotImplemented
        return self._epochs == other._epochs and self._starts == other._starts

    __hash__ = None  # type: ignore[assignment]  # It changes.

    def __repr__(self) -> str:
        return f"EpochMap({self.to_list()})"

    @property
    def last_epoch(self) -> int:
        """The newest epoch known, or -1."""
        return self._epochs[-1] if self._epochs else NO_EPOCH

    def assign(self, epoch: int, start: int) -> bool:
        """Note that `epoch` writes from `start` on; return whether the map changed and must be made durable again.

        Called by a new leader with its log end, and for every batch that a follower or recovery reads.
        Raises CorruptLog if the epoch or the offset goes back.
        """
        if epoch < 0 or start < 0:
            raise CorruptLog(f"Leader epoch {epoch} from offset {start} on: neither can be negative.")
        if self._epochs:
            last_epoch, last_start = self._epochs[-1], self._starts[-1]
            if epoch == last_epoch:
                return False
            if epoch < last_epoch or start < last_start:
                raise CorruptLog(
                    f"Leader epoch {epoch} at offset {start} comes after epoch {last_epoch} at offset {last_start}."
                )
            if start == last_start:
                self._entries = ([*self._epochs[:-1], epoch], self._starts)
                return True
        self._add(epoch, start)
        return True

    def found_at(self, epoch: int, offset: int) -> bool:
        """Learn that an epoch began no later than `offset`: the batch there was damaged, and has been repaired."""
        index = bisect_right(self._epochs, epoch) - 1
        if index < 1 or self._epochs[index] != epoch or not self._starts[index - 1] < offset < self._starts[index]:
            return False
        self._entries = (self._epochs, [*self._starts[:index], offset, *self._starts[index + 1 :]])
        return True

    def epoch_at(self, offset: int) -> int:
        """Return the epoch of the leader that wrote `offset`, or -1 if that is before all that is known."""
        return self.span_at(offset)[0]

    def span_at(self, offset: int) -> tuple[int, int]:
        """Return what `epoch_at` does, and the offset from which on it may be another."""
        epochs, starts = self._entries
        index = bisect_right(starts, offset)
        return (epochs[index - 1] if index else NO_EPOCH), (starts[index] if index < len(starts) else OFFSET_MAX)

    def end_offset_for(self, epoch: int, log_end: int) -> tuple[int, int]:
        """Return the largest epoch known that is not above `epoch`, and the offset at which it ends.

        The newest epoch ends at the log end. An epoch before all known ones is answered with itself and the first
        start, and so is every epoch by an empty map, whose log holds nothing: with itself and the log end.
        """
        index = bisect_right(self._epochs, epoch)
        end = self._starts[index] if index < len(self._starts) else log_end
        return (self._epochs[index - 1] if index else epoch), end

    def truncate(self, end: int) -> bool:
        """Forget the epochs that start at or after the new log end; return whether any did."""
        kept = len(self._starts)
        while kept and self._starts[kept - 1] >= end:
            kept -= 1
        if kept == len(self._starts):
            return False
        self._entries = (self._epochs[:kept], self._starts[:kept])
        return True

    def trim(self, log_start: int) -> bool:
        """Forget the epochs that end before the new log start; the one that holds it begins there from now on."""
        index = bisect_right(self._starts, log_start) - 1
        if index < 0 or (index == 0 and self._starts[0] == log_start):
            return False
        self._entries = (self._epochs[index:], [log_start, *self._starts[index + 1 :]])
        return True
