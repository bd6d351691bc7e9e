"""ListOffsets and OffsetForLeaderEpoch: where a partition begins and ends, at a time and in an epoch.

Looking for a time reads the log, so it happens on a thread. Asking for `RESOLVED_TIMESTAMP` does not: it is answered
from memory with a resolved position (see `log/stamps.py`).
"""

from __future__ import annotations

from walstream.errors import InvalidRequest
from walstream.node.api.answers import code_of
from walstream.node.api.leading import UNKNOWN, led_partition
from walstream.node.context import Context
from walstream.node.wire import Message, Reply

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED = -1, -2, -3, -4, -5

RESOLVED_TIMESTAMP = 2**62
"""Asks for an offset and a time so that every record at or after the offset, now and for ever, has a later append time.
No record has this time, so another log answers -1, as this one does while it does not know, and for topics without
append time."""


async def list_offsets(context: Context, request: Message) -> Reply:
    """Return offsets for the times, or the names of places, that are asked for."""
    topics = []
    for topic in request.topics:
        partitions = [await _answer(context, topic.name, asked) for asked in topic.partitions]
        topics.append({"name": topic.name, "partitions": partitions})
    return {"topics": topics}


async def _answer(context: Context, topic: str, asked: Message) -> Reply:
    index = asked.partition_index
    try:
        partition = led_partition(context, "describe", topic, index, asked.current_leader_epoch)
        if asked.timestamp not in (EARLIEST, EARLIEST_LOCAL):
            context.node.placement.check_settled(partition)
        offset, timestamp_ms = UNKNOWN
        if asked.timestamp == LATEST:
            offset = partition.high_watermark
        elif asked.timestamp in (EARLIEST, EARLIEST_LOCAL):
            offset = partition.log_start
        elif asked.timestamp == MAX_TIMESTAMP:
            found = await context.in_thread(partition.max_timestamp)
            offset, timestamp_ms = found or UNKNOWN
        elif asked.timestamp == RESOLVED_TIMESTAMP:
            offset, timestamp_ms = partition.resolve() or UNKNOWN
        elif asked.timestamp >= 0:
            found = await context.in_thread(partition.offset_for_time, asked.timestamp)
            offset, timestamp_ms = found or UNKNOWN
        elif asked.timestamp != LATEST_TIERED:
            raise InvalidRequest(f"{asked.timestamp} is not a timestamp.")
    except Exception as error:
        return {"partition_index": index, **code_of(context, error)}
    epoch = partition.leader_epoch if offset == partition.high_watermark else partition.epochs.epoch_at(offset)
    return {"partition_index": index, "offset": offset, "timestamp": timestamp_ms, "leader_epoch": epoch}


async def offset_for_leader_epoch(context: Context, request: Message) -> Reply:
    """Return where epochs end, so that a consumer can tell whether what it read still stands."""
    return {
        "topics": [
            {
                "topic": topic.topic,
                "partitions": [_epoch_end(context, topic.topic, asked) for asked in topic.partitions],
            }
            for topic in request.topics
        ]
    }


def _epoch_end(context: Context, topic: str, asked: Message) -> Reply:
    try:
        partition = led_partition(context, "describe", topic, asked.partition, asked.current_leader_epoch)
    except Exception as error:
        return {"partition": asked.partition, **code_of(context, error)}
    if asked.leader_epoch > partition.leader_epoch:
        return {"partition": asked.partition}
    epoch, end_offset = partition.end_offset_for(asked.leader_epoch)
    return {"partition": asked.partition, "leader_epoch": epoch, "end_offset": end_offset}
