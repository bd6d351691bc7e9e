"""The records of a task, by the rule: those that belong become rows, and their number is checked.

Owns the way from fetched records to batches; the rule is rule.py's, the columns are decoding.py's. Invariant: a record
that does not belong neither becomes a row nor fails one that does, and after the last record the rows of every point
were counted, or a DataLoss is raised. Rows of another table in the topic are counted, because the points count them.

The usual chunk is parsed whole and the rule applied to its columns. A chunk that cannot be parsed whole (records that
nobody of ours wrote, rows of a snapshot between those of the stream) is looked at record by record first; what belongs
is then parsed like any other, and what even so cannot be goes value by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message

from walstream.capture.commit_points import RowFacts
from walstream.capture.provenance import OLD_KEY
from walstream.capture.reading import facts_of, first_of_each
from walstream.errors import DataLoss
from walstream.spark.decoding import COUNTED, Decoder, NotEnvelopes, Parsed, is_of_snapshot
from walstream.spark.layouts import Layout
from walstream.spark.planning import Range
from walstream.spark.rule import Mask, Numbers


class Chunk(NamedTuple):
    """Records that were fetched together."""

    messages: Sequence[Message]
    offsets: Numbers
    values: Sequence[bytes]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Chunk:
        """Take what a record has to say."""
        offsets = np.array([message.offset() for message in messages], dtype=np.int64)
        return cls(messages, offsets, cast("list[bytes]", [message.value() for message in messages]))

    def some(self, numbers: Sequence[int]) -> Chunk:
        """Return some of them."""
        return Chunk(
            [self.messages[number] for number in numbers],
            self.offsets[numbers],
            [self.values[number] for number in numbers],
        )


class RangeDecoder:
    """Decodes one task's records."""

    def __init__(self, decoder: Decoder, wanted: Range) -> None:
        self._decoder = decoder
        self._range = wanted
        self._spans = wanted.spans
        self._of_snapshot = wanted.spans.snapshot is not None
        self._is_mixed = False
        self._counted = np.zeros(len(wanted.spans), dtype=np.int64)

    def decode(self, messages: Sequence[Message]) -> Iterator[pa.RecordBatch]:
        """Yield the rows among these records. Raises ValueUnrepresentable."""
        chunk = Chunk.of(messages)
        try:
            if self._is_mixed:
                chunk = self._ours(chunk)
            batches = list(self._whole(chunk)) if chunk.values else []
        except (pa.ArrowInvalid, NotEnvelopes):
            yield from self._one_by_one(chunk)
        else:
            yield from batches

    def check(self) -> None:
        """Compare what was counted with the points. Raises RowsMissing, DataLoss."""
        if self._range.is_checked:
            self._spans.check(self._counted, self._range.log_start)

    def _whole(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        """Parse everything and let the rule choose among the rows; count only when all of it went well."""
        if self._range.is_counting:
            parsed = self._decoder.parse(None, chunk.values, of_snapshot=self._of_snapshot, names=COUNTED)
            self._counted += self._spans.counts(*self._admit(chunk.offsets, parsed))
            return
        counted = np.zeros_like(self._counted)
        batches = []
        for layout, numbers in self._decoder.groups(chunk.values):
            part = chunk if numbers is None else chunk.some(numbers)
            parsed = self._decoder.parse(layout, part.values, of_snapshot=self._of_snapshot)
            mask, index = self._admit(part.offsets, parsed)
            counted += self._spans.counts(mask, index)
            mask = mask & self._decoder.of_table(parsed).to_numpy(zero_copy_only=False)
            if mask.any():
                batches.append(self._finish(layout, part, parsed, mask))
        self._counted += counted
        yield from batches

    def _finish(self, layout: Layout, part: Chunk, parsed: Parsed, mask: Mask) -> pa.RecordBatch:
        if not mask.all():
            part = part.some(np.flatnonzero(mask).tolist())
            parsed = parsed.filtered(pa.array(mask))
        return self._decoder.finish(layout, parsed, part.values, lambda number: _old_key(part.messages[number]))

    def _admit(self, offsets: Numbers, parsed: Parsed) -> tuple[Mask, Numbers]:
        """Apply the rule to what the values say. Raises NotEnvelopes.

        Headers would come first, but reading them takes longer than parsing the row; capture writes no messages into
        the topics of tables, and who can write there by other means can make envelopes without such headers, too.
        """
        source = parsed.source
        if source["gen"].null_count:
            raise NotEnvelopes  # JSON, but no envelope: a message, whose headers say whether it is counted.
        wanted = self._spans.snapshot if self._of_snapshot else False
        is_ours = pc.fill_null(pc.equal(source["snapshot"], pa.scalar(wanted)), False)
        return self._spans.admit(
            offsets, _numbers(source["gen"]), _numbers(source["commit_lsn"]), is_ours.to_numpy(zero_copy_only=False)
        )

    def _ours(self, chunk: Chunk) -> Chunk:
        """Leave out the rows of snapshots, or all others. Raises NotEnvelopes."""
        numbers = [n for n, value in enumerate(chunk.values) if _is_of_snapshot(value) == self._of_snapshot]
        return chunk if len(numbers) == len(chunk.values) else chunk.some(numbers)

    def _one_by_one(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        """Let the rule choose among the records, then decode what belongs."""
        admitted = []
        counted = np.zeros_like(self._counted)
        for number, message in enumerate(chunk.messages):
            headers = _headers(message)
            facts = facts_of(headers, chunk.values[number])
            if facts is None:
                continue
            self._is_mixed |= (facts.snapshot is not None) != self._of_snapshot
            if (place := self._place(int(chunk.offsets[number]), facts)) is None:
                continue
            counted[place] += 1
            # A record whose facts are in its headers is a tombstone: it counts, and it is no row.
            if "gen" not in headers and self._decoder.is_of_table(chunk.values[number]):
                admitted.append(number)
        self._counted += counted
        if not admitted or self._range.is_counting:
            return
        part = chunk.some(admitted)
        try:
            for layout, numbers in self._decoder.groups(part.values):
                yield self._decode(layout, part if numbers is None else part.some(numbers))
        except NotEnvelopes:
            raise DataLoss(
                f"{self._spans.partition} holds a row of generation {self._spans.gen} between the offsets "
                f"{part.offsets[0]:,} and {part.offsets[-1]:,} that capture has not written, or whose version of the "
                "table is not in the schema topic.",
                "The log was damaged or written to by hand: do not read past this point.",
            ) from None

    def _decode(self, layout: Layout, part: Chunk) -> pa.RecordBatch:
        """Decode records that belong: whole once more, at last value by value."""

        def old_key(number: int) -> bytes | None:
            return _old_key(part.messages[number])

        try:
            parsed = self._decoder.parse(layout, part.values, of_snapshot=self._of_snapshot)
            return self._decoder.finish(layout, parsed, part.values, old_key)
        except pa.ArrowInvalid:
            return self._decoder.finish_plainly(layout, part.values, old_key)

    def _place(self, offset: int, facts: RowFacts) -> int | None:
        """Return the number of the span that a record belongs to."""
        number = int(np.searchsorted(self._spans.stop, offset, side="right"))
        if number < len(self._spans) and self._spans.span(number).admits(offset, facts):
            return number
        return None


def _is_of_snapshot(value: bytes | None) -> bool:
    if value is None:
        raise NotEnvelopes
    return is_of_snapshot(value)


def _numbers(column: pa.Array) -> Numbers:
    return cast(Numbers, pc.fill_null(column, -1).to_numpy(zero_copy_only=False))


def _headers(message: Message) -> dict[str, bytes]:
    return first_of_each(cast("list[tuple[str, bytes | None]]", message.headers() or []))


def _old_key(message: Message) -> bytes | None:
    return _headers(message).get(OLD_KEY)
