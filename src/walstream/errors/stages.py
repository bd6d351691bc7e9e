"""What befalls a stage: the source, the capture, the log's promises, the pipeline, the disk."""

from __future__ import annotations

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


class PipelineError(WalstreamError):
    """The tables cannot follow the log."""


class SchemaIncompatible(PipelineError):
    """The source's new schema cannot be had without losing or inventing values: this table stops, the others go on."""


class KeyMissing(PipelineError):
    """A table without a key cannot have a current state: only its changes can be kept."""


class TableUnfit(PipelineError):
    """The folder of a table holds something else, or its columns cannot be those of a Delta table."""


class TableConflict(PipelineError):
    """Another writer commits to the table all the time."""

    retryable = True


class SparkFailed(PipelineError):
    """Spark failed for a reason of its own."""

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


class SyncFailed(PartitionOffline):
    """An fsync failed: what it covered is unknown, so the partition waits for a restart."""


class CorruptLog(StorageError):
    """Stored bytes fail their checksum: kept aside and never served."""
