"""What the catalogue says of published tables, for a plugin whose output does not say it.

Owns the questions to the catalogue; refuses to know why they are asked. Names are as `quote_ident` writes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg

from walstream.errors import PublicationMissing, SourceNotReady

_GONE_ID = 0x80000000
_TEXT_OID = 25


class Column(NamedTuple):
    """A column as it is today."""

    quoted: bytes
    type_name: bytes
    type_modifier: int
    is_key: bool
    generated: bool


class Table(NamedTuple):
    """A table as it is today; one that is gone has no columns and an id of its own."""

    id: int
    replica_identity: str
    columns: tuple[Column, ...]


def published_tables(connection: psycopg.Connection[Any], publications: Sequence[str]) -> dict[bytes, bytes]:
    """Return the published tables, partitions too, each with what is published of it: letters of I U D T.

    Raises PublicationMissing, and SourceNotReady when only some rows or columns are published.
    """
    names = list(publications)
    rows = connection.execute(_PUBLICATIONS, (names,)).fetchall()
    missing = sorted(set(names) - {name for name, _ in rows})
    if missing:
        raise PublicationMissing(
            f"There is no publication {missing[0]}.", "Create it: CREATE PUBLICATION … FOR TABLE …;"
        )
    if connection.info.server_version >= 150000 and connection.execute(_PARTIAL, (names,)).fetchone() is not None:
        raise SourceNotReady(
            "The publication has a row filter or a column list, which test_decoding does not know.",
            "Use a slot with the plugin pgoutput.",
        )
    kinds: dict[bytes, set[int]] = {}
    for table, published in connection.execute(_TABLES, (names,)).fetchall():
        kinds.setdefault(table.encode(), set()).update(published.encode())
    return {table: bytes(sorted(letters)) for table, letters in kinds.items()}


def find_table(connection: psycopg.Connection[Any], name: bytes) -> Table:
    """Return what is known of a table."""
    rows = connection.execute(_COLUMNS, (name.decode(),)).fetchall()
    if not rows:
        return Table(_GONE_ID | (zlib.crc32(name) & 0x7FFFFFFF), "d", ())
    columns = tuple(
        Column(quoted.encode(), type_name.encode(), modifier, is_key, generated)
        for _, _, quoted, type_name, modifier, is_key, generated in rows
        if quoted is not None
    )
    return Table(rows[0][0], rows[0][1], columns)


def type_oid(connection: psycopg.Connection[Any], type_name: bytes) -> int:
    """Return the id of a type; text when there is none of that name any more."""
    row = connection.execute("SELECT to_regtype(%s)::oid::int8", (type_name.decode(),)).fetchone()
    return int(row[0]) if row is not None and row[0] is not None else _TEXT_OID


_PUBLICATIONS = """
SELECT pubname::text, pubinsert FROM pg_publication WHERE pubname = ANY(%s)
"""

_PARTIAL = """
SELECT 1 FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
WHERE p.pubname = ANY(%s) AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL)
"""

_TABLES = """
WITH published AS (
    SELECT format('%%I.%%I', t.schemaname, t.tablename)::regclass AS root,
           concat(CASE WHEN pubinsert THEN 'I' END, CASE WHEN pubupdate THEN 'U' END,
                  CASE WHEN pubdelete THEN 'D' END, CASE WHEN pubtruncate THEN 'T' END) AS kinds
    FROM pg_publication_tables t JOIN pg_publication p USING (pubname) WHERE pubname = ANY(%s)
), members AS (
    SELECT root::oid AS id, kinds FROM published
    UNION SELECT relid::oid, kinds FROM published, pg_partition_tree(root)
)
SELECT format('%%I.%%I', n.nspname, c.relname), kinds
FROM members JOIN pg_class c ON c.oid = members.id JOIN pg_namespace n ON n.oid = c.relnamespace
"""

_COLUMNS = """
SELECT c.oid::int8, c.relreplident::text, quote_ident(a.attname), format_type(a.atttypid, NULL), a.atttypmod,
       coalesce(a.attnum = ANY (i.indkey::int2[]), false), a.attgenerated <> ''
FROM pg_class c
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_index i ON i.indrelid = c.oid
     AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END
WHERE c.oid = to_regclass(%s) ORDER BY a.attnum
"""
