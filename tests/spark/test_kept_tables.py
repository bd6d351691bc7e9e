"""Tables that `[[streams]]` would make look current without being it are refused."""

from __future__ import annotations

import pytest

from spark.envelopes import column, version
from walstream.config import PipelineConfig, StreamRule, TableMode
from walstream.errors import TableUnfit
from walstream.spark.fetching import Address
from walstream.spark.kept_tables import KeptTables
from walstream.spark.versions import Versions

INSERTS = StreamRule(table="public.orders", operations=("insert", "snapshot"))
UPDATES = StreamRule(table="*", operations=("update", "delete", "truncate"))


def kept(mode: TableMode, *rules: StreamRule) -> KeptTables:
    tables = KeptTables(Address("127.0.0.1:1", {}), "ws", PipelineConfig(mode=mode), rules)
    tables._versions = Versions("ws", [version(column("id", "int4"))])  # What a log would have said.
    return tables


@pytest.mark.parametrize(
    "rules",
    [
        (),
        (StreamRule(),),
        (StreamRule(topic="elsewhere"), StreamRule()),
        (INSERTS, UPDATES),
        (StreamRule(topic="{prefix}.{schema}.{table}"),),
    ],
)
def test_every_change_in_its_own_topic(rules: tuple[StreamRule, ...]) -> None:
    assert kept("mirror", *rules).table("public.orders").name == "public.orders"


@pytest.mark.parametrize("rule", [StreamRule(topic="elsewhere"), StreamRule(table="public.other")])
def test_no_change_in_its_own_topic(rule: StreamRule) -> None:
    with pytest.raises(TableUnfit, match=r"sends the rows of public\.orders to its own topic"):
        kept("append", rule).table("public.orders")


def test_some_operations_only() -> None:
    assert kept("append", INSERTS).table("public.orders").mode == "append"
    for mode in ("mirror", "history"):
        with pytest.raises(TableUnfit, match=f"keeps update, delete, truncate of .* a {mode} would be wrong"):
            kept(mode, INSERTS).table("public.orders")
