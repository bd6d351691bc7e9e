"""`walstream tail`: reads a topic, as `tail` reads a file: the last records, then perhaps the ones to come."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, KafkaError, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec

from walstream.capture.kafka import OF_GROUPS
from walstream.cli import moments
from walstream.cli.client import Client
from walstream.cli.interrupt import Interrupt
from walstream.cli.options import command
from walstream.cli.output import Output, plural
from walstream.cli.rendering import TEMPLATE_FIELDS, Line, Seen, Template, to_json
from walstream.errors import UsageError

POLL_S = 0.2
BATCH_RECORDS = 500

Bounds = dict[int, tuple[int, int]]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "tail")(tail)


def tail(
    topic: Annotated[str, typer.Argument(help="Name of the topic.")],
    client: Client,
    output: Output,
    begin: Annotated[str, typer.Option("--from", metavar="PLACE", help=f"Where to begin: {moments.PLACES}.")] = "-10",
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f", help="Wait for the records to come.")] = False,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Stop after this many records.")] = None,
    partitions: Annotated[
        list[int] | None, typer.Option("--partition", "-p", help="Only this partition; repeatable.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="TEMPLATE", help="A line per record, of {" + "} {".join(TEMPLATE_FIELDS) + "}."
        ),
    ] = None,
) -> None:
    """Read a topic: the last ten records by default."""
    place = moments.parse(begin, datetime.now(UTC))
    show = _printer(output, template)
    bounds = _bounds(client, topic, partitions)
    starts = _starts(client, topic, bounds, place)
    shown = 0
    with (
        Interrupt() as interrupt,
        closing(_read(client, topic, starts, bounds, interrupt, follow=follow, last=_last(place))) as records,
    ):
        for record in records:
            show(record)
            shown += 1
            if shown == count or interrupt.requested:
                break
    if output.is_for_people and sys.stderr.isatty():
        output.note(f"{plural(shown, 'record')} of {topic}.")


def _bounds(client: Client, topic: str, chosen: list[int] | None) -> Bounds:
    known = client.partitions(topic)
    for index in chosen or []:
        if index not in known:
            raise UsageError(f"Topic {topic} has no partition {index}: it has {plural(len(known), 'partition')}.")
    found = client.bounds([(topic, index) for index in chosen or known])
    return {index: bounds for (_, index), bounds in found.items()}


def _starts(client: Client, topic: str, bounds: Bounds, place: moments.Place) -> dict[int, int]:
    if place.kind == "time":
        spec: OffsetSpec = OffsetSpec.for_timestamp(place.value)
        found = client.offsets({(topic, index): spec for index in bounds})
        return {index: bounds[index][1] if offset < 0 else offset for (_, index), offset in found.items()}
    starts = {}
    for index, (start, end) in bounds.items():
        wanted = {"beginning": start, "end": end, "offset": place.value, "last": end - place.value}[place.kind]
        starts[index] = min(max(wanted, start), end)
    return starts


def _last(place: moments.Place) -> int | None:
    return place.value if place.kind == "last" else None


def _read(
    client: Client,
    topic: str,
    starts: dict[int, int],
    bounds: Bounds,
    interrupt: Interrupt,
    *,
    follow: bool,
    last: int | None,
) -> Generator[Seen]:
    """Yield what is there now, then, when following, what comes; `last` records of all partitions in order of time."""
    backlog = {index for index, start in starts.items() if start < bounds[index][1]}
    if not backlog and not follow:
        return
    consumer = client.consumer(enable_partition_eof=True, auto_offset_reset="error", fetch_wait_max_ms=100)
    held: list[Seen] = []
    try:
        consumer.assign([TopicPartition(topic, index, start) for index, start in starts.items()])
        while (backlog or follow) and not interrupt.requested:
            sys.stdout.flush()
            for message in consumer.consume(BATCH_RECORDS, POLL_S):
                index, error = message.partition() or 0, message.error()
                if error is not None and error.code() in OF_GROUPS:
                    continue
                if error is not None:
                    _check(client, message, topic)
                    backlog.discard(index)
                    continue
                record = _seen(message)
                was_there = record.offset < bounds[index][1]
                if last is not None and was_there:
                    held.append(record)
                elif was_there or follow:
                    yield record
                if record.offset + 1 >= bounds[index][1]:
                    backlog.discard(index)
            if last is not None and not backlog:
                held.sort(key=lambda record: (record.timestamp_ms or 0, record.partition, record.offset))
                yield from held[-last:] if last else []
                held, last = [], None
    finally:
        consumer.close()


def _check(client: Client, message: Message, topic: str) -> None:
    """Let the end of a partition pass, and raise every other error."""
    error = message.error()
    assert error is not None
    if error.code() != KafkaError._PARTITION_EOF:
        raise client.translate(error, f"topic {topic}, partition {message.partition()}")


def _seen(message: Message) -> Seen:
    kind, timestamp_ms = message.timestamp()
    headers: Any = message.headers() or []
    return Seen(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        timestamp_ms=None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_ms,
        key=message.key(),
        value=message.value(),
        headers=tuple(headers),
    )


def _printer(output: Output, template: str | None) -> Callable[[Seen], None]:
    if template is not None:
        filled = Template(template)
        return lambda record: print(filled.fill(record))
    if not output.is_for_people:
        return lambda record: print(to_json(record))
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    line = Line(is_coloured=is_terminal and not os.environ.get("NO_COLOR"), width=width)
    return lambda record: print(line.show(record))
