"""Fixtures with real PostgreSQL servers: one per version and test session, a database per test.

`database` is a fresh database of PostgreSQL 18, `database16` and `database15` of those; `each_database` runs a test on
every version at hand. What a test leaves (sessions, slots) goes with its database. A test that stops or breaks its
server takes one of its own from `make_postgres`.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from walstream.errors import UsageError
from walstream.postgres.embedded import EmbeddedPostgres, binaries

MakePostgres = Callable[..., EmbeddedPostgres]

VERSIONS = (18, 16, 15)

_numbers = itertools.count(1)


@dataclass
class Database:
    """A database of a server, and a session in it for the test's own statements."""

    server: EmbeddedPostgres
    name: str
    _connection: psycopg.Connection[Any] | None = field(default=None, repr=False)

    @property
    def dsn(self) -> str:
        return self.server.dsn_of(self.name)

    @property
    def version(self) -> int:
        return self.server.version

    def connect(self) -> psycopg.Connection[Any]:
        """Open another session, in autocommit mode; closing it is the test's to do."""
        return psycopg.connect(self.dsn, autocommit=True)

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The test's own session."""
        if self._connection is None or self._connection.closed:
            self._connection = self.connect()
        return self._connection

    def execute(self, statements: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
        """Run a statement (several, when there are no parameters), each in a transaction of its own; return rows."""
        cursor = self.connection.execute(statements, parameters)
        return cursor.fetchall() if cursor.description else []

    def drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        with psycopg.connect(self.server.dsn, autocommit=True) as session:
            _drop_slots(session, self.name)
            session.execute(f'drop database "{self.name}" with (force)')


def _drop_slots(session: psycopg.Connection[Any], database: str) -> None:
    deadline = time.monotonic() + 30
    query = "select slot_name, active_pid from pg_replication_slots where database = %s"
    while slots := session.execute(query, [database]).fetchall():
        assert time.monotonic() < deadline, f"slots are still in use: {slots}"
        for name, pid in slots:
            if pid is not None:
                session.execute("select pg_terminate_backend(%s)", [pid])
                time.sleep(0.02)
            else:
                session.execute("select pg_drop_replication_slot(%s)", [name])


def skip_unless_installed(version: int) -> None:
    try:
        binaries(version)
    except UsageError as error:
        pytest.skip(str(error))


@contextmanager
def running(version: int, **settings: str) -> Iterator[EmbeddedPostgres]:
    skip_unless_installed(version)
    server = EmbeddedPostgres(Path(tempfile.mkdtemp(prefix="walstream-postgres-")), version=version, settings=settings)
    try:
        yield server.start()
    finally:
        server.remove()


@contextmanager
def fresh(server: EmbeddedPostgres) -> Iterator[Database]:
    database = Database(server, f"test_{next(_numbers)}")
    with psycopg.connect(server.dsn, autocommit=True) as session:
        session.execute(f'create database "{database.name}"')
    try:
        yield database
    finally:
        database.drop()


@pytest.fixture(scope="session")
def postgres18() -> Iterator[EmbeddedPostgres]:
    with running(18) as server:
        yield server


@pytest.fixture(scope="session")
def postgres16() -> Iterator[EmbeddedPostgres]:
    with running(16) as server:
        yield server


@pytest.fixture(scope="session")
def postgres15() -> Iterator[EmbeddedPostgres]:
    """PostgreSQL 15 of the distribution, where it is installed; the others come from the wheel."""
    with running(15) as server:
        yield server


@pytest.fixture
def database(postgres18: EmbeddedPostgres) -> Iterator[Database]:
    with fresh(postgres18) as database:
        yield database


@pytest.fixture
def database16(postgres16: EmbeddedPostgres) -> Iterator[Database]:
    with fresh(postgres16) as database:
        yield database


@pytest.fixture
def database15(postgres15: EmbeddedPostgres) -> Iterator[Database]:
    with fresh(postgres15) as database:
        yield database


@pytest.fixture(params=VERSIONS, ids=lambda version: f"postgres{version}")
def each_database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A fresh database of every version that can be had."""
    with fresh(request.getfixturevalue(f"postgres{request.param}")) as database:
        yield database


@pytest.fixture
def make_postgres() -> Iterator[MakePostgres]:
    """A function that starts a server of the test's own: `make_postgres(16, wal_sender_timeout="2s")`."""
    servers: list[EmbeddedPostgres] = []

    def make(version: int = 18, **settings: str) -> EmbeddedPostgres:
        skip_unless_installed(version)
        folder = Path(tempfile.mkdtemp(prefix="walstream-postgres-"))
        servers.append(EmbeddedPostgres(folder, version=version, settings=settings))
        return servers[-1].start()

    try:
        yield make
    finally:
        for server in servers:
            server.remove()
