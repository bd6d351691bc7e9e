"""The stream of a slot: frames in order, confirmed positions, and every way it can end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from node.certificates import Authority
from postgres.servers import Database, MakePostgres
from walstream import error_codes, errors
from walstream.positions import Lsn
from walstream.postgres import catalogue, pgoutput, stream
from walstream.postgres.protocol import (
    KEEPALIVE_KIND,
    XLOG_DATA_HEADER_BYTES,
    XLOG_DATA_KIND,
    parse_keepalive,
    status_update,
)
from walstream.postgres.session import ReplicationSession, connect
from walstream.postgres.stream import CopyBoth

BODY = XLOG_DATA_HEADER_BYTES


def values(frames: list[bytes]) -> list[bytes | pgoutput.Unchanged | None]:
    """The first column of each inserted row."""
    found = []
    for frame in frames:
        if frame[0] == XLOG_DATA_KIND and frame[BODY : BODY + 1] == b"I":
            row = pgoutput.decode_row(frame, BODY)
            assert row.new is not None
            found.append(row.new[0])
    return found


def ends(frames: list[bytes]) -> list[Lsn]:
    """The end LSN of each transaction."""
    messages = [pgoutput.decode(f, BODY) for f in frames if f[0] == XLOG_DATA_KIND and f[BODY : BODY + 1] == b"C"]
    return [message.end_lsn for message in messages if isinstance(message, pgoutput.Commit)]


def read_rows(source: CopyBoth, count: int, timeout_s: float = 30.0) -> list[bytes]:
    """Read until so many rows and the end of their transaction have come; return every frame."""
    frames: list[bytes] = []
    rows = commits = 0
    deadline = time.monotonic() + timeout_s
    while rows < count or not commits:
        assert time.monotonic() < deadline, f"{rows} of {count} rows came"
        new = source.drain(1.0)
        rows += len(values(new))
        commits += len(ends(new))
        frames += new
    return frames


def read_to_the_end(source: CopyBoth, seen: list[bytes] | None = None, *, confirm: bool = False) -> None:
    """Read until the stream ends with its exception; keep what came before, confirm keepalives if told to."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        frames = source.drain(0.5)
        if seen is not None:
            seen += frames
        for frame in frames:
            if confirm and frame[0] == KEEPALIVE_KIND:
                end = parse_keepalive(frame).wal_end
                source.send(status_update(end, end, end, time.time_ns() // 1000))


@pytest.fixture
def source(each_database: Database) -> Iterator[CopyBoth]:
    each_database.execute("create table t (n text); create publication p for table t")
    with ReplicationSession(each_database.dsn) as session:
        session.create_slot("s")
        yield session.start("s", ["p"])


def test_rows_arrive_in_order(each_database: Database, source: CopyBoth) -> None:
    each_database.execute("insert into t select * from generate_series(1, 20000)")
    frames = read_rows(source, 20_000)
    assert values(frames) == [str(n).encode() for n in range(1, 20_001)]
    assert source.frames_received == len(frames)
    assert source.bytes_received == sum(map(len, frames))


def test_one_frame_at_a_time_is_the_same_stream(each_database: Database, source: CopyBoth) -> None:
    each_database.execute("insert into t select * from generate_series(1, 100)")
    frames = []
    while not ends(frames):
        frame = source.receive(5.0)
        assert frame is not None
        frames.append(frame)
        if len(frames) == 20:
            frames += source.drain()
    assert values(frames) == [str(n).encode() for n in range(1, 101)]
    while source.receive(0.3) is not None:
        pass
    assert source.receive(0.0) is None


def test_each_call_is_bounded(each_database: Database, source: CopyBoth, monkeypatch: pytest.MonkeyPatch) -> None:
    each_database.execute("insert into t select repeat('x', 1000) from generate_series(1, 3000)")
    monkeypatch.setattr(stream, "BYTES_MAX", 100_000)
    rows = 0
    while rows < 3000:
        frames = source.drain(5.0, frames_max=200)
        assert len(frames) <= 200
        assert sum(map(len, frames)) < 300_000
        rows += len(values(frames))


def test_large_value_arrives_whole(each_database: Database, source: CopyBoth) -> None:
    each_database.execute("insert into t select repeat('x', 20000000)")
    assert values(read_rows(source, 1)) == [b"x" * 20_000_000]


def test_idle_stream_waits_and_gives_nothing(source: CopyBoth) -> None:
    while source.drain(0.3):
        pass
    begin = time.monotonic()
    assert source.drain(0.3) == []
    assert 0.2 < time.monotonic() - begin < 5
    begin = time.monotonic()
    assert source.drain(0.0) == []
    assert time.monotonic() - begin < 0.2


def test_end_of_a_transaction_is_not_kept_waiting(each_database: Database, source: CopyBoth) -> None:
    waits_ms = []
    for number in range(20):
        each_database.execute("insert into t values (%s)", [str(number)])
        begin = time.monotonic()
        read_rows(source, 1)
        waits_ms.append((time.monotonic() - begin) * 1000)
    assert sorted(waits_ms)[10] < 50, "a fraction of a millisecond on an idle machine"


def test_confirmed_position_moves_the_slot(each_database: Database, source: CopyBoth) -> None:
    each_database.execute("insert into t values ('a')")
    end = ends(read_rows(source, 1))[-1]
    source.send(status_update(end, end, end, time.time_ns() // 1000))
    assert source.finish()
    with connect(each_database.dsn) as session:
        facts = catalogue.slot_facts(session, "s")
    assert facts is not None
    assert (facts.confirmed_flush, facts.active_pid) == (end, None)


def test_what_was_not_confirmed_comes_again(each_database: Database, source: CopyBoth) -> None:
    each_database.execute("insert into t values ('a')")
    first = ends(read_rows(source, 1))[-1]
    each_database.execute("insert into t values ('b')")
    read_rows(source, 1)
    source.send(status_update(first, first, first, time.time_ns() // 1000))
    assert source.finish(), "the slot is free from here on"
    for _ in range(3):
        with ReplicationSession(each_database.dsn) as session:
            again = session.start("s", ["p"])
            frames = read_rows(again, 1)
            end = ends(frames)[-1]
            assert values(frames) == [b"b"]
            assert again.finish()
    with ReplicationSession(each_database.dsn) as session:
        later = session.start("s", ["p"], end)
        each_database.execute("insert into t values ('c')")
        assert values(read_rows(later, 1)) == [b"c"], "what is asked for wins where it is later than the slot"


def test_finish_in_the_middle_of_a_backlog(each_database: Database, source: CopyBoth) -> None:
    each_database.execute("insert into t select * from generate_series(1, 100000)")
    source.drain(5.0)
    assert source.finish(30.0)
    with pytest.raises(errors.ConnectionLost):
        source.drain(1.0)


def test_server_asks_for_an_answer(make_postgres: MakePostgres) -> None:
    server = make_postgres(wal_sender_timeout="2s")
    with ReplicationSession(server.dsn) as session:
        session.create_slot("s")
        source = session.start("s", ["p"], messages=False)
        deadline = time.monotonic() + 5
        asked = 0
        while time.monotonic() < deadline:
            for frame in source.drain(0.2):
                assert frame[0] == KEEPALIVE_KIND
                keepalive = parse_keepalive(frame)
                if keepalive.reply_requested:
                    asked += 1
                    source.send(status_update(keepalive.wal_end, 0, 0, time.time_ns() // 1000))
        assert asked >= 2
        with pytest.raises(errors.ConnectionLost):
            read_to_the_end(source)  # nobody answers any more


def test_names_of_publications_are_quoted(each_database: Database) -> None:
    names = ['Wéird, "näme" of \'it\\', "plain"]
    each_database.execute("create table t (n text)")
    for name in names:
        each_database.execute(sql.SQL("create publication {} for table t").format(sql.Identifier(name)))
    with ReplicationSession(each_database.dsn) as session:
        session.create_slot("s")
        each_database.execute("insert into t values ('a')")
        source = session.start("s", names)
        assert values(read_rows(source, 1)) == [b"a"]


def test_missing_publication_is_found_out_before_anything_can_be_confirmed(each_database: Database) -> None:
    each_database.execute("create table t (n text)")
    each_database.execute(f"alter database {each_database.name} set client_min_messages = 'error'")
    with ReplicationSession(each_database.dsn) as session:
        start = session.create_slot("s").consistent_point
        each_database.execute("insert into t values ('a')")
        source = session.start("s", ["absent"])
        seen: list[bytes] = []
        with pytest.raises(errors.PublicationMissing, match="absent") as refused:
            read_to_the_end(source, seen)
        assert error_codes.codes(refused.value).exit == 5
        assert all(parse_keepalive(frame).wal_end <= start for frame in seen)
        with pytest.raises(errors.PublicationMissing):
            source.drain(1.0)


def test_publication_dropped_under_the_stream(each_database: Database, source: CopyBoth) -> None:
    each_database.execute("insert into t values ('a')")
    assert values(read_rows(source, 1)) == [b"a"]
    each_database.execute("drop publication p")
    each_database.execute("insert into t values ('b')")
    with pytest.raises(errors.PublicationMissing):
        read_to_the_end(source)


def test_session_is_ended_by_an_administrator(each_database: Database, source: CopyBoth) -> None:
    each_database.execute("insert into t values ('a')")
    read_rows(source, 1)
    each_database.execute("select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = 's'")
    with pytest.raises(errors.ConnectionLost, match="administrator") as ended:
        read_to_the_end(source)
    assert error_codes.codes(ended.value).exit == 3
    with pytest.raises(errors.ConnectionLost):
        source.drain(1.0)
    with pytest.raises(errors.ConnectionLost):
        source.send(status_update(0, 0, 0, 0))


@pytest.mark.parametrize("how", ["immediate", "kill"])
def test_server_crashes(make_postgres: MakePostgres, how: str) -> None:
    server = make_postgres()
    with psycopg.connect(server.dsn, autocommit=True) as session:
        session.execute("create table t (n text); create publication p for table t")
    with ReplicationSession(server.dsn) as session:
        session.create_slot("s")
        source = session.start("s", ["p"])
        with psycopg.connect(server.dsn, autocommit=True) as other:
            other.execute("insert into t values ('a')")
        read_rows(source, 1)
        if how == "kill":
            server.kill()
        else:
            server.stop("immediate")
        with pytest.raises(errors.ConnectionLost):
            read_to_the_end(source)
    server.start()
    with ReplicationSession(server.dsn) as session:
        assert values(read_rows(session.start("s", ["p"]), 1)) == [b"a"]


def test_server_stops_when_its_last_position_is_confirmed(make_postgres: MakePostgres) -> None:
    """A fast shutdown waits for readers: who does not confirm keepalives holds it up until wal_sender_timeout."""
    server = make_postgres()
    with ReplicationSession(server.dsn) as session:
        session.create_slot("s")
        source = session.start("s", ["p"])
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        with pytest.raises(errors.ConnectionLost, match="shutting down"):
            read_to_the_end(source, confirm=True)
    stopping.join(10)
    assert not server.running


def test_stream_through_tls(make_postgres: MakePostgres, tmp_path: Path) -> None:
    server = make_postgres(15)  # the wheel's servers are built without TLS
    pair = Authority(tmp_path / "authority").server()
    for source_file, name in ((pair.certificate, "server.crt"), (pair.key, "server.key")):
        file = server.folder / "data" / name
        file.write_bytes(Path(source_file).read_bytes())
        file.chmod(0o600)
        if server.runs_as is not None:
            os.chown(file, server.runs_as.pw_uid, server.runs_as.pw_gid)
    server.settings["ssl"] = "on"
    server.restart()
    with (
        psycopg.connect(server.dsn, autocommit=True) as other,
        ReplicationSession(server.dsn + " sslmode=require") as session,
    ):
        other.execute("create table t (n text); create publication p for table t")
        session.create_slot("s")
        other.execute("insert into t select repeat('x', n * 37 % 5000) || n from generate_series(1, 20000) n")
        source = session.start("s", ["p"])
        assert len(values(read_rows(source, 20_000))) == 20_000
        for size in (8_150, 16_384, 100_000, 3_000_000):
            other.execute("insert into t select repeat('x', %s)", [size])
            begin = time.monotonic()
            assert values(read_rows(source, 1)) == [b"x" * size]
            assert time.monotonic() - begin < 5, "half of a record waited in OpenSSL"
        assert source.finish()
