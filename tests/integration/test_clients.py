"""Every stock client writes what every other one reads: values, keys, nulls, headers, compressions, timestamps."""

from __future__ import annotations

import time

import pytest

from walstream.node.process import NodeProcess

from .clients import COMPRESSIONS, EACH_CLIENT, Client, Item, create_topic, readers


def without_time(items: list[Item]) -> list[Item]:
    return [Item(item.value, item.key, item.headers) for item in items]


@pytest.mark.parametrize("client", EACH_CLIENT)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_reader_gets_what_a_client_wrote(node: NodeProcess, topic: str, client: Client, compression: str) -> None:
    if not client.writes(compression):
        pytest.skip(f"{client.name} has no {compression} library here")
    create_topic(node.address, topic)
    items = [Item(f"value {number} ".encode() * 20, f"key {number}".encode()) for number in range(3)]
    client.write(node.address, topic, items, compression)
    for reader in readers():
        if reader.writes(compression):
            assert without_time(reader.read(node.address, topic)) == items, reader.name


@pytest.mark.parametrize("client", EACH_CLIENT)
def test_keys_and_headers_arrive_as_sent(node: NodeProcess, topic: str, client: Client) -> None:
    create_topic(node.address, topic)
    items = [
        Item(b"without key"),
        Item(b"with headers", b"k", (("trace", b"abc"), ("trace", b"twice"), ("empty", b""))),
        Item("čeština ✓".encode(), "klíč".encode(), (("název", "hodnota ✓".encode()),)),
    ]
    client.write(node.address, topic, items)
    for reader in readers():
        assert without_time(reader.read(node.address, topic)) == items, reader.name


@pytest.mark.parametrize("client", [each for each in EACH_CLIENT if each.id != "kcat"])
def test_a_null_value_is_not_an_empty_one(node: NodeProcess, topic: str, client: Client) -> None:
    create_topic(node.address, topic)
    items = [Item(None, b"k"), Item(b"", b"k"), Item(b"v", b""), Item(b"v", None)]
    client.write(node.address, topic, items)
    for reader in readers():
        assert without_time(reader.read(node.address, topic)) == items, reader.name


@pytest.mark.parametrize("client", [each for each in EACH_CLIENT if each.id != "kcat"])
def test_the_clients_timestamp_is_kept(node: NodeProcess, topic: str, client: Client) -> None:
    create_topic(node.address, topic)
    hour_ago_ms = int(time.time() * 1000) - 3_600_000
    items = [Item(b"v", timestamp_ms=hour_ago_ms + 1000 * number) for number in range(3)]
    client.write(node.address, topic, items)
    for reader in readers():
        assert reader.read(node.address, topic) == items, reader.name


@pytest.mark.parametrize("client", EACH_CLIENT)
def test_a_topic_is_made_by_the_first_write(node: NodeProcess, topic: str, client: Client) -> None:
    client.write(node.address, topic, [Item(b"first")])
    assert without_time(client.read(node.address, topic)) == [Item(b"first")]


@pytest.mark.parametrize("client", [each for each in EACH_CLIENT if each.id != "kcat"])
def test_ten_thousand_records_come_back_in_order(node: NodeProcess, topic: str, client: Client) -> None:
    create_topic(node.address, topic)
    items = [Item(str(number).encode() * 10) for number in range(10_000)]
    client.write(node.address, topic, items, "gzip")
    assert without_time(client.read(node.address, topic)) == items
