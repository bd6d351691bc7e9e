"""What the engines ask a server, on a primary and on a standby."""

from __future__ import annotations

from postgres.servers import MakePostgres
from walstream.capture.engines import _timeline
from walstream.postgres.session import connect


def test_a_standby_says_its_timeline(make_postgres: MakePostgres) -> None:
    server = make_postgres(18)
    with connect(server.dsn) as connection:
        assert _timeline(connection) == 1
    server.stop()
    (server.folder / "data" / "standby.signal").touch()
    server.start()
    with connect(server.dsn) as connection:
        assert connection.execute("select pg_is_in_recovery()").fetchone() == (True,)
        assert _timeline(connection) == 1
