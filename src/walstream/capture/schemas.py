"""The versions of tables in `<prefix>.schema`: read at the start, each new one written before its first row.

Owns the records of that topic and the questions to the catalogue; which description is a new version is decided in
postgres/relations.py. Invariant: `describe` returns a version only when its record is durable.

A record's key is the table, the version and the generation that wrote it. Of two records with the same version, which a
zombie could cause, a row means the one with the largest generation that is not larger than its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from walstream import logs
from walstream.capture.engines import Questions
from walstream.capture.generations import WriteNow
from walstream.capture.kafka import LogAddress
from walstream.capture.reading import PartitionReader
from walstream.capture.topics import Topics
from walstream.positions import TopicPartition
from walstream.postgres.catalogue import relation_facts, type_facts
from walstream.postgres.messages import Relation
from walstream.postgres.relations import RelationInfo, Relations, unsent_key
from walstream.postgres.types import Types

KEY_HINT: Final = (
    "Publish these columns (PostgreSQL 18: ALTER PUBLICATION … SET (publish_generated_columns = stored)), or choose a "
    "unique index over columns that are sent: ALTER TABLE … REPLICA IDENTITY USING INDEX …;"
)

log = logs.get(__name__)


class Schemas:
    """The registry of one generation."""

    def __init__(self, topic: str, gen: int, known: list[RelationInfo], questions: Questions, write: WriteNow) -> None:
        """Take what earlier generations wrote, and whom to ask."""
        self.types = Types()
        self._topic = topic
        self._gen = gen
        self._questions = questions
        self._write = write
        self._relations = Relations(known)
        self._written = {_name(info) for info in known}

    def describe(self, message: Relation) -> RelationInfo:
        """Return the version that a Relation message describes, written to the log if it is new."""
        unknown = self.types.unknown(column.type_oid for column in message.columns)
        if unknown:
            self.types.learn(self._questions.ask(lambda session: type_facts(session, unknown)))
        facts = self._questions.ask(lambda session: relation_facts(session, [message.id])).get(message.id)
        info = self._relations.update(message, facts)
        if _name(info) not in self._written:
            self._write(self._topic, self._key(info), self._value(info))
            self._written.add(_name(info))
            log.info("table described", table=f"{info.schema}.{info.table}", version=info.version)
            if unsent := unsent_key(message, facts):
                log.error(
                    "key not sent whole: the rows have no key",
                    table=f"{info.schema}.{info.table}",
                    not_sent=", ".join(unsent),
                    hint=KEY_HINT,
                )
        return info

    def _key(self, info: RelationInfo) -> bytes:
        name = {"schema": info.schema, "table": info.table, "version": info.version, "gen": self._gen}
        return json.dumps(name, ensure_ascii=False).encode()

    def _value(self, info: RelationInfo) -> bytes:
        return b'{"gen":%d,' % self._gen + info.to_json(self.types).removeprefix(b"{")


def read_schemas(address: LogAddress, topics: Topics) -> list[RelationInfo]:
    """Return every version that the log knows; of several with one number, that of the largest generation."""
    found: dict[tuple[str, str, int], tuple[int, RelationInfo]] = {}
    for gen, info in _records(address, topics):
        if gen >= found.get(_name(info), (-1, info))[0]:
            found[_name(info)] = (gen, info)
    return [info for _, info in found.values()]


def _records(address: LogAddress, topics: Topics) -> Iterator[tuple[int, RelationInfo]]:
    partition = TopicPartition(topics.names.schema, 0)
    start, end = topics.starts([partition])[partition], topics.ends([partition])[partition]
    reader = PartitionReader(address)
    try:
        for message in reader.read(partition, start, end):
            value = message.value()
            if value is not None:
                yield int(json.loads(value).get("gen", 0)), RelationInfo.from_json(value)
    finally:
        reader.close()


def _name(info: RelationInfo) -> tuple[str, str, int]:
    return info.schema, info.table, info.version
