"""From the messages of a transaction to the records of the log: Debezium's envelope, one record per change.

Owns the loop over a transaction and the records that are not of one row: truncates and logical messages. How a row is
written is in rendering.py, where a record says it comes from in provenance.py, where it goes in streams.py. Refuses to
know PostgreSQL sessions and Kafka clients: what must be asked is asked through `describe`. Sans-IO.

    c   insert, or the second half of a key change          t   truncate: one record per table, without a key
    u   update                                              m   logical message: <prefix>.message, key {"prefix":…}
    d   delete, or the first half of a key change           r   a row of a snapshot

A change of the column that names the tenant is written as a key change is: the tenant that had the row gets its delete.

`seq` counts the changes of a transaction from 1, those included that no stream takes. So it depends on the order that
PostgreSQL sends them in and on nothing else but whether a key or a tenant has changed.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import error as StructError
from typing import Final, TypeAlias

from walstream.capture.escaping import quoted_name
from walstream.capture.provenance import (
    DELETE_OP,
    INSERT_OP,
    MESSAGE_OP,
    READ_OP,
    TRUNCATE_OP,
    UPDATE_OP,
    Context,
    Moment,
    Origin,
    Output,
    Stamp,
)
from walstream.capture.rendering import TableRenderer
from walstream.capture.shapes import RowFunction
from walstream.capture.streams import Streams
from walstream.errors import DecodeError
from walstream.postgres.messages import LogicalMessage, Relation, Truncate
from walstream.postgres.pgoutput import decode
from walstream.postgres.relations import RelationInfo
from walstream.postgres.types import Types

__all__ = ["HEARTBEAT_PREFIX", "Output", "Renderer", "Stamp"]

HEARTBEAT_PREFIX: Final = "walstream.heartbeat"
"""Messages of this prefix move an idle slot on; they are no records."""

CHUNK_RECORDS: Final = 128
"""Records made before they are handed out: enough that the loop over rows is not left for each of them."""

_HEADER_BYTES: Final = 5
"""The kind and the relation id of a row message: what its function is looked up by."""

_UNREADABLE: Final = (ValueError, KeyError, IndexError, StructError)

_Entry: TypeAlias = tuple[RowFunction, Context]
OnError: TypeAlias = Callable[[DecodeError, int], None]


class Renderer:
    """Renders transactions in commit order; it remembers the relations that they describe. One for each generation."""

    def __init__(
        self,
        *,
        database: str,
        source_epoch: int,
        generation: int,
        streams: Streams,
        types: Types,
        describe: Callable[[Relation], RelationInfo],
    ) -> None:
        """Take what all records have in common; `describe` is called for each Relation message, before its rows."""
        self._database = database
        self._source_epoch = source_epoch
        self._generation = generation
        self._streams = streams
        self._types = types
        self._describe = describe
        self._tables: dict[int, TableRenderer] = {}
        self._message_origin = Origin(database, "", "", 0, streams.tenant_of_messages)

    def render(self, rows: Iterable[bytes], stamp: Stamp, on_error: OnError | None = None) -> Iterator[Output]:
        """Yield the records of a transaction, whose messages are as capture/source.py says.

        Raises DecodeError, which carries the message; with `on_error` that is called instead, with the sequence number
        that the message then takes, and the rest goes on. Raises ConfigError when a stream cannot take a relation.
        """
        records: list[Output] = []
        moment = Moment(self._source_epoch, self._generation, stamp, records.append)
        entries: dict[bytes, _Entry] = {}
        seq = 1
        for data in rows:
            entry = entries.get(data[:_HEADER_BYTES])
            if entry is None:
                if data[0] == _RELATION:
                    self._take(data)
                    entries.clear()
                    continue
                entry = self._entry(data, moment)
                if data[0] in _OPERATIONS:
                    entries[data[:_HEADER_BYTES]] = entry
            try:
                seq = entry[0](data, entry[1], seq)
            except (DecodeError, *_UNREADABLE) as error:
                told = _named(error, data)
                if on_error is None:
                    raise told  # noqa: B904 - its cause, unless it is the error itself, is shown as its context
                on_error(told, seq)
                seq += 1
            if len(records) >= CHUNK_RECORDS:
                yield from records
                records.clear()
        yield from records

    def copy(self, info: RelationInfo, stamp: Stamp) -> Callable[[Sequence[bytes]], list[Output]]:
        """Return a function from rows of COPY's text format, columns as in `info`, to the records of a snapshot.

        The function raises DecodeError. Raises ConfigError when a stream cannot take the relation.
        """
        table = self._table(info)
        records: list[Output] = []
        moment = Moment(self._source_epoch, self._generation, stamp, lambda record: records.append(record))
        context = Context(moment, table.origin, READ_OP)

        def render(lines: Sequence[bytes]) -> list[Output]:
            nonlocal records
            records = []
            function = table.copy
            try:
                for line in lines:
                    function(line, context, 0)
            except _UNREADABLE as error:
                raise _named(error, line) from error
            return records

        return render

    def _entry(self, data: bytes, moment: Moment) -> _Entry:
        """Return the function for a message, and its context in this transaction."""
        op = _OPERATIONS.get(data[0])
        if op is None:
            return self._other, Context(moment, self._message_origin, MESSAGE_OP)
        table = self._known(int.from_bytes(data[1:_HEADER_BYTES]), data)
        function = table.insert if op == INSERT_OP else table.update if op == UPDATE_OP else table.delete
        return function, Context(moment, table.origin, op)

    def _known(self, relation_id: int, data: bytes) -> TableRenderer:
        table = self._tables.get(relation_id)
        if table is None:
            raise DecodeError(f"A row of relation {relation_id}, which PostgreSQL has not described.", data=data)
        return table

    def _table(self, info: RelationInfo) -> TableRenderer:
        types = tuple(self._types.resolve(column.type_oid) for column in info.columns)
        known = self._tables.get(info.id)
        if known is not None and known.info == info and known.types == types:
            return known
        return TableRenderer(info, types, self._streams, self._database)

    def _take(self, data: bytes) -> None:
        """Learn what a relation is from here on."""
        message = decode(data)
        assert isinstance(message, Relation), "the kind says so"
        self._tables[message.id] = self._table(self._describe(message))

    def _other(self, data: bytes, context: Context, seq: int) -> int:
        """Render a message that is neither a row nor a relation; return the next sequence number."""
        message = decode(data)
        if isinstance(message, Truncate):
            tables = [self._known(relation_id, data) for relation_id in message.relation_ids]
            for table in tables:
                table_context = context.at(table.origin, TRUNCATE_OP)
                value, headers = _bare(table_context, b'"after":null', seq)
                for target in table.truncate_targets:
                    context.emit((target.topic, value, None, [*headers]))
                seq += 1
        elif isinstance(message, LogicalMessage):
            if message.prefix != HEARTBEAT_PREFIX:
                self._emit_message(message, context, seq)
            seq += 1
        return seq

    def _emit_message(self, message: LogicalMessage, context: Context, seq: int) -> None:
        prefix = quoted_name(message.prefix)
        content = b2a_base64(message.content, newline=False)
        body = b'"after":null,"message":{"prefix":%b,"content":"%b"}' % (prefix, content)
        value, headers = _bare(context, body, seq)
        context.emit((self._streams.message_topic, value, b'{"prefix":%b}' % prefix, headers))


_RELATION: Final = ord("R")
_OPERATIONS: Final = {ord("I"): INSERT_OP, ord("U"): UPDATE_OP, ord("D"): DELETE_OP}


def _bare(context: Context, body: bytes, seq: int) -> tuple[bytes, list[tuple[str, bytes]]]:
    """Return value and headers of a record that is not about one row."""
    number = b"%d" % seq
    value = b'{"before":null,%b%b%b%b' % (body, context.source, number, context.end)
    return value, [*context.headers, ("seq", number)]


def _named(error: Exception, data: bytes) -> DecodeError:
    """Return the error as it is told to others: with the bytes."""
    if isinstance(error, DecodeError):
        return error
    reason = str(error) or type(error).__name__
    return DecodeError(f"A row cannot be rendered: {reason}. It begins with {bytes(data[:64])!r}.", data=bytes(data))
