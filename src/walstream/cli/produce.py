"""`walstream produce`: lines, or whole files, become records."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import typer
from confluent_kafka import KafkaError, Message, Producer

from walstream.cli.client import Client
from walstream.cli.interrupt import Interrupt
from walstream.cli.options import command, pairs
from walstream.cli.output import Output, plural
from walstream.errors import UsageError, WalstreamError

Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]
KeyAndValue = tuple[bytes | None, bytes | None]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "produce")(produce)


@dataclass
class Delivery:
    """What the node has acknowledged so far, and the first thing it refused."""

    records: int = 0
    value_bytes: int = 0
    failed: int = 0
    error: KafkaError | None = None
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Take librdkafka's word on one record."""
        if error is not None:
            self.failed += 1
            self.error = self.error or error
            return
        partition, offset = message.partition() or 0, message.offset() or 0
        first, last = self.ranges.get(partition, (offset, offset))
        self.ranges[partition] = (min(first, offset), max(last, offset))
        self.records += 1
        self.value_bytes += len(message)


def produce(
    topic: Annotated[str, typer.Argument(help="Name of the topic.")],
    client: Client,
    output: Output,
    files: Annotated[list[Path] | None, typer.Argument(help="Files to read; otherwise stdin.")] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="The key of every record.")] = None,
    key_separator: Annotated[
        str | None, typer.Option("--key-separator", "-K", metavar="TEXT", help="A line is KEY, this, VALUE.")
    ] = None,
    headers: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; repeatable.")
    ] = None,
    partition: Annotated[int, typer.Option(help="Only to this partition; otherwise by key.", show_default=False)] = -1,
    whole: Annotated[bool, typer.Option("--whole", help="Each file is one record, not each line.")] = False,
    empty_is_null: Annotated[
        bool, typer.Option("--empty-is-null", help="An empty value is a null: it deletes its key when compacted.")
    ] = False,
    compression: Annotated[Compression, typer.Option("--compression", "-z", help="Of the batches.")] = "none",
    acks: Annotated[
        Literal["all", "1", "0"], typer.Option(help="all, 1: durable when acknowledged. 0: not acknowledged.")
    ] = "all",
    linger_ms: Annotated[int, typer.Option(min=0, help="How long to wait for more records before sending.")] = 5,
) -> None:
    """Write records to a topic: one per line of stdin or of FILES.

    Sent idempotently with acks=all, so that a retry never writes a record twice.
    """
    if key is not None and key_separator is not None:
        raise UsageError("--key and --key-separator contradict each other.")
    if key_separator == "":
        raise UsageError("--key-separator is empty.", "Give the text between key and value, such as `:`.")
    if not files and sys.stdin.isatty():
        output.note(f"Type records for {topic}, one per line. Ctrl-D sends the rest and ends.")
    producer = client.producer(
        acks=acks, enable_idempotence=acks == "all", compression_type=compression, linger_ms=linger_ms
    )
    fixed: dict[str, Any] = {"topic": topic, "partition": partition}
    if headers:
        fixed["headers"] = list(pairs(headers, "--header", "source=shell").items())
    delivery = Delivery()
    with Interrupt() as interrupt, client.translated(f"topic {topic}"):
        try:
            for found_key, value in interrupt.until(_read(files, whole, key_separator)):
                if delivery.error:
                    break
                chosen = key.encode() if key is not None else found_key
                _send(producer, delivery, {**fixed, "key": chosen, "value": value or None if empty_is_null else value})
        except UsageError:
            # Records before the one that cannot be read are sent already, or queued: the user learns how many.
            _drain(producer, client, output, interrupt)
            _tell(topic, delivery, client, output)
            raise
        _drain(producer, client, output, interrupt)
    _tell(topic, delivery, client, output)


def _read(files: list[Path] | None, whole: bool, separator: str | None) -> Iterator[KeyAndValue]:
    if not files:
        try:
            yield from _split(sys.stdin.buffer, whole, separator)
        except OSError as error:  # A terminal that was closed.
            raise UsageError(f"stdin cannot be read: {error.strerror}.") from None
        return
    for file in files:
        try:
            with file.open("rb") as stream:
                yield from _split(stream, whole, separator)
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}.") from None


def _split(stream: BinaryIO, whole: bool, separator: str | None) -> Iterator[KeyAndValue]:
    if whole:
        yield None, stream.read()
        return
    for number, raw in enumerate(stream, start=1):
        line = raw.rstrip(b"\r\n")
        if separator is None:
            yield None, line
            continue
        key, found, value = line.partition(separator.encode())
        if not found:
            raise UsageError(f"Line {number} has no key: there is no {separator!r} in it.")
        yield key, value


def _send(producer: Producer, delivery: Delivery, record: dict[str, Any]) -> None:
    while True:
        try:
            producer.produce(**record, on_delivery=delivery.report)
        except BufferError:
            # librdkafka's queue is full: its bound is ours too, so wait for room.
            producer.poll(0.1)
        else:
            producer.poll(0)
            return


def _drain(producer: Producer, client: Client, output: Output, interrupt: Interrupt) -> None:
    if interrupt.requested and len(producer):
        output.note(f"Sending the last {plural(len(producer), 'record')}. Ctrl-C again stops at once.")
    if producer.flush(client.timeout_s):
        # What is still queued is given up, so that each record has a verdict.
        producer.purge()
        producer.flush(1)


def _tell(topic: str, delivery: Delivery, client: Client, output: Output) -> None:
    partitions = [
        {"partition": index, "first_offset": first, "last_offset": last}
        for index, (first, last) in sorted(delivery.ranges.items())
    ]
    sentence = f"Produced {plural(delivery.records, 'record')} to {topic}{_where(delivery.ranges)}."
    result = {
        "topic": topic,
        "records": delivery.records,
        "failed_records": delivery.failed,
        "value_bytes": delivery.value_bytes,
        "partitions": partitions,
    }
    output.done(sentence, result)
    if delivery.error is not None:
        error: WalstreamError = client.translate(delivery.error, f"topic {topic}")
        error.message = f"{plural(delivery.failed, 'record')} not acknowledged. {error.message}"
        raise error


def _where(ranges: dict[int, tuple[int, int]]) -> str:
    """Say which offsets of which partitions were written, of the first few partitions."""
    shown = [
        f"{index}@{first}" + (f"-{last}" if last > first else "") for index, (first, last) in sorted(ranges.items())
    ]
    more = [f"and {len(shown) - 8} more partitions"] if len(shown) > 8 else []
    return f" ({', '.join([*shown[:8], *more])})" if shown else ""
