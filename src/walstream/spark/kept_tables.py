"""The tables that the pipeline keeps: what the log says of each, and what the configuration wants of it.

Owns putting the two together; refuses to know rows. Versions are read when the schema topic has grown, at the begin of
a batch: a version is in the log before its first row, and a row before the point of a batch, so every version of the
batch's rows is known then. One version, the newest, types all rows of a table in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from walstream import logs
from walstream.capture.streams import Streams
from walstream.capture.topics import Topics
from walstream.config import ROW_OPERATIONS, PipelineConfig, StreamRule, TableMode, TableRule
from walstream.errors import TableUnfit, UsageError
from walstream.positions import TopicPartition
from walstream.spark.fetching import Address
from walstream.spark.options import parse_table
from walstream.spark.patience import patient
from walstream.spark.types import TableVersion, table_name
from walstream.spark.versions import Versions, read_versions

NAMED_MAX: Final = 10
"""Tables that are named beside one that is not there."""

log = logs.get(__name__)


class KeptTable(NamedTuple):
    """A table as it is to be read and written now."""

    name: str
    mode: TableMode
    strings: tuple[str, ...]
    version: TableVersion
    is_countable: bool
    """Whether the points' numbers are those of its rows: tombstones are records without being rows."""


class KeptTables:
    """The tables of one log, under one configuration."""

    def __init__(self, address: Address, prefix: str, config: PipelineConfig, streams: Sequence[StreamRule]) -> None:
        """Raises UsageError for a table in the configuration whose name is none."""
        self._address = address
        self._prefix = prefix
        self._config = config
        self._rules = {table_name(*parse_table(name)): rule for name, rule in config.tables.items()}
        self._streams = Streams(prefix, streams)
        self._has_tombstones = any(rule.tombstones for rule in streams)
        self._topics = Topics(address, prefix)
        self._end = -1
        self._told: set[str] = set()
        self._versions = Versions(prefix, [])

    def refresh(self) -> None:
        """Read the versions again if there are more of them."""
        if self._end < 0:
            self._refresh()
        else:
            patient(self._refresh, self._connect)

    def _connect(self) -> None:
        self._topics = Topics(self._address, self._prefix)

    def _refresh(self) -> None:
        partition = TopicPartition(self._topics.names.schema, 0)
        end = self._topics.ends([partition])[partition]
        if end != self._end:
            self._versions = read_versions(self._address, self._prefix, self._topics)
            self._end = end
            self._say_unknown()

    def _say_unknown(self) -> None:
        """Say once which tables of the configuration are not in the log: their names are perhaps misspelt."""
        known = {table_name(*name) for name in self._versions.tables}
        # A capture that has just begun has described none yet.
        if known:
            for name in sorted(self._rules.keys() - known - self._told):
                hint = f"see how it is written; those there are {', '.join(sorted(known)[:NAMED_MAX])}"
                log.warning("configured table is not in the log yet", table=name, hint=hint)
            self._told |= self._rules.keys() - known

    def name_of(self, topic: str) -> str | None:
        """Return the table whose rows a topic holds; None for other topics."""
        found = self._versions.topics.get(topic)
        return None if found is None else table_name(*found)

    def is_kept(self, name: str) -> bool:
        """Whether the configuration wants the table."""
        return self._rule(name).enabled

    def mode(self, name: str) -> TableMode:
        """Return how the table is kept."""
        mode = self._rule(name).mode
        return self._config.mode if mode == "default" else mode

    def table(self, name: str) -> KeptTable:
        """Return a table in its newest version.

        Raises UsageError for one that the log does not describe, TableUnfit for one that its topic cannot tell.
        """
        version = self._versions.newest(*parse_table(name))
        self._check_whole(version, self.mode(name))
        rule = self._rule(name)
        known = {column.name for column in version.columns}
        if unknown := [column for column in rule.strings if column not in known and column != "*"]:
            raise UsageError(
                f"pipeline.tables.{name}.strings names {', '.join(unknown)}, which {name} does not have.",
                f"It has {', '.join(sorted(known))}.",
            )
        return KeptTable(name, self.mode(name), rule.strings, version, not self._has_tombstones)

    def versions_at(self, name: str, gen: int) -> tuple[TableVersion, ...]:
        """Return what rows of a generation mean by the numbers of a table's versions."""
        return self._versions.at(*parse_table(name), gen)

    def _check_whole(self, version: TableVersion, mode: TableMode) -> None:
        """Refuse a table of whose changes `[[streams]]` keeps some from its topic: it would look current and not be."""
        there = self._streams.operations_of(version.schema, version.table)
        if not there:
            raise TableUnfit(
                f"No rule of [[streams]] sends the rows of {version.name} to its own topic.",
                'Add one with that table and topic = "", or set enabled = false for it in [pipeline.tables].',
            )
        missing = [operation for operation in ROW_OPERATIONS if operation not in there]
        if missing and mode != "append":
            raise TableUnfit(
                f"[[streams]] keeps {', '.join(missing)} of {version.name} from its topic: a {mode} would be wrong.",
                "Let that rule take all operations, or keep the table in the mode append.",
            )

    def _rule(self, name: str) -> TableRule:
        return self._rules.get(name, _DEFAULT)


_DEFAULT = TableRule()
