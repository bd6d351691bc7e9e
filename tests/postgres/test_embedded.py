"""A PostgreSQL of one's own: started, stopped, killed, started again."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import psycopg
import pytest

from postgres.servers import MakePostgres
from walstream.errors import DirectoryUnusable, UnhealthyError, UsageError
from walstream.postgres.embedded import EmbeddedPostgres, binaries


@pytest.mark.parametrize("version", [18, 16])
def test_server_starts_and_takes_settings(make_postgres: MakePostgres, version: int) -> None:
    server = make_postgres(version, wal_sender_timeout="2s")
    with psycopg.connect(server.dsn) as session:
        assert session.info.server_version // 10000 == version
        assert session.execute("show wal_level").fetchone() == ("logical",)
        assert session.execute("show wal_sender_timeout").fetchone() == ("2s",)
        assert session.execute("show server_encoding").fetchone() == ("UTF8",)


def test_committed_rows_outlive_every_way_to_end(make_postgres: MakePostgres) -> None:
    server = make_postgres()
    port = server.port
    with psycopg.connect(server.dsn, autocommit=True) as session:
        session.execute("create table t (n int)")
    for number, end in enumerate(("fast", "immediate", "kill")):
        busy = psycopg.connect(server.dsn, autocommit=True)
        busy.execute("insert into t values (%s)", [number])
        if end == "kill":
            server.kill()
            assert not server.running
            server.start()
        else:
            server.restart(end)  # type: ignore[arg-type]
        busy.close()
    with psycopg.connect(server.dsn) as session:
        assert session.execute("select array_agg(n order by n) from t").fetchone() == ([0, 1, 2],)
    assert server.port == port


def test_start_is_quick(make_postgres: MakePostgres) -> None:
    begin = time.monotonic()
    make_postgres()
    assert time.monotonic() - begin < 20, "about one second on an idle machine"


def test_second_server_on_the_same_folder_is_refused(make_postgres: MakePostgres) -> None:
    server = make_postgres()
    second = EmbeddedPostgres(server.folder)
    with pytest.raises(UnhealthyError, match="lock file"):
        second.start()
    assert server.running


def test_wrong_setting_is_told_with_the_servers_words(make_postgres: MakePostgres) -> None:
    with pytest.raises(UnhealthyError, match="no_such_setting"):
        make_postgres(no_such_setting="1")


def test_version_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no PostgreSQL 9"):
        EmbeddedPostgres(Path("nowhere"), version=9)


def test_databases_with_any_name_have_a_dsn(make_postgres: MakePostgres) -> None:
    server = make_postgres()
    name = 'it\'s a \\ "täst"'
    with psycopg.connect(server.dsn, autocommit=True) as session:
        session.execute(psycopg.sql.SQL("create database {}").format(psycopg.sql.Identifier(name)))
    with psycopg.connect(server.dsn_of(name)) as session:
        assert session.info.dbname == name


def test_folder_that_the_servers_user_cannot_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedPostgres(tmp_path / "closed" / "cluster")
    if server.runs_as is None:
        pytest.skip("only root's servers run as somebody else")
    (tmp_path / "closed").mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    with pytest.raises(DirectoryUnusable, match="may not pass"):
        server.start()


def test_programs_that_the_servers_user_cannot_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    package = binaries(18).parents[1]
    shutil.copytree(binaries(18).parent, closed / package.name / "installed")
    shutil.copytree(package.with_suffix(".libs"), closed / f"{package.name}.libs")
    monkeypatch.setattr("walstream.postgres.embedded.binaries", lambda _: closed / package.name / "installed" / "bin")
    with EmbeddedPostgres(tmp_path / "cluster") as server, psycopg.connect(server.dsn) as session:
        assert session.info.server_version // 10000 == 18
    copied = server.program("postgres").parents[3]
    if server.runs_as is not None:
        assert copied.parent == Path(tempfile.gettempdir())
        shutil.rmtree(copied)
