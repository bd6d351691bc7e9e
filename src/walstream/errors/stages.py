"""What befalls a stage: the source, the capture, the log's promises, the feed, the pipeline, the disk."""

from __future__ import annotations

from collections.abc import Callable

from walstream.errors.base import WalstreamError


class SourceError(WalstreamError):
    """PostgreSQL cannot give what the capture needs."""


class SlotBusy(SourceError):
    """Another process holds the replication slot."""

    retryable = True


class SlotExists(SourceError):
    """A slot of that name is there already."""


class SlotMissing(SourceError):
    """There is no replication slot of that name."""


class SlotLost(SourceError):
    """The slot is there, but the WAL that it stood for is gone."""


class PublicationMissing(SourceError):
    """There is no publication of that name."""


class SourceNotReady(SourceError):
    """A setting or a limit of the server does not allow logical replication."""


class TableChanged(SourceError):
    """The table is not any more what it was at the consistent point, so its rows of then cannot be read."""

    retryable = True


class QueryFailed(SourceError):
    """PostgreSQL refused a statement; `sqlstate` says why in its own code."""

    def __init__(self, message: str, hint: str = "", sqlstate: str = "") -> None:
        super().__init__(message, hint)
        self.sqlstate = sqlstate


class LockTimeout(QueryFailed):
    """Another session holds a lock for longer than the statement waits for it."""

    retryable = True


class DecodeError(SourceError):
    """Bytes that are no message of the replication protocol; `data` holds them for a report."""

    def __init__(self, message: str, hint: str = "", data: bytes = b"") -> None:
        super().__init__(message, hint)
        self.data = data


class CaptureError(WalstreamError):
    """The log and the source do not fit together: an operator has to decide."""


class DeliveryFailed(CaptureError):
    """The log refused a record, or lost the producer's trust: the generation ends."""

    retryable = True


class GenerationOver(CaptureError):
    """Another capture writes to the same prefix and has opened a later generation; a new one waits for the slot."""

    retryable = True


class LogUnfit(CaptureError):
    """A topic is set up in a way that would lose rows or commit points."""


class LogLost(CaptureError):
    """The log ends before what its own commit points say."""


class SourceForgot(CaptureError):
    """The slot is confirmed beyond what the log holds."""


class HistoryForked(CaptureError):
    """The source is another one, or has gone back: the log holds what it never had."""


class DataLoss(WalstreamError):
    """Rows that a commit point promises cannot be read."""


class RowsMissing(DataLoss):
    """A partition holds fewer or more rows than its commit point says."""


class CorruptCommits(DataLoss):
    """A record of the commits topic cannot be read or contradicts the ones before."""


class FeedError(WalstreamError):
    """The feed cannot give a subscriber what it asks for."""


class LsnNotAvailable(FeedError):
    """The log does not have, or not any more, what a subscriber wants to begin with: it needs a copy of the data."""

    def __init__(self, message: str, hint: str = "", start: int = 0, oldest: int = 0, head: int = 0) -> None:
        super().__init__(message, hint)
        self.start = start
        self.oldest = oldest
        self.head = head

    @classmethod
    def of(cls, start: int, oldest: int, head: int) -> LsnNotAvailable:
        """Say it in the words that clients know; the three are of a type whose text is that of an LSN."""
        return cls(
            f"lsn_not_available: start_lsn={start} older than oldest_lsn={oldest}; "
            f"perform a base snapshot and restart from head_lsn={head}",
            "",
            start,
            oldest,
            head,
        )

    @classmethod
    def beyond(cls, start: int, head: int) -> LsnNotAvailable:
        """Say that a start is so far ahead that it cannot be an LSN of this log."""
        return cls(
            f"lsn_not_available: start_lsn={start} newer than anything that this log can have; head_lsn={head}",
            "It is another log's, or this one was restored from an older copy: begin again from a copy of the data.",
            start,
            0,
            head,
        )


class SubscriberTooSlow(FeedError):
    """A subscriber has taken nothing for so long that its stream was ended; it may come back where it was."""

    retryable = True


class TooManySubscriptions(FeedError):
    """As many streams are open as the feed serves at once."""

    retryable = True


class SubscriberLapsed(FeedError):
    """A subscriber held back more of the log than it may: it lost its place."""


class AckRefused(FeedError):
    """Nobody can have processed what was not sent yet."""


class EntryTooLarge(FeedError):
    """An entry does not fit into a message of the subscriber's channel."""


class EntryDamaged(FeedError):
    """What arrived is not what was sent: a checksum is wrong, or entries are not in their order."""


class OperationUnknown(FeedError):
    """An entry of a newer feed does what this client has no word for: to pass over it would lose it."""


class PipelineError(WalstreamError):
    """The tables cannot follow the log."""


class SchemaIncompatible(PipelineError):
    """The source's new schema cannot be had without losing or inventing values: this table stops, the others go on."""


class KeyMissing(PipelineError):
    """A table without a key cannot have a current state: only its changes can be kept."""


class TableUnfit(PipelineError):
    """The folder holds something else, Delta cannot have such columns, or the table's topic does not tell its rows."""


class TableConflict(PipelineError):
    """Another writer commits to the table all the time."""

    retryable = True


class ForeignLog(PipelineError):
    """The tables were made from another log than the one that they are to follow."""


class SparkFailed(PipelineError):
    """Spark failed for a reason of its own."""

    retryable = True


class WarehouseFailed(PipelineError):
    """A file of the tables, or Delta's log of one, cannot be read or written."""

    retryable = True


class CutExpired(PipelineError):
    """No cut of that moment is kept any more."""


class ValueUnrepresentable(WalstreamError):
    """A value of PostgreSQL that the type of its column in Spark cannot hold."""


class StorageError(WalstreamError):
    """The disk, or what is on it."""


class DirectoryLocked(StorageError):
    """Another process holds the data directory."""


class DirectoryUnusable(StorageError):
    """The data directory cannot be created, read or written."""


class PartitionOffline(StorageError):
    """The partition takes no writes until the cause is mended; reads go on."""

    retryable = True


class DiskFull(PartitionOffline):
    """No space left: writes resume by themselves when there is some."""

    def __init__(self, message: str, hint: str | Callable[[], str] = "") -> None:
        """Make a hint that names free space whenever it is read: the number rises when the reserve is spent."""
        self._make_hint = hint if callable(hint) else None
        super().__init__(message, "" if callable(hint) else hint)

    @property
    def hint(self) -> str:
        """Return what to do about it now."""
        return self._hint if self._make_hint is None else self._make_hint()

    @hint.setter
    def hint(self, hint: str) -> None:
        self._hint = hint


class OutOfFiles(PartitionOffline):
    """No file could be opened: writes resume by themselves when one can."""


class SyncFailed(PartitionOffline):
    """An fsync failed: what it covered is unknown, so the partition waits for a restart."""


class CorruptLog(StorageError):
    """Stored bytes fail their checksum: kept aside and never served."""

    offsets: tuple[int, int] | None = None
    """The range [from, to) that they should hold, where it is known."""
