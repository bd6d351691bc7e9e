"""Golden vectors: pgoutput messages as real servers sent them, with what they say.

`golden/postgres18.txt` and `golden/postgres16.txt` hold stories: a heading says what was done in SQL, then come the
messages in order, each as the bytes in hexadecimal and, on the next line, the decoded message. Record them again with

    python tests/postgres/golden.py 18 > tests/postgres/golden/postgres18.txt

(with `src` and `tests` on PYTHONPATH) and read the difference: positions, times and ids change with each recording,
nothing else should.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg

from walstream.postgres import pgoutput
from walstream.postgres.embedded import EmbeddedPostgres
from walstream.postgres.messages import Message, Row
from walstream.postgres.protocol import XLOG_DATA_HEADER_BYTES, XLOG_DATA_KIND
from walstream.postgres.session import ReplicationSession

FOLDER = Path(__file__).with_suffix("")
FILES = sorted(FOLDER.glob("*.txt"))

SCHEMA = """
    create type mood as enum ('sad', 'it''s "ok"');
    create domain positive as numeric(10, 2) check (value > 0);
    create table keyed (id int primary key, note text, big text, feeling mood, price positive);
    alter table keyed alter big set storage external;
    create table "Fül""l" ("ä b" text, n int);
    alter table "Fül""l" replica identity full;
    create table indexed (a int, b int not null, c text);
    create unique index indexed_b on indexed (b);
    alter table indexed replica identity using index indexed_b;
    create table nothing (n int);
    alter table nothing replica identity nothing;
    create table referring (id int primary key, keyed_id int references keyed);
    create publication everything for all tables;
"""

# Each story: its heading, and statements that are run one by one.
STORIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("insert: text, null, enum, domain, UTF-8", ("insert into keyed values (1, 'grün', null, 'it''s \"ok\"', 1.50)",)),
    ("insert: an empty text and a large value", ("insert into keyed values (2, '', repeat('x', 2100), 'sad', 2)",)),
    ("update: only the new row; the large value is unchanged", ("update keyed set note = 'b' where id = 2",)),
    ("update: the key changes, so the old key comes too", ("update keyed set id = 3 where id = 2",)),
    ("delete by key", ("delete from keyed where id = 3",)),
    (
        "REPLICA IDENTITY FULL: whole old rows, quoted names",
        (
            'insert into "Fül""l" values (\'a\', 1), (null, null)',
            'update "Fül""l" set n = 2 where n = 1',
            'delete from "Fül""l" where n is null',
        ),
    ),
    (
        "REPLICA IDENTITY USING INDEX: the key is not the primary key",
        (
            "insert into indexed values (1, 10, 'x')",
            "update indexed set b = 11",
            "update indexed set c = 'y'",
            "delete from indexed",
        ),
    ),
    ("REPLICA IDENTITY NOTHING: inserts alone", ("insert into nothing values (1)",)),
    ("truncate: one table, restart identity", ("truncate nothing restart identity",)),
    ("truncate: two tables by cascade", ("truncate keyed cascade",)),
    (
        "logical messages: in a transaction, and outside of one",
        (
            "select pg_logical_emit_message(true, 'heart', 'in a transaction')",
            "select pg_logical_emit_message(false, 'bäat', '\\x00ff'::bytea)",
        ),
    ),
    (
        "a column is added, and the relation is described again",
        ("alter table nothing add m int", "insert into nothing values (1, 2)"),
    ),
    (
        "origin: the transaction came from elsewhere",
        (
            "select pg_replication_origin_create('elsewhere')",
            "select pg_replication_origin_session_setup('elsewhere')",
            "begin; select pg_replication_origin_xact_setup('0/ABCDEF', '2020-02-02 02:02:02+00');"
            " insert into nothing values (9, 9); commit",
            "select pg_replication_origin_session_reset()",
        ),
    ),
)

STREAMED_STORIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "streamed: rows of a transaction that is still running, then its commit",
        (
            "begin; insert into keyed values (11, 'a', null, 'sad', 1); update keyed set note = 'b' where id = 11;"
            " select pg_logical_emit_message(true, 'p', 'c'); delete from keyed; truncate nothing; commit",
        ),
    ),
    (
        "streamed: a subtransaction is rolled back",
        (
            "begin; insert into nothing values (1, 1); savepoint s; insert into nothing values (2, 2);"
            " rollback to s; insert into nothing values (3, 3); commit",
        ),
    ),
    ("streamed: all is rolled back", ("begin; insert into nothing values (4, 4); rollback",)),
)

PREPARED_STORIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "two-phase: prepared, committed",
        ("begin; insert into nothing values (5, 5); prepare transaction 'gid ä'", "commit prepared 'gid ä'"),
    ),
    (
        "two-phase: prepared, rolled back",
        ("begin; insert into nothing values (6, 6); prepare transaction 'g2'", "rollback prepared 'g2'"),
    ),
)


class Vector(NamedTuple):
    """One recorded message, the story it belongs to, and whether it stood inside of a stream."""

    file: str
    story: str
    data: bytes
    in_stream: bool
    decoded: str

    def __str__(self) -> str:
        return f"{self.file}: {self.story}: {self.data[:1].decode()}"


def vectors() -> Iterator[Vector]:
    """Read every recorded message."""
    for file in FILES:
        story, in_stream, data = "", False, b""
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("# "):
                story = line[2:]
            elif line.startswith("= "):
                yield Vector(file.stem, story, data, in_stream, line[2:])
                in_stream = data[:1] == b"S" or (in_stream and data[:1] != b"E")
            elif line:
                data = bytes.fromhex(line)


def decode(data: bytes, in_stream: bool) -> Message | Row:
    """Decode a message of any kind."""
    if data[0] in pgoutput.ROW_KINDS:
        return pgoutput.decode_row(data, in_stream=in_stream)
    return pgoutput.decode(data, in_stream=in_stream)


def _record(server: EmbeddedPostgres, stories: tuple[tuple[str, tuple[str, ...]], ...], **options: str) -> None:
    two_phase = options.get("two_phase") == "on"
    streamed = " options='-c debug_logical_replication_streaming=immediate'" if "streaming" in options else ""
    with psycopg.connect(server.dsn, autocommit=True) as session:
        session.execute("select pg_create_logical_replication_slot('golden', 'pgoutput', false, %s)", [two_phase])
        for heading, statements in stories:
            with ReplicationSession(server.dsn + streamed) as replication:
                # Statements go first: a fresh decoder describes each relation again, and nothing else comes between.
                for statement in statements:
                    for part in statement.split("; ") if statement.startswith("begin") else [statement]:
                        session.execute(part)
                stream = replication.start("golden", ["everything"], streaming=False, options=options)
                print(f"\n# {heading}" + (" (parallel)" if options.get("streaming") == "parallel" else ""))
                in_stream = False
                while frames := stream.drain(0.5):
                    for frame in frames:
                        if frame[0] == XLOG_DATA_KIND:
                            data = frame[XLOG_DATA_HEADER_BYTES:]
                            print(data.hex(), f"= {decode(data, in_stream)!r}", sep="\n")
                            in_stream = data[:1] == b"S" or (in_stream and data[:1] != b"E")
                assert stream.finish()
            session.execute("select pg_replication_slot_advance('golden', pg_current_wal_lsn())")
        session.execute("select pg_drop_replication_slot('golden')")


def record(version: int) -> None:
    """Play every story against a server of this version and print what it sends."""
    folder = Path(tempfile.mkdtemp(prefix="walstream-golden-"))
    server = EmbeddedPostgres(folder, version=version, settings={"max_prepared_transactions": "10"})
    try:
        with psycopg.connect(server.start().dsn, autocommit=True) as session:
            session.execute(SCHEMA)
            print(f"# Recorded from PostgreSQL {session.info.parameter_status('server_version')} by golden.py.")
        _record(server, STORIES)
        _record(server, STREAMED_STORIES, streaming="on")
        _record(server, STREAMED_STORIES[1:], streaming="parallel")
        _record(server, PREPARED_STORIES, two_phase="on")
        _record(server, PREPARED_STORIES, two_phase="on", streaming="on")
    finally:
        server.remove()


if __name__ == "__main__":
    record(int(sys.argv[1]))
