"""The versions of tables, read from `<prefix>.schema`.

Owns the reading of that topic and which record a row means; refuses to know types (types.py). A version is written
before its first row, so whoever has seen a row finds its version here. Of two records with one number, which a zombie
capture could cause, a row means the one with the largest generation that is not larger than its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from walstream.capture.kafka import TIMEOUT_S
from walstream.capture.streams import Streams
from walstream.capture.topics import Topics
from walstream.errors import UsageError
from walstream.positions import TopicPartition
from walstream.spark.fetching import Address, Fetcher
from walstream.spark.types import TableVersion, table_name


class Versions:
    """Every version of every table that the log knows. Sans-IO."""

    def __init__(self, prefix: str, found: Iterable[TableVersion]) -> None:
        self._tables: dict[tuple[str, str], list[TableVersion]] = {}
        for version in sorted(found, key=lambda version: (version.version, version.gen)):
            self._tables.setdefault((version.schema, version.table), []).append(version)
        streams = Streams(prefix)
        self.topics = {streams.topic(*name): name for name in self._tables}
        """The tables by the topics of their rows."""

    @property
    def tables(self) -> list[tuple[str, str]]:
        """Schema and name of every table."""
        return sorted(self._tables)

    def of(self, schema: str, table: str) -> list[TableVersion]:
        """Return the records of a table, the oldest version first. Raises UsageError."""
        found = self._tables.get((schema, table))
        if not found:
            known = ", ".join(table_name(*name) for name in self.tables) or "none yet"
            raise UsageError(
                f"The log has no rows of {table_name(schema, table)}: capture has not described it.",
                f"Tables there: {known}.",
            )
        return found

    def newest(self, schema: str, table: str, version: int | None = None) -> TableVersion:
        """Return the newest version of a table, or the one with this number. Raises UsageError."""
        found = self.of(schema, table)
        if version is None:
            return found[-1]
        chosen = [known for known in found if known.version == version]
        if not chosen:
            numbers = ", ".join(str(number) for number in sorted({known.version for known in found}))
            raise UsageError(f"{found[0].name} has no version {version}.", f"It has {numbers}.")
        return chosen[-1]

    def typing(self, schema: str, table: str, columns: Iterable[str], version: int | None = None) -> TableVersion:
        """Return the newest version that has all these columns, or the one with this number. Raises UsageError.

        A stream keeps the columns that it began with: one that is dropped or renamed since is still typed by the
        version that last had it, and is null, or is found by its number, in rows of later ones.
        """
        if version is not None:
            return self.newest(schema, table, version)
        wanted = set(columns)
        found = self.of(schema, table)
        for known in reversed(found):
            if wanted <= {column.name for column in known.columns}:
                return known
        raise UsageError(
            f"No version of {found[0].name} has the columns {', '.join(sorted(wanted))} together.",
            "Begin the query anew, with the columns that the table has now.",
        )

    def at(self, schema: str, table: str, gen: int) -> tuple[TableVersion, ...]:
        """Return what rows of a generation mean by the numbers of a table's versions."""
        meant: dict[int, TableVersion] = {}
        for known in self.of(schema, table):
            # Sorted by generation: a later one replaces an earlier one, unless the rows cannot know it.
            if known.gen <= gen or known.version not in meant:
                meant[known.version] = known
        return tuple(meant.values())


def topic_of(prefix: str, schema: str, table: str) -> str:
    """Return the topic of a table's rows."""
    return Streams(prefix).topic(schema, table)


def read_versions(
    address: Address, prefix: str, topics: Topics | None = None, fetcher: Fetcher | None = None
) -> Versions:
    """Read all versions that are in the log now. Raises UsageError when no capture has written there."""
    if topics is None:
        topics = Topics(address, prefix)
        check_there(address, topics)
    partition = TopicPartition(topics.names.schema, 0)
    start, end = topics.starts([partition])[partition], topics.ends([partition])[partition]
    own = fetcher or Fetcher(address)
    try:
        found = [message.value() for message in own.read_compacted(partition, start, end)]
    finally:
        if fetcher is None:
            own.close()
    return Versions(prefix, [TableVersion.from_json(value) for value in found if value is not None])


def topics_there(address: Address, topics: Topics) -> set[str]:
    """Return the topics that the log has. Asked for offsets of one that it has not, it would not say so plainly."""
    with address.translated():
        return set(topics.admin.list_topics(timeout=TIMEOUT_S).topics)


def check_there(address: Address, topics: Topics) -> None:
    """Make sure that a capture has written to the log. Raises UsageError."""
    if missing := {topics.names.commits, topics.names.schema} - topics_there(address, topics):
        raise UsageError(
            f"The log at {address.bootstrap} has no topic {min(missing)}: no capture has written with that prefix.",
            "Check the options bootstrap and prefix, and whether `walstream capture run` has been started.",
        )
