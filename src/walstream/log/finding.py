"""Finding a batch in a segment's bytes: quickly where all is well, and with care where it is not.

The quick way (`find`) walks from header to header, holding each against the offset that must come next. It looks at no
CRC, and need not: whoever finds a batch checks it. A header whose length or offset has rotted leads astray, and then
the next one does not fit. That is when the careful way is taken: from the segment's beginning, a batch at a time, each
checked before it is believed, and past damaged bytes to the next sound batch. So damage hides nothing but itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from walstream.errors import CorruptBatch
from walstream.log.batch import HEADER_BYTES, OFFSET_MAX, BatchHeader, check_crc, parse_header
from walstream.log.disk import File
from walstream.log.salvage import next_batch, sound_at

SCAN_BYTES = 1024 * 1024
"""How much a scan reads at a time."""

Source = Callable[[int, int], tuple[bytes, bool]]
"""From a position and a length to bytes, and whether they are all there is."""


class Place(NamedTuple):
    """Where a search ended."""

    position: int
    length: int
    expected: int
    """The offset that comes after the batch before it."""
    damage: tuple[int, int] | None = None
    """Offsets [from, to) whose bytes at `position` fail their checksum; to OFFSET_MAX if nothing sound follows."""
    following: int | None = None
    """Then: the offset of the next sound batch, if there is one."""


def pieces(file: File, limit: int, position: int, length: int) -> tuple[bytes, bool]:
    """Be a `Source`: read from a file as far as `limit`."""
    length = min(length, limit - position)
    return file.pread(length, position), position + length >= limit


def find(
    view: memoryview, offset: int, expected: int, rest: int, *, dense: bool, until: int = OFFSET_MAX
) -> tuple[int, int, int] | None:
    """Return (start, length, base offset) of the first batch in the view that ends at or after `offset`.

    With length 0 it has not begun at `start` yet, where the view ends; the offset is then the one that comes next.
    None: what is there does not fit. `expected` is the offset at the view's beginning, `rest` are the bytes there are
    from there on, in the view and after it; `until` is where the segment's offsets end.
    """
    start, size = 0, len(view)
    while size - start >= HEADER_BYTES:
        try:
            header = parse_header(view, start)
        except CorruptBatch:
            return None
        if header.base_offset != expected and (dense or not _may_leave_gap(view, start, header, expected)):
            return None
        if start + header.length > rest or header.last_offset >= until:
            return None
        if header.last_offset >= offset:
            return start, header.length, header.base_offset
        if not dense and not check_crc(view, start, header.length):
            return None  # A gap would hide where a wrong length leads.
        start += header.length
        expected = header.next_offset
    if start == 0:
        return None
    return start, 0, expected


def _may_leave_gap(data: bytes | memoryview, start: int, header: BatchHeader, expected: int) -> bool:
    """Tell whether a batch may stand behind a gap: it does not go back, nor is contradicted by the one after it."""
    if header.base_offset < expected:
        return False
    after = sound_at(data, start + header.length)
    return after is None or after.base_offset >= header.next_offset


def place_around_damage(source: Source, base_offset: int, offset: int, *, dense: bool, end: int = OFFSET_MAX) -> Place:
    """Return where the first batch stands that ends at or after `offset`, or what keeps it from being found.

    `end` is where the segment's offsets end, if that is known. No checksum covers a batch's offset: one that says after
    damage that it belongs further on is damaged itself, and the damage goes on behind it.
    """
    position, expected, wanted = 0, base_offset, 4 * SCAN_BYTES
    while True:
        data, is_rest = source(position, wanted)
        header = sound_at(data, 0)
        fits = (
            header is not None
            and header.last_offset < end
            and (header.base_offset == expected or (not dense and _may_leave_gap(data, 0, header, expected)))
        )
        if header is not None and fits:
            if header.last_offset >= offset:
                return Place(position, header.length, expected)
            position += header.length
            expected = header.next_offset
            continue
        if not data:
            return Place(position, 0, expected)
        following = next_batch(data, header.length if header else 1, _within(expected, end))
        if following is None and not is_rest:
            wanted *= 2
            continue
        if following is None or following[1].base_offset > offset:
            after = following[1].base_offset if following else None
            return Place(position, 0, expected, (expected, OFFSET_MAX if after is None else after), after)
        position += following[0]
        expected = following[1].base_offset


def _within(start: int, end: int) -> Callable[[BatchHeader], bool]:
    return lambda header: start <= header.base_offset and header.last_offset < end


def headers_in(file: File, position: int, end: int) -> Iterator[tuple[int, BatchHeader] | Place]:
    """Yield (position, header) of each batch, and a `Place` wherever bytes had to be passed over."""
    held: tuple[int, BatchHeader] | None = None
    floor = before_held = 0
    while position + HEADER_BYTES <= end:
        chunk = file.pread(min(SCAN_BYTES, end - position), position)
        start, is_bad = 0, False
        while len(chunk) - start >= HEADER_BYTES:
            header = _possible(chunk, start, end - position, floor)
            if header is None:
                is_bad = True
                break
            if held is not None:
                yield held
            held = (position + start, header)
            before_held, floor = floor, header.next_offset
            start += header.length
        position += start
        if is_bad:
            search_from = position + 1
            if held is not None and sound_at(file.pread(held[1].length, held[0]), 0) is not None:
                yield held
            elif held is not None:
                search_from, floor = held[0] + 1, before_held
            held = None
            place, found = _next_in(file, search_from, end, floor)
            yield place
            if found is None:
                return
            position = found
        elif start == 0:
            break
    if held is not None:
        yield held


def _possible(chunk: bytes, start: int, rest: int, floor: int) -> BatchHeader | None:
    try:
        header = parse_header(chunk, start)
    except CorruptBatch:
        return None
    return header if start + header.length <= rest and header.base_offset >= floor else None


def _next_in(file: File, position: int, end: int, floor: int) -> tuple[Place, int | None]:
    """Return where bytes are passed over, and the position of the next sound batch."""
    wanted = 4 * SCAN_BYTES
    while True:
        data, is_rest = pieces(file, end, position, wanted)
        found = next_batch(data, 0, _within(floor, OFFSET_MAX))
        if found is not None:
            after = found[1].base_offset
            return Place(position - 1, 0, floor, (floor, after), after), position + found[0]
        if is_rest:
            return Place(position - 1, 0, floor, (floor, OFFSET_MAX), None), None
        wanted *= 2
