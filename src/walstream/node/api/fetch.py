"""Fetch: which records a consumer gets, and how long it waits for them.

A fetch reads its partitions in turn until the response is full; the next one begins behind the last partition that gave
records, so that a busy partition cannot starve the others. If that is less than the client's minimum the request waits
until a partition has more, or its time is over, and reads again.

What is in the page cache is read on the event loop; what is not is read on a thread, so that a cold disk stalls one
client and not the node. Bytes on the wire are the business of `api/fetch_wire.py`.

A leader that has just begun may know an older high watermark than readers were told before. Who stands at or above it
waits, like everybody who has read all; and if that does not end in time is told OFFSET_NOT_AVAILABLE, which clients try
again: neither that the offset is out of range, upon which they would begin somewhere else, nor that the log ends here.

A request may name partitions of which the answer is to tell resolved positions, too: a reader of many partitions then
has its records and what is over in the others by one answer. They are looked up last, when the records have been read.
"""

from __future__ import annotations

import asyncio
import uuid

from walstream.error_codes import codes
from walstream.errors import NotLeader, WalstreamError
from walstream.log.partition_log import PartitionLog
from walstream.node.api.fetch_wire import FLEXIBLE_FROM, Answer, FetchRequest, read_request, write_response
from walstream.node.api.leading import led_partition, resolved_positions
from walstream.node.context import Context
from walstream.node.sessions import Turn, Wanted
from walstream.node.wire import Buffer, Source

__all__ = ["FLEXIBLE_FROM", "fetch"]

BYTES_MAX_UNDER_PRESSURE = 1024 * 1024
"""What a response may hold while clients together have more to read than the node likes to keep for them."""


async def fetch(context: Context, source: Source) -> list[Buffer]:
    """Answer with the records that the client asks for."""
    node = context.node
    request = read_request(source, context.version)
    turn = node.sessions.begin(
        request.session_id, request.session_epoch, request.wanted, request.forgotten, node.store.monotonic_ms()
    )
    if turn.error_code:
        return write_response(context.version, (), error_code=turn.error_code)
    reading = Reading(context, request, turn)
    await reading.run()
    answers = reading.answers_to_send()
    failed = [answer.code for answer in answers if answer.code]
    if failed:
        node.metrics.count_errors(failed)
    resolved = None if request.resolving is None else resolved_positions(context, request.resolving, reading.brought())
    return write_response(
        context.version,
        answers,
        session_id=turn.session_id,
        isolation_level=request.isolation_level,
        resolved=resolved,
    )


class Reading:
    """One fetch request being filled."""

    def __init__(self, context: Context, request: FetchRequest, turn: Turn) -> None:
        self._context = context
        self._request = request
        self._turn = turn
        self._answers: dict[int, Answer] = {}
        self._partitions: dict[int, PartitionLog] = {}
        self._bytes = 0
        self._has_error = False

    async def run(self) -> None:
        """Read; wait and read again while there is too little and time is left."""
        loop = asyncio.get_running_loop()
        wait_ms = min(self._request.wait_ms_max, self._context.node.config.limits.fetch_wait_ms_max)
        deadline = loop.time() + max(wait_ms, 0) / 1000
        await self._read()
        while not self._is_enough() and loop.time() < deadline:
            await self._wait(deadline)
            await self._read()

    def answers_to_send(self) -> list[Answer]:
        """Return the answers in the order of the request; of a session, those that say something new."""
        answers = []
        for number in range(len(self._turn.wanted)):
            answer = self._answers[number]
            if self._turn.is_incremental and not _is_news(answer):
                continue
            if not answer.code and answer.wanted.offset >= answer.high_watermark:
                self._check_settled(self._partitions[number], answer)
            answer.wanted.told = None if answer.code else (answer.high_watermark, answer.log_start)
            answers.append(answer)
        return answers

    def _check_settled(self, partition: PartitionLog, answer: Answer) -> None:
        """Do not tell a reader that it has come to the end before the leader knows where that is."""
        try:
            self._context.node.placement.check_settled(partition)
        except WalstreamError as error:
            answer.code = codes(error).kafka

    def brought(self) -> list[PartitionLog]:
        """Return the partitions that gave records."""
        return [self._partitions[number] for number, answer in self._answers.items() if len(answer.records)]

    def _is_enough(self) -> bool:
        return self._has_error or not self._turn.wanted or self._bytes >= max(self._request.bytes_min, 1)

    async def _read(self) -> None:
        """Read every partition that may have something, beginning where the last fetch left off."""
        session, peer, count = self._turn.session, self._context.connection, len(self._turn.wanted)
        first = session.turn if session else peer.fetch_turn
        bytes_max = self._bytes_max()
        next_turn = first
        for step in range(count):
            number = (first + step) % count
            if not self._may_have_more(number):
                continue
            answer = await self._read_partition(number, bytes_max - self._bytes)
            self._answers[number] = answer
            self._has_error = self._has_error or answer.code != 0
            if len(answer.records):
                self._bytes += len(answer.records)
                next_turn = number + 1
        if session:
            session.turn = next_turn
        else:
            peer.fetch_turn = next_turn

    def _may_have_more(self, number: int) -> bool:
        """Say whether reading the partition, perhaps again, can give more; if so, what it gave before is let go."""
        before = self._answers.get(number)
        if before is None or not len(before.records):
            return True
        if before.high_watermark == self._partitions[number].high_watermark:
            return False
        self._bytes -= len(before.records)
        return True

    def _bytes_max(self) -> int:
        node = self._context.node
        room = max(node.unsent.bytes_max - node.unsent.used_bytes, BYTES_MAX_UNDER_PRESSURE)
        return min(self._request.bytes_max, node.config.limits.fetch_bytes_max, room)

    async def _read_partition(self, number: int, bytes_left: int) -> Answer:
        wanted, partition = self._turn.wanted[number], self._partitions.get(number)
        if partition is None:
            try:
                partition = self._partitions[number] = self._find(wanted)
            except WalstreamError as error:
                return Answer(wanted, codes(error).kafka)
        if not partition.is_leader:
            return Answer(wanted, codes(NotLeader).kafka)
        answer = Answer(wanted, 0, partition.high_watermark, partition.log_start)
        has_read_all = partition.high_watermark <= wanted.offset <= partition.log_end
        if has_read_all or (bytes_left <= 0 and self._bytes):
            return answer
        try:
            bytes_max = max(min(wanted.bytes_max, bytes_left), 1)
            records: Buffer | None = partition.read_cached(wanted.offset, bytes_max)
            if records is None:
                self._context.node.metrics.cold_reads += 1
                records = await self._context.in_thread(partition.read_blocking, wanted.offset, bytes_max)
        except WalstreamError as error:
            answer.code = codes(error).kafka
            return answer
        answer.high_watermark, answer.log_start = partition.high_watermark, partition.log_start
        answer.records = records
        self._context.node.metrics.fetched_bytes += len(records)
        return answer

    def _find(self, wanted: Wanted) -> PartitionLog:
        """Return the partition, if the client may read it and knows the right epoch of its leader."""
        topic = wanted.topic
        name = self._context.node.catalogue.topic_by_id(topic).name if isinstance(topic, uuid.UUID) else topic
        return led_partition(self._context, "read", name, wanted.partition, wanted.leader_epoch)

    async def _wait(self, deadline: float) -> None:
        """Wait until a partition advances or the time is over."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        timer = loop.call_at(deadline, wake)
        stops = [partition.on_advance(wake) for partition in self._partitions.values()]
        try:
            await woken
        finally:
            timer.cancel()
            for stop in stops:
                stop()


def _is_news(answer: Answer) -> bool:
    told = answer.wanted.told
    return bool(answer.code or len(answer.records) or told != (answer.high_watermark, answer.log_start))
