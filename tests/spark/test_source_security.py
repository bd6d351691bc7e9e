"""A log that asks who is there: TLS and a password for the executors, and clear words for who may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from integration.capturing import InThread, configured
from node.certificates import Authority
from postgres.servers import Database
from waiting import wait_until
from walstream.capture.kafka import LogAddress
from walstream.capture.reading import LogReader
from walstream.errors import WalstreamError
from walstream.node.credentials import make_credential
from walstream.spark import read_at
from walstream.spark.runner import run

PASSWORD = "open,=sesame"
READS = {"principal": "reader", "kind": "topic", "name": "*", "operations": ["read"]}
WRITES = {"principal": "writer", "kind": "topic", "name": "*", "operations": ["read", "write", "admin"]}


def test_security(
    spark: SparkSession, make_node: Any, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    server = authority.server()
    users = {name: make_credential(PASSWORD, "SCRAM-SHA-256", 4096) for name in ("reader", "writer", "nobody")}
    node = make_node(
        security__acls=json.dumps([READS, WRITES]),
        security__users=json.dumps(users),
        security__tls_certificate=server.certificate,
        security__tls_key=server.key,
    )
    monkeypatch.setenv("LOG_PASSWORD", PASSWORD)
    database.execute("create table t (id int primary key); create publication walstream for all tables")
    config = configured(
        database,
        node,
        capture__security__user="writer",
        capture__security__password_env="LOG_PASSWORD",
        capture__security__tls_ca=str(authority.certificate),
        pipeline__warehouse=str(tmp_path / "warehouse"),
    )

    def rows() -> int:
        try:
            with LogReader(LogAddress.of(config.capture), database.name) as log:
                point = log.last_point()
        except WalstreamError:
            return -1
        return -1 if point is None else point.rows_total

    with InThread(config):
        wait_until(lambda: rows() == 0, "a generation")
        database.execute("insert into t select generate_series(1, 50)")
        wait_until(lambda: rows() == 50, "the rows")
    # Again, with what it has written to be read first: nobody here has a right to any consumer group.
    with InThread(config):
        database.execute("insert into t select generate_series(51, 100)")
        wait_until(lambda: rows() == 100, "more rows")
        # The pipeline needs no settings of its own for it: who may write the log may read it.
        run(config, spark, lambda: False, once=True)
    # Whoever names no warehouse means the configured one.
    monkeypatch.setenv("WALSTREAM_PIPELINE__WAREHOUSE", config.pipeline.warehouse)
    assert read_at(spark).tables["public.t"].count() == 100

    def load(user: str, password: str = PASSWORD) -> list[int]:
        options = {
            "bootstrap": node.address,
            "prefix": database.name,
            "table": "public.t",
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-256",
            "kafka.sasl.username": user,
            "kafka.sasl.password": password,
            "kafka.ssl.ca.location": str(authority.certificate),
        }
        frame = spark.read.format("walstream").options(**options).load()
        plan = frame._jdf.queryExecution().toString()  # type: ignore[operator]
        assert PASSWORD not in plan
        return sorted(row.id for row in frame.collect())

    assert load("reader") == list(range(1, 101))
    with pytest.raises(AnalysisException, match=r"walstream\.errors\.(AuthenticationFailed|UnreachableError)"):
        load("reader", "wrong")
    with pytest.raises(AnalysisException, match=r"walstream\.errors\.(NotAuthorized|UsageError)"):
        load("nobody")
