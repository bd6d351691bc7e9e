"""Rows of an outbox table are messages."""

from __future__ import annotations

import pytest

from capture import wal
from capture.wal import Col, Table, delete, insert, update
from walstream.capture.streams import Streams
from walstream.config import RESERVED_HEADERS, StreamRule
from walstream.errors import ConfigError, DecodeError

COLUMNS = (
    Col("id", wal.UUID, is_key=True),
    Col("aggregatetype"),
    Col("aggregateid"),
    Col("payload", wal.JSONB),
    Col("meta", wal.JSONB),
)
OUTBOX = StreamRule(table="public.t", format="outbox", outbox_header_columns=("id", "meta"))


def outbox(*rules: StreamRule, columns: tuple[Col, ...] = COLUMNS) -> Table:
    return Table(*columns, streams=Streams("ws", rules or (OUTBOX,)))


def test_a_row_is_sent_as_it_is_to_the_topic_that_it_names() -> None:
    row = insert(b"u-1", b"orders.created", b"42", b'{"total": 1.50}', b'{"trace": "x", "n": [1]}')
    (record,) = outbox().render(row)
    topic, payload, key, headers = record
    assert (topic, payload, key) == ("orders.created", b'{"total": 1.50}', b"42")
    assert headers == [
        ("tenant", b"default"),
        ("op", b"c"),
        ("commit_lsn", b"97500059720"),
        ("commit_time_ms", b"1700000000123"),
        ("txid", b"777"),
        ("seq", b"1"),
        ("gen", b"41"),
        ("id", b"u-1"),
        ("trace", b"x"),
        ("n", b"[1]"),
    ]


def test_nulls_make_a_record_without_key_value_and_header() -> None:
    (record,) = outbox().render(insert(b"u", b"orders", None, None, None))
    assert record[1:3] == (None, None)
    assert "meta" not in dict(record[3])


def test_bytes_are_passed_through_as_bytes() -> None:
    columns = (Col("aggregatetype"), Col("aggregateid", wal.BYTEA), Col("payload", wal.BYTEA))
    (record,) = outbox(StreamRule(format="outbox"), columns=columns).render(insert(b"x", rb"\x00ff", rb"\x0102"))
    assert record[1:3] == (b"\1\2", b"\0\xff")


def test_what_happens_to_a_message_later_is_nobodys_business() -> None:
    row = (b"u", b"orders", b"1", b"{}", None)
    records = outbox().render(
        insert(*row), update(row), delete(b"u", *[None] * 4), wal.truncate(wal.RELATION_ID), insert(*row)
    )
    assert [dict(record[3])["seq"] for record in records] == [b"1", b"5"]


def test_messages_that_were_there_before_are_sent() -> None:
    (record,) = outbox().snapshot(wal.copy_line(b"u", b"orders", b"1", b'{"a": "\\n"}', None))
    assert record[:3] == ("orders", b'{"a": "\\n"}', b"1")
    assert dict(record[3])["snapshot"] == b"snap-1"


def test_topics_by_template_and_by_any_route() -> None:
    rule = OUTBOX.model_copy(update={"topic": "{prefix}.events.{route}"})
    routes = [b"orders", b"orders", "Bücher".encode()]
    records = outbox(rule).render(*(insert(b"u", route, b"1", b"{}", None) for route in routes))
    topics = [record[0] for record in records]
    assert topics[0] == "ws.events.orders"
    assert topics[0] is topics[1]
    assert topics[2].startswith("ws.events.B_cher-")


@pytest.mark.parametrize("route", [None, b"", b".", b"..", b"ws.commits", b"ws.schema", b"ws.public.users", b"x" * 250])
def test_a_row_may_not_choose_these_topics(route: bytes | None) -> None:
    with pytest.raises(DecodeError):
        outbox().render(insert(b"u", route, b"1", b"{}", None))


def test_a_template_does_not_lead_into_captures_own_topics_either() -> None:
    with pytest.raises(DecodeError):
        outbox(OUTBOX.model_copy(update={"topic": "{prefix}.{route}"})).render(
            insert(b"u", b"commits", b"1", b"{}", None)
        )


@pytest.mark.parametrize("name", [*sorted(RESERVED_HEADERS), "__debezium.oldkey"])
def test_a_message_brings_no_header_of_captures_own(name: str) -> None:
    row = insert(b"u", b"orders", b"1", b"{}", b'{"trace": "x", "%b": "7"}' % name.encode())
    with pytest.raises(DecodeError, match=f"meta has a member '{name}'"):
        outbox().render(row)
    with pytest.raises(DecodeError, match=f"meta has a member '{name}'"):
        outbox().snapshot(wal.copy_line(b"u", b"orders", b"1", b"{}", b'{"%b": "7"}' % name.encode()))


@pytest.mark.parametrize(
    ("template", "route", "is_refused"),
    [
        ("{prefix}.{route}", b"public.users", True),
        ("{prefix}.{route}", b"published.later", True),
        ("{prefix}.{route}", b"orders", False),
        ("{prefix}.{schema}.{route}", b"users", True),
        ("{prefix}.{schema}.{route}", b"t", True),
        ("{prefix}.{schema}.{route}", b"created", False),
        ("{prefix}.{route}", b"commits", True),
        ("", b"__consumer_offsets", True),
    ],
)
def test_a_message_does_not_go_into_the_topic_of_a_table(template: str, route: bytes, is_refused: bool) -> None:
    table = outbox(OUTBOX.model_copy(update={"topic": template}), StreamRule())
    table.streams.meet([("public", "users")])
    row = insert(b"u", route, b"1", b"{}", None)
    if is_refused:
        with pytest.raises(DecodeError, match="topic"):
            table.render(row)
    else:
        assert len(table.render(row)) == 2


def test_a_topic_that_a_new_table_has_takes_no_more_messages() -> None:
    table = outbox(OUTBOX.model_copy(update={"topic": "{prefix}.{schema}.{route}"}), StreamRule())
    row = insert(b"u", b"users", b"1", b"{}", None)
    assert len(table.render(row)) == 2
    table.streams.meet([("public", "users")])
    with pytest.raises(DecodeError, match="the topic of a table"):
        table.render(row)


def test_a_missing_column_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match="no column meta"):
        outbox(columns=COLUMNS[:4]).render()


def test_an_outbox_may_have_envelopes_too() -> None:
    records = outbox(OUTBOX, StreamRule()).render(insert(b"u", b"orders", b"1", b"{}", None), delete(b"u", *[None] * 4))
    assert [record[0] for record in records] == ["ws.public.t", "orders", "ws.public.t"]
