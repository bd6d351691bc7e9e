"""Spark for tests: one session for the whole tree, and databases whose changes are captured into a real node.

`spark` is a local session with two cores and little memory. `captured` is a fresh database with a node's log and a
capture that runs in a thread: `captured.execute(sql)`, `captured.wait()`, then `captured.read(table="public.t")`. The
node is one for the session, every test has its own prefix. Tests that break a node or kill a capture bring their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamReader

import walstream
from conftest import MakeNode, Nodes
from integration.capturing import InThread, Log, configured
from postgres.servers import Database, fresh
from spark import jars
from waiting import wait_until
from walstream.node.process import NodeProcess
from walstream.postgres.embedded import EmbeddedPostgres

PUBLICATION = "create publication walstream for all tables"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session that all tests share."""
    # Delta's jars are for the writer delta-spark alone; where they cannot be had, its tests are skipped.
    with started(tmp_path_factory.mktemp("spark"), **jars.settings()) as session:
        yield session


@contextmanager
def started(folder: Path, cores: int = 2, **settings: str) -> Iterator[SparkSession]:
    """A session of one's own; more settings as `spark__sql__x=value`."""
    # Workers import walstream and pyspark_walstream from where the tests do.
    root = str(Path(walstream.__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    )
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master(f"local[{cores}]")
        .appName("walstream-tests")
        .config("spark.driver.memory", "1g")
        .config("spark.serializer", "org.apache.spark.serializer.KryoSerializer")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.log.level", "ERROR")
    )
    for name, value in settings.items():
        builder = builder.config(name.replace("__", "."), value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()


@pytest.fixture(scope="session")
def spark_node() -> Iterator[NodeProcess]:
    """The node that all captured databases of the session are written to."""
    nodes = Nodes()
    try:
        yield nodes.make()
    finally:
        nodes.end()


class Captured:
    """A database, the log that its changes go to, and how Spark reads that."""

    def __init__(self, spark: SparkSession, node: NodeProcess, database: Database, **settings: object) -> None:
        self.spark = spark
        self.node = node
        self.database = database
        self.prefix = database.name
        self.config = configured(database, node, **settings)
        self.log = Log(node, database)
        self._stack = ExitStack()
        self.capture: InThread | None = None

    def start(self) -> InThread:
        """Begin a generation in a thread, and wait until what commits from now on is in its stream."""
        before = self.log.last()
        self.capture = self.log.capture = self._stack.enter_context(InThread(self.config))
        wait_until(lambda: (last := self.log.last()) and (before is None or last.gen > before.gen), "a generation")
        return self.capture

    def stop(self) -> None:
        """End it; what was received is durable."""
        self.capture = self.log.capture = None
        self._stack.close()

    def execute(self, statements: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
        """Run statements in the source."""
        return self.database.execute(statements, parameters)

    def wait(self) -> None:
        """Wait until everything that has committed is in the log."""
        self.log.wait()

    def wait_for_snapshots(self, *tables: str) -> None:
        """Wait until the snapshots of these tables are finished."""
        self.log.wait_for_snapshots(*tables)

    @property
    def options(self) -> dict[str, str]:
        """What finds the log."""
        return {"bootstrap": self.node.address, "prefix": self.prefix}

    def read(self, **options: object) -> DataFrame:
        """Read by batch; options as the source has them."""
        return self.spark.read.format("walstream").options(**self.options, **_texts(options)).load()

    def read_stream(self, **options: object) -> DataFrame:
        """Read by stream."""
        reader: DataStreamReader = self.spark.readStream.format("walstream")
        return reader.options(**self.options, **_texts(options)).load()


def _texts(options: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items()}


MakeCaptured = Callable[..., Captured]


@pytest.fixture
def make_captured(
    spark: SparkSession, spark_node: NodeProcess, postgres18: EmbeddedPostgres, make_node: MakeNode
) -> Iterator[MakeCaptured]:
    """A function that gives a captured database: `make_captured("create table …", capture__partitions=3)`.

    The tables are there before the capture begins, so they are in its snapshot; `start=False` leaves it to the test.
    `make_node` is asked for so that nodes of the test's own end after the captures that write to them.
    """
    with ExitStack() as stack:

        def make(
            tables: str = "", *, node: NodeProcess | None = None, start: bool = True, **settings: object
        ) -> Captured:
            database = stack.enter_context(fresh(postgres18))
            if tables:
                database.execute(tables)
            database.execute(PUBLICATION)
            captured = Captured(spark, node or spark_node, database, **settings)
            stack.callback(captured.stop)
            if start:
                captured.start()
            return captured

        yield make


@pytest.fixture
def captured(make_captured: MakeCaptured) -> Captured:
    """An empty database that is captured."""
    return make_captured()
