"""What becomes of each kind of change: the envelope, the key, the headers, the order."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from capture import wal
from capture.wal import Col, Table, delete, insert, update
from walstream.capture.envelope import HEARTBEAT_PREFIX, Output
from walstream.capture.streams import Streams
from walstream.config import StreamRule
from walstream.errors import DecodeError
from walstream.postgres.messages import UNCHANGED, Relation
from walstream.postgres.relations import RelationInfo

ID = Col("id", wal.INT8, is_key=True)
NAME = Col("name")


def value(record: Output) -> Any:
    return json.loads(record[1] or b"null")


def shown(records: list[Output]) -> list[tuple[str, Any, Any, Any, int]]:
    """(op, key, before, after, seq) of each record."""
    return [
        (
            value(record)["op"],
            json.loads(record[2]) if record[2] else None,
            value(record)["before"],
            value(record)["after"],
            value(record)["source"]["seq"],
        )
        for record in records
    ]


def test_an_insert_says_everything() -> None:
    (record,) = Table(ID, NAME).render(insert(b"7", b"Ada"))
    topic, content, key, headers = record
    assert topic == "ws.public.t"
    assert key == b'{"id":7}'
    assert json.loads(content or b"") == {
        "before": None,
        "after": {"id": 7, "name": "Ada"},
        "source": {
            "db": "db",
            "schema": "public",
            "table": "t",
            "txId": 777,
            "lsn": 0x16_B374D848,
            "source_epoch": 3,
            "commit_lsn": 0x16_B374D848,
            "seq": 1,
            "gen": 41,
            "ts_ms": 1_700_000_000_123,
            "snapshot": False,
            "schema_version": 1,
            "unchanged": [],
        },
        "op": "c",
        "ts_ms": 1_700_000_000_999,
    }
    assert dict(headers) == {
        "tenant": b"default",
        "op": b"c",
        "commit_lsn": b"97500059720",
        "txid": b"777",
        "commit_time_ms": b"1700000000123",
        "seq": b"1",
    }


def test_updates_and_deletes_of_a_table_with_a_primary_key() -> None:
    records = Table(ID, NAME).render(update([b"7", b"Eve"]), delete(b"7", None))
    assert shown(records) == [
        ("u", {"id": 7}, None, {"id": 7, "name": "Eve"}, 1),
        ("d", {"id": 7}, {"id": 7}, None, 2),
    ]


def test_a_key_change_is_a_delete_and_an_insert() -> None:
    table = Table(ID, NAME)
    records = table.render(insert(b"1", b"a"), update([b"8", b"Eve"], [b"7", None]), insert(b"2", b"b"))
    assert shown(records) == [
        ("c", {"id": 1}, None, {"id": 1, "name": "a"}, 1),
        ("d", {"id": 7}, {"id": 7}, None, 2),
        ("c", {"id": 8}, None, {"id": 8, "name": "Eve"}, 3),
        ("c", {"id": 2}, None, {"id": 2, "name": "b"}, 4),
    ]
    _, deleted, created, _ = records
    assert ("__debezium.newkey", b'{"id":8}') in deleted[3]
    assert ("__debezium.oldkey", b'{"id":7}') in created[3]
    assert [dict(record[3])["op"] for record in records] == [b"c", b"d", b"c", b"c"]


def test_an_old_key_that_is_the_same_is_no_key_change() -> None:
    # PostgreSQL sends the old key also when the key is a value that is stored out of line.
    (record,) = Table(Col("id", is_key=True), NAME).render(update([UNCHANGED, b"Eve"], [b"k" * 3000, None]))
    assert shown([record])[0][:2] == ("u", {"id": "k" * 3000})
    assert value(record)["source"]["unchanged"] == []


def test_what_was_not_sent_is_absent_and_named() -> None:
    table = Table(ID, NAME, Col('w"ei rd'))
    records = table.render(update([b"7", UNCHANGED, UNCHANGED]), update([b"7", b"x", None]))
    assert value(records[0])["after"] == {"id": 7}
    assert value(records[0])["source"]["unchanged"] == ["name", 'w"ei rd']
    assert value(records[1])["after"] == {"id": 7, "name": "x", 'w"ei rd': None}
    assert value(records[1])["source"]["unchanged"] == []


def test_a_key_change_carries_the_columns_that_were_not_sent() -> None:
    _, created = Table(ID, NAME).render(update([b"8", UNCHANGED], [b"7", None]))
    assert value(created)["after"] == {"id": 8}
    assert value(created)["source"]["unchanged"] == ["name"]


def test_full_identity_gives_the_whole_old_row() -> None:
    table = Table(ID, NAME, identity="f", primary_key=("id",))
    records = table.render(
        update([b"7", b"Eve"], [b"7", b"Ada"], b"O"),
        update([b"8", UNCHANGED], [b"7", b"Eve"], b"O"),
        delete(b"8", b"Eve", kind=b"O"),
    )
    assert shown(records) == [
        ("u", {"id": 7}, {"id": 7, "name": "Ada"}, {"id": 7, "name": "Eve"}, 1),
        ("d", {"id": 7}, {"id": 7, "name": "Eve"}, None, 2),
        ("c", {"id": 8}, None, {"id": 8, "name": "Eve"}, 3),
        ("d", {"id": 8}, {"id": 8, "name": "Eve"}, None, 4),
    ]
    assert value(records[2])["source"]["unchanged"] == []


def test_full_identity_without_a_primary_key_has_no_key() -> None:
    table = Table(Col("a"), Col("b"), identity="f")
    records = table.render(insert(b"1", None), update([b"2", None], [b"1", None], b"O"), delete(b"2", None, kind=b"O"))
    assert shown(records) == [
        ("c", None, None, {"a": "1", "b": None}, 1),
        ("u", None, {"a": "1", "b": None}, {"a": "2", "b": None}, 2),
        ("d", None, {"a": "2", "b": None}, None, 3),
    ]


def test_identity_by_an_index_and_none_at_all() -> None:
    by_index = Table(Col("a"), Col("b", is_key=True), identity="i")
    assert shown(by_index.render(delete(None, b"x"))) == [("d", {"b": "x"}, {"b": "x"}, None, 1)]
    nothing = Table(ID, NAME, identity="n", primary_key=("id",))
    assert shown(nothing.render(insert(b"1", b"x"))) == [("c", {"id": 1}, None, {"id": 1, "name": "x"}, 1)]


def test_a_truncate_is_one_record_per_table_without_a_key() -> None:
    table = Table(ID, NAME)
    other = wal.relation(ID, relation_id=99, table="other")
    records = table.render(other, insert(b"1", None), wal.truncate(wal.RELATION_ID, 99), insert(b"2", None))
    assert [(record[0], value(record)["op"], record[2], value(record)["source"]["seq"]) for record in records] == [
        ("ws.public.t", "c", b'{"id":1}', 1),
        ("ws.public.t", "t", None, 2),
        ("ws.public.other", "t", None, 3),
        ("ws.public.t", "c", b'{"id":2}', 4),
    ]
    assert value(records[2])["source"]["table"] == "other"


def test_a_logical_message_has_a_topic_of_its_own() -> None:
    records = Table(ID).render(wal.message("app", b"\0\xffhello"), wal.message(HEARTBEAT_PREFIX, b""), insert(b"1"))
    assert [(record[0], record[2]) for record in records] == [
        ("ws.message", b'{"prefix":"app"}'),
        ("ws.public.t", b'{"id":1}'),
    ]
    said = value(records[0])
    assert said["op"] == "m"
    assert said["before"] is None
    assert said["after"] is None
    assert said["message"]["prefix"] == "app"
    assert base64.b64decode(said["message"]["content"]) == b"\0\xffhello"
    assert [value(record)["source"]["seq"] for record in records] == [1, 3]


def test_a_new_description_is_in_force_from_where_it_stands() -> None:
    table = Table(ID, NAME)
    wider = wal.relation(ID, NAME, Col("age", wal.INT8))
    records = table.render(insert(b"1", b"a"), wider, insert(b"2", b"b", b"40"), wider, insert(b"3", b"c", None))
    assert [value(record)["after"] for record in records] == [
        {"id": 1, "name": "a"},
        {"id": 2, "name": "b", "age": 40},
        {"id": 3, "name": "c", "age": None},
    ]
    assert [value(record)["source"]["schema_version"] for record in records] == [1, 2, 2]


def test_a_description_is_remembered_and_asked_for_before_its_rows() -> None:
    table = Table(ID)
    asked: list[str] = []

    def describe(message: Relation) -> RelationInfo:
        asked.append(message.table)
        return table.relations.update(message)

    table.renderer._describe = describe
    records = table.renderer.render([table.description, insert(b"1")], wal.STAMP)
    assert asked == []
    next(records)
    assert asked == ["t"]
    assert len(list(table.renderer.render([insert(b"2")], wal.STAMP))) == 1
    assert asked == ["t"]


def test_records_of_a_long_transaction_come_before_its_end() -> None:
    table = Table(ID)
    read = 0

    def rows() -> Any:
        nonlocal read
        yield table.description
        for number in range(20_000):
            read += 1
            yield insert(b"%d" % number)

    records = table.renderer.render(rows(), wal.STAMP)
    first = next(records)
    assert read < 1_000
    last = [first, *records][-1]
    assert value(last)["source"]["seq"] == 20_000
    assert dict(last[3])["seq"] == b"20000"


def test_headers_are_nobody_elses() -> None:
    first, second = Table(ID).render(insert(b"1"), insert(b"2"))
    first[3].clear()
    assert len(second[3]) == 6


def test_a_row_that_cannot_be_understood_stops_or_is_told() -> None:
    table = Table(ID, NAME)
    broken = insert(b"1") + b"?"
    with pytest.raises(DecodeError, match="1 columns, its relation 2") as caught:
        table.render(broken)
    assert caught.value.data == broken
    told: list[tuple[bytes, int]] = []
    rows = [table.description, insert(b"1", None), broken, insert(b"2", None)]
    records = list(table.renderer.render(rows, wal.STAMP, lambda error, seq: told.append((error.data, seq))))
    assert told == [(broken, 2)]
    assert [value(record)["source"]["seq"] for record in records] == [1, 3]


def test_a_row_of_nobody_stops() -> None:
    with pytest.raises(DecodeError, match="not described"):
        list(Table(ID).renderer.render([insert(b"1")], wal.STAMP, lambda _error, _seq: None))


def test_an_update_whose_key_was_not_sent_is_refused() -> None:
    with pytest.raises(DecodeError, match="key was not sent"):
        Table(Col("id", is_key=True), NAME).render(update([UNCHANGED, b"x"]))


def test_a_snapshot_row() -> None:
    topic, content, key, headers = Table(ID, NAME).snapshot(b"7\tA\\tda\n")[0]
    said = json.loads(content or b"")
    assert (topic, key, said["op"], said["before"]) == ("ws.public.t", b'{"id":7}', "r", None)
    assert said["after"] == {"id": 7, "name": "A\tda"}
    assert (said["source"]["snapshot"], said["source"]["seq"], said["source"]["txId"]) == ("snap-1", 0, None)
    assert dict(headers)["op"] == b"r"
    with pytest.raises(DecodeError) as caught:
        Table(ID, NAME).snapshot(b"7\n")
    assert caught.value.data == b"7\n"


def test_tenants() -> None:
    def tenants(tenant: str, *rows: bytes) -> list[bytes | None]:
        table = Table(ID, Col("org", wal.TIMESTAMP), streams=Streams("ws", tenant=tenant))
        return [dict(record[3]).get("tenant") for record in table.render(*rows)]

    row = insert(b"1", b"2024-01-01 00:00:00")
    assert tenants("acme", row) == [b"acme"]
    assert tenants("schema", row, wal.message("m", b"")) == [b"public", None]
    assert tenants("column:id", row, update([b"2", None], [b"1", None]), delete(b"9", None)) == [
        b"1",
        b"1",
        b"2",
        b"9",
    ]
    assert tenants("column:none", row) == [None]


ORG_STREAMS = Streams("ws", tenant="column:org")


def test_a_row_that_gets_another_tenant_is_deleted_for_the_one_that_had_it() -> None:
    """Whichever function renders the row: the first one, a learned one, or column by column."""
    table = Table(ID, Col("org"), NAME, identity="f", primary_key=("id",), streams=ORG_STREAMS)
    for name in (b"n", None, UNCHANGED):
        old_name = b"n" if name is UNCHANGED else name
        rows = [update([b"1", b"b", name], [b"1", b"a", old_name], b"O") for _ in range(200)]
        records = table.render(*rows, update([b"1", b"b", name], [b"1", b"b", old_name], b"O"))
        told = [(value(record)["op"], dict(record[3]).get("tenant")) for record in records]
        assert told == [("d", b"a"), ("c", b"b")] * 200 + [("u", b"b")]
        assert [dict(record[3])["seq"] for record in records] == [b"%d" % seq for seq in range(1, 402)]
        assert value(records[0])["before"] == {"id": 1, "org": "a", "name": None if old_name is None else "n"}
        assert records[0][2] == records[1][2] == b'{"id":1}'
    rows = [update([b"1", None, b"n"], [b"1", b"a", b"n"], b"O"), update([b"1", b"a", b"n"], [b"1", None, b"n"], b"O")]
    told = [(value(record)["op"], dict(record[3]).get("tenant")) for record in table.render(*rows)]
    assert told == [("d", b"a"), ("c", None), ("d", None), ("c", b"a")]
    assert dict(table.render(delete(b"1", b"a", b"n", kind=b"O"))[0][3])["tenant"] == b"a"


def test_no_row_has_a_tenant_where_a_delete_would_have_none() -> None:
    rows = [insert(b"1", b"a"), update([b"1", b"b"]), delete(b"1", None)]
    table = Table(ID, Col("org"), streams=ORG_STREAMS)
    assert ORG_STREAMS.untold_tenant(table.info) == "org"
    assert [dict(record[3]).get("tenant") for record in [*table.render(*rows), *table.snapshot(b"1\ta\n")]] == [
        None
    ] * 4
    assert ORG_STREAMS.untold_tenant(Table(ID, NAME).info) is None, "it has no such column"
    for given in ({"identity": "f"}, {"identity": "n"}):
        assert ORG_STREAMS.untold_tenant(Table(ID, Col("org"), **given).info) is None
    assert ORG_STREAMS.untold_tenant(Table(ID, Col("org", is_key=True)).info) is None
    appended = Streams("ws", [StreamRule(operations=["insert", "snapshot"])], tenant="column:org")
    table = Table(ID, Col("org"), streams=appended)
    assert appended.untold_tenant(table.info) is None
    assert [dict(record[3]).get("tenant") for record in table.render(*rows)] == [b"a"]


def test_names_and_values_in_any_script() -> None:
    table = Table(Col('naïve "ключ"\\', is_key=True), Col("名"), name="Ünï")
    (record,) = table.render(insert("ключ\n".encode(), "名😀".encode()))
    assert value(record)["after"] == {'naïve "ключ"\\': "ключ\n", "名": "名😀"}
    assert value(record)["source"]["table"] == "Ünï"
    assert json.loads(record[2] or b"") == {'naïve "ключ"\\': "ключ\n"}
