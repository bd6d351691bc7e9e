"""What a generation takes over from the schema records of earlier ones."""

from __future__ import annotations

import itertools
import json

import pytest

from walstream.capture.kafka import LogAddress
from walstream.capture.schemas import read_schemas
from walstream.capture.topics import Topics
from walstream.node.process import NodeProcess
from walstream.postgres.relations import Column, RelationInfo
from walstream.postgres.types import Types

TEXT_OID = 25
_prefixes = (f"schemas{number}" for number in itertools.count())


def table(version: int, *names: str) -> RelationInfo:
    columns = tuple(Column(name, TEXT_OID, -1, is_key=name == "id") for name in ("id", *names))
    return RelationInfo(7, "public", "orders", "d", columns, ("id",), version)


def described(*records: tuple[int, RelationInfo]) -> list[tuple[bytes, bytes]]:
    """Return records of the schema topic by their generations, as captures write them."""
    return [
        (
            json.dumps({"table": info.table, "version": info.version, "gen": gen}).encode(),
            b'{"gen":%d,' % gen + info.to_json(Types()).removeprefix(b"{"),
        )
        for gen, info in records
    ]


@pytest.mark.parametrize("is_late", [False, True])
def test_of_two_versions_with_one_number_that_of_the_later_generation_counts(node: NodeProcess, is_late: bool) -> None:
    """A zombie describes a table under a number that its successor has given to another description."""
    topics = Topics(LogAddress(node.address), next(_prefixes))
    topics.prepare()
    zombie, successor = (2, table(2, "old")), (3, table(2, "new"))
    first, second = (successor, zombie) if is_late else (zombie, successor)
    producer = LogAddress(node.address).producer({})
    for key, value in described((1, table(1)), first, second, (5, table(3, "new", "more"))):
        producer.produce(topics.names.schema, value, key, partition=0)
    assert producer.flush(30) == 0
    found = read_schemas(LogAddress(node.address), topics)
    assert sorted(found, key=lambda info: info.version) == [table(1), table(2, "new"), table(3, "new", "more")]
