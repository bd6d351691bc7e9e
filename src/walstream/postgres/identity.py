"""What a published table was when its rows were read, so that one that left the stream and came back is noticed.

Between two comparisons a table may stop being streamed and be streamed again; its catalogue entries then look the same
but for the transactions that wrote them. So an identity holds these, too: a recorded identity equals a later one only
if PostgreSQL streamed the table at every moment in between. Where catalogue entries cannot tell loss from housekeeping
(VACUUM FULL, CLUSTER, new partitions), `compare` names the relations whose rows have to be looked at. Sans-IO.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

_OPERATION_NAMES: Final = {"i": "insert", "u": "update", "d": "delete", "t": "truncate"}


class PartIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A relation that holds rows: the table itself or a leaf of a partitioned table. Numbers named xid are 32 bits."""

    file: int
    """pg_class.relfilenode: changes by TRUNCATE, VACUUM FULL, CLUSTER, SET TABLESPACE and rewrites by ALTER TABLE."""
    toast: int
    """pg_class.reltoastrelid, 0 for none: of these, changes by rewrites by ALTER TABLE only, SET LOGGED among them."""
    persistence: str
    attached: str = ""
    """Of a leaf: the xids that attached it and the partitioned tables above it."""
    is_born: bool = False
    """Of a leaf: whether each of these was created by the transaction that attached it."""


class Identity(msgspec.Struct, frozen=True):
    """A published table, at the moment when the catalogue was read."""

    relation_id: int
    entry: int
    """Of the catalogue's row that publishes the table: made anew with each row filter and list of columns."""
    publication_xid: int
    """The transaction that set the publication's options last."""
    via_root: bool
    operations: str
    """What the publication sends: letters of i u d t."""
    names: str
    """The xids that created, renamed or moved the table last, or changed its owner; of a partition that is published
    because of a table above it, the same of those, and the xids that attached them."""
    horizon: int
    """A transaction id of 64 bits: all older ones had ended."""
    parts: dict[int, PartIdentity]
    """By relation id."""
    columns: dict[str, int] = {}
    """The numbers of the columns by their names."""

    @property
    def text(self) -> str:
        """The form that the log keeps."""
        return msgspec.json.encode(self).decode()


class Comparison(NamedTuple):
    """What has become of a table. Without a reason its rows are proved, if those of the parts are."""

    reason: str = ""
    """Why its rows have to be read again."""
    added: frozenset[int] = frozenset()
    """New leaves: proved if no row was in them before they were attached."""
    rewritten: frozenset[int] = frozenset()
    """Parts in new files: proved if a row is older than the recorded identity, because then all were kept."""


_BEFORE: Final = re.compile(r"(\d+)/(\d+)").fullmatch


def recorded_identity(text: str) -> Identity | None:
    """Read what `text` wrote; None for anything else."""
    try:
        return msgspec.json.decode(text, type=Identity)
    except msgspec.DecodeError:
        return None


def compare(before: Identity, now: Identity) -> Comparison:
    """Compare two identities of the tables published under one name."""
    if reason := _difference(before, now):
        return Comparison(reason)
    gone = before.parts.keys() - now.parts.keys()
    if gone:
        return Comparison(f"partitions were dropped or detached: {len(gone)} of {len(before.parts)}")
    rewritten = set()
    for one, part in before.parts.items():
        after = now.parts[one]
        if after.attached != part.attached:
            return Comparison(f"a partition (oid {one}) was detached and attached again")
        if after.persistence != part.persistence:
            return Comparison(
                f"a partition (oid {one}) was set to {'LOGGED' if after.persistence == 'p' else 'UNLOGGED'}"
            )
        if after.file == part.file:
            continue
        if after.toast != part.toast:
            return Comparison("its rows were rewritten by ALTER TABLE (a type changed, or SET UNLOGGED and SET LOGGED)")
        # A table's own TRUNCATE is in the stream, that of a partition published under another name is not.
        if not part.toast or one != now.relation_id:
            rewritten.add(one)
    return Comparison("", frozenset(now.parts.keys() - before.parts.keys()), frozenset(rewritten))


def compare_unparsed(recorded: str, now: Identity) -> Comparison:
    """Compare what is no identity with one: earlier versions kept the numbers of the table and its entry only."""
    # To doubt those, too, would read every table again after an upgrade.
    found = _BEFORE(recorded)
    if found is not None and (int(found[1]), int(found[2])) == (now.relation_id, now.entry):
        return Comparison()
    return Comparison("it left the publication and came back, or is another table")


def unproved(now: Identity, failed: frozenset[int]) -> str:
    """Return the reason for parts that could not be proved."""
    if failed == {now.relation_id}:
        return "its file is another one and holds none of its rows (TRUNCATE, or a rewrite by ALTER TABLE)"
    listed = ", ".join(str(one) for one in sorted(failed)[:3])
    more = " …" if len(failed) > 3 else ""
    return f"partitions (oid {listed}{more}) were attached with rows, emptied by TRUNCATE, or rewritten by ALTER TABLE"


def _difference(before: Identity, now: Identity) -> str:
    if before.relation_id != now.relation_id:
        return f"it is another table: oid {now.relation_id}, it was {before.relation_id}"
    if before.entry != now.entry:
        return "it left the publication and came back, or its row filter or list of columns was changed"
    if before.operations != now.operations:
        return f"the publication sends {_named(now.operations)}; it sent {_named(before.operations)}"
    if before.via_root != now.via_root:
        return f"publish_via_partition_root was set to {'true' if now.via_root else 'false'}"
    if before.publication_xid != now.publication_xid:
        return "ALTER PUBLICATION has changed what is sent, and may have changed it back"
    if before.names != now.names:
        return "it was renamed, moved to another schema, detached or given another owner, and may have been back since"
    # Rows of before the DROP are described by the catalogue of after the ADD: as if they had values of the new column.
    replaced = [name for name, number in before.columns.items() if now.columns.get(name, number) != number]
    if replaced and not _are_renamed(before, now):
        return f"a column was dropped and another one added under its name: {', '.join(sorted(replaced))}"
    return ""


def _are_renamed(before: Identity, now: Identity) -> bool:
    """Whether all columns are there as before, with names exchanged: the stream tells which version a row is of."""
    return set(before.columns.values()) <= set(now.columns.values())


def _named(operations: str) -> str:
    return ", ".join(_OPERATION_NAMES[one] for one in operations) or "nothing"
