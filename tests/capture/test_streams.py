"""Which rows go where, under which key."""

from __future__ import annotations

import json

import pytest

from capture import wal
from capture.wal import Col, Table, delete, insert, update
from walstream.capture.streams import Streams, topic_part
from walstream.config import StreamRule
from walstream.errors import ConfigError
from walstream.postgres.messages import UNCHANGED

ID = Col("id", wal.INT8, is_key=True)
NAME = Col("name")


def table(*rules: StreamRule, identity: str = "d", columns: tuple[Col, ...] = (ID, NAME)) -> Table:
    primary_key = ("id",) if identity == "f" else ()
    return Table(*columns, identity=identity, streams=Streams("ws", rules), primary_key=primary_key)


def test_every_table_has_a_topic_without_any_rule() -> None:
    streams = Streams("ws")
    assert streams.topic("public", "orders") == "ws.public.orders"
    assert streams.topics_of(Table(ID).info) == ["ws.public.t"]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("*", True),
        ("public.t", True),
        ("public.*", True),
        ("*.t", True),
        ("p*.t", True),
        ("t", False),
        ("public.t?", False),
    ],
)
def test_patterns_of_tables(pattern: str, matches: bool) -> None:
    records = table(StreamRule(table=pattern, topic="x")).render(insert(b"1", None))
    assert [record[0] for record in records] == (["x"] if matches else [])


def test_a_row_goes_to_every_stream_that_matches_under_its_own_key() -> None:
    both = table(
        StreamRule(),
        StreamRule(table="public.t", topic="{prefix}.by-name.{table}", key=("name", "id")),
        identity="f",
    )
    records = both.render(insert(b"1", b"a"), update([b"1", b"b"], [b"1", b"b"], b"O"))
    assert [(record[0], record[2]) for record in records] == [
        ("ws.public.t", b'{"id":1}'),
        ("ws.by-name.t", b'{"name":"a","id":1}'),
        ("ws.public.t", b'{"id":1}'),
        ("ws.by-name.t", b'{"name":"b","id":1}'),
    ]
    assert records[0][1] == records[1][1]
    assert both.streams.topics_of(both.info) == ["ws.public.t", "ws.by-name.t"]


def test_a_key_that_moves_in_one_stream_moves_in_all() -> None:
    both = table(StreamRule(), StreamRule(topic="by-name", key=("name",)), identity="f")
    records = both.render(update([b"1", b"b"], [b"1", b"a"], b"O"), insert(b"2", b"c"))
    assert [
        (record[0], record[2], json.loads(record[1] or b"")["op"], dict(record[3])["seq"]) for record in records
    ] == [
        ("ws.public.t", b'{"id":1}', "d", b"1"),
        ("by-name", b'{"name":"a"}', "d", b"1"),
        ("ws.public.t", b'{"id":1}', "c", b"2"),
        ("by-name", b'{"name":"b"}', "c", b"2"),
        ("ws.public.t", b'{"id":2}', "c", b"3"),
        ("by-name", b'{"name":"c"}', "c", b"3"),
    ]


def test_operations_are_those_of_the_table() -> None:
    rows = (insert(b"1", None), update([b"2", None], [b"1", None]), delete(b"2", None), wal.truncate(wal.RELATION_ID))

    def seen(*operations: str) -> list[str]:
        records = table(StreamRule(operations=operations)).render(*rows)  # type: ignore[arg-type]
        return [json.loads(record[1] or b"")["op"] for record in records]

    assert seen("insert") == ["c"]
    assert seen("update") == ["d", "c"]
    assert seen("delete") == ["d"]
    assert seen("truncate") == ["t"]
    assert seen("snapshot") == []
    assert len(table(StreamRule(operations=("snapshot",))).snapshot(b"1\ta\n")) == 1
    assert table(StreamRule(operations=("insert",))).snapshot(b"1\ta\n") == []


def test_a_change_that_no_stream_takes_is_counted() -> None:
    records = table(StreamRule(operations=("delete",))).render(insert(b"1", None), delete(b"1", None))
    assert [dict(record[3])["seq"] for record in records] == [b"2"]


def test_tombstones_follow_deletes_and_tell_their_generation() -> None:
    records = table(StreamRule(tombstones=True)).render(delete(b"1", None), update([b"2", None], [b"1", None]))
    assert [
        (record[2], record[1] is None, dict(record[3])["seq"], dict(record[3]).get("gen")) for record in records
    ] == [
        (b'{"id":1}', False, b"1", None),
        (b'{"id":1}', True, b"1", b"41"),
        (b'{"id":1}', False, b"2", None),
        (b'{"id":1}', True, b"2", b"41"),
        (b'{"id":2}', False, b"3", None),
    ]


def test_a_key_that_deletes_would_not_tell_is_refused() -> None:
    with pytest.raises(ConfigError, match="replica identity"):
        table(StreamRule(key=("name",))).render()
    with pytest.raises(ConfigError, match="does not send"):
        table(StreamRule(key=("nobody",))).render()
    only_new = table(StreamRule(key=("name",), operations=("insert", "snapshot")))
    assert only_new.render(insert(b"1", None))[0][2] == b'{"name":null}'


def test_a_key_that_was_not_sent_is_found_in_the_old_row() -> None:
    (record,) = table(StreamRule(key=("name",)), identity="f").render(update([b"1", UNCHANGED], [b"1", b"a"], b"O"))
    assert record[2] == b'{"name":"a"}'


def test_capture_keeps_its_own_topics() -> None:
    for topic in ("{prefix}.commits", "ws.schema"):
        with pytest.raises(ConfigError, match="keeps for itself"):
            table(StreamRule(topic=topic)).render()


def test_a_rule_does_not_lead_into_the_topic_of_another_table() -> None:
    rule = StreamRule(table="public.other", topic="{prefix}.public.t")
    mixed = "public.other would go to ws.public.t, the topic of the table public.t"
    streams = Streams("ws", (StreamRule(), rule))
    streams.meet([("public", "t")])
    with pytest.raises(ConfigError, match=mixed):
        Table(ID, name="other", streams=streams).render()

    streams = Streams("ws", (StreamRule(), rule))
    Table(ID, name="other", streams=streams).render()
    with pytest.raises(ConfigError, match=mixed):
        Table(ID, streams=streams).render()


def test_tables_may_share_a_topic_that_is_no_tables_own() -> None:
    streams = Streams("ws", (StreamRule(topic="{prefix}.everything"), StreamRule(table="*.leaf*", topic="ws.public.t")))
    streams.meet([("public", "t"), ("public", "leaf1"), ("public", "leaf2")])
    for name in ("leaf1", "leaf2", "t"):
        Table(ID, name=name, streams=streams).render()


def test_names_that_kafka_does_not_allow_stay_apart() -> None:
    names = [
        "a b",
        "a_b",
        "a.b",
        "a-b",
        "ä",
        "ö",
        "",
        "x" * 63,
        "名" * 21,
        topic_part("a b"),
        topic_part(topic_part("a b")),
    ]
    parts = [topic_part(name) for name in names]
    assert len(set(parts)) == len(names)
    assert topic_part("order_items-2") == "order_items-2"
    for part in parts:
        assert part.replace("-", "").replace("_", "").isalnum()
        assert part.isascii()
    streams = Streams("p" * 100)
    assert streams.topic("a.b", "c") != streams.topic("a", "b.c")
    assert len(streams.topic("名" * 21, "s" * 62 + ".")) <= 249
