"""Outbox tables: each row that is inserted is a message, sent as it is to the topic that the row names.

Owns what becomes of the columns; refuses to know where rows come from. Updates and deletes are ignored, so a message
may be deleted as soon as it was written, in the same transaction even. Rows that were there at the snapshot are
messages that nobody has sent yet. Sans-IO.

    route column     names the topic, see streams.py               payload   the value: text and json as they are, bytea
    key column       the key: its text, null for none                        as its bytes, null for none
    header columns   a header each, by the column's name, unless null; json and jsonb objects: a header for each member

A value has no `source`, so *the rule* is applied to what the headers say: `gen` and `snapshot` are among them. A row
with a header of such a name, or with a route into the topic of a table, is an error of that row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Final

from walstream.capture.columns import unhex
from walstream.capture.provenance import Context, Header, Output
from walstream.config import StreamRule, is_reserved_header
from walstream.errors import ConfigError
from walstream.postgres.messages import Value
from walstream.postgres.relations import RelationInfo
from walstream.postgres.types import Kind, TypeInfo

TOPICS_MAX: Final = 10_000
"""How many names of topics are remembered, so that all records of a topic name it with the same object."""

_JSON_TYPES: Final = {114, 3802}


class Outbox:
    """Makes messages of the rows of one table by one rule."""

    def __init__(
        self,
        rule: StreamRule,
        info: RelationInfo,
        types: Sequence[TypeInfo],
        topic_of: Callable[[str], str],
        table_topics: Collection[str],
    ) -> None:
        """Take the rule, the table, what makes a topic of a route, and a live view of the topics that tables have.

        Raises ConfigError when a column is missing.
        """
        numbers = {column.name: index for index, column in enumerate(info.columns)}
        wanted = (rule.outbox_route_column, rule.outbox_key_column, rule.outbox_payload_column)
        if missing := [name for name in (*wanted, *rule.outbox_header_columns) if name not in numbers]:
            raise ConfigError(
                f"The outbox {info.schema}.{info.table} has no column {', '.join(missing)}.",
                "Name its columns in [[streams]]: outbox_route_column, outbox_key_column, outbox_payload_column,"
                " outbox_header_columns.",
            )
        self._route, self._key, self._payload = (numbers[name] for name in wanted)
        self._headers = [
            (name, numbers[name], types[numbers[name]].base_oid in _JSON_TYPES) for name in rule.outbox_header_columns
        ]
        self._binary = {index for index, known in enumerate(types) if known.kind is Kind.BYTEA}
        self._topic_of = topic_of
        self._table_topics = table_topics
        self._topics: dict[bytes, str] = {}

    def message(self, values: Sequence[Value], context: Context, headers: list[Header]) -> Output:
        """Return the record of a row; `headers` are those that every record has. Raises ValueError."""
        route = values[self._route] or b""
        assert isinstance(route, bytes), "an inserted row is sent whole"
        topic = self._topics.get(route)
        if topic is None:
            if len(self._topics) >= TOPICS_MAX:
                self._topics.clear()
            topic = self._topics[route] = self._topic_of(route.decode())
        if topic in self._table_topics:
            raise ValueError(f"the message would go to {topic}, the topic of a table")
        own = [header for name, index, is_json in self._headers for header in _headers(name, values[index], is_json)]
        return (
            topic,
            self._content(values, self._payload),
            self._content(values, self._key),
            [
                *headers,
                *context.rule_headers,
                *own,
            ],
        )

    def _content(self, values: Sequence[Value], index: int) -> bytes | None:
        value = values[index]
        assert value is None or isinstance(value, bytes), "an inserted row is sent whole"
        return unhex(value) if value is not None and index in self._binary else value


def _headers(name: str, value: Value, is_json: bool) -> list[Header]:
    if not isinstance(value, bytes):
        return []
    members = json.loads(value) if is_json else None
    if not isinstance(members, dict):
        return [(name, value)]
    if reserved := [member for member in members if is_reserved_header(member)]:
        raise ValueError(f"{name} has a member {reserved[0]!r}, the name of a header that capture writes")
    return [
        (member, content.encode() if isinstance(content, str) else json.dumps(content, ensure_ascii=False).encode())
        for member, content in members.items()
    ]
