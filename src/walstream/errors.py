"""The one error tree: every failure walstream names.

    WalstreamError
    ├── UsageError                  the caller asked for something that cannot be
    │   └── ConfigError             … in the configuration
    ├── UnreachableError            nobody answers at that address
    │   └── ConnectionLost          … any more: the connection ended in the middle
    ├── UnhealthyError              it answers, and says that it is not well
    ├── RefusedError                security said no
    │   ├── AuthenticationFailed
    │   │   ├── UnsupportedMechanism
    │   │   └── IllegalSaslState
    │   └── NotAuthorized
    │       ├── GroupNotAuthorized
    │       └── ClusterNotAuthorized
    ├── ProtocolError               the peer sent what the protocol does not allow: the connection is closed
    │   ├── MalformedRequest
    │   └── UnsupportedVersion
    ├── RequestError                a well-formed request that cannot be granted: answered with its code
    │   └── … one class per Kafka error code that walstream answers with
    ├── SourceError                 PostgreSQL cannot give what the capture needs
    │   ├── SlotBusy, SlotExists    another process reads the slot now, or has just made it
    │   ├── SlotMissing, SlotLost   nothing remembers what we have not read yet
    │   ├── PublicationMissing      PostgreSQL was not told what to publish
    │   ├── SourceNotReady          a setting or a limit of the server forbids it
    │   ├── TableChanged            a table is not any more what it was when its snapshot was taken
    │   ├── QueryFailed             a statement failed for a reason without a class of its own
    │   └── DecodeError             bytes that no message of PostgreSQL's looks like
    ├── CaptureError                the log and the source do not fit together, or the log cannot take the rows
    │   ├── DeliveryFailed          the log refused a record: the generation ends, a restart opens the next one
    │   ├── GenerationOver          another capture has opened a later generation
    │   ├── LogUnfit                a topic's settings do not allow what the rule needs
    │   ├── LogLost                 the log has lost what it had
    │   ├── SourceForgot            PostgreSQL has forgotten what the log lacks
    │   └── HistoryForked           the log holds what this source never had
    ├── DataLoss                    what commit points promise is not in the log
    │   ├── RowsMissing             a partition holds another number of rows than its point says
    │   └── CorruptCommits          the commit points contradict each other
    └── StorageError                the disk, or what is on it
        ├── DirectoryLocked, DirectoryUnusable
        ├── PartitionOffline        writes refused until the cause is mended, reads go on
        │   ├── DiskFull
        │   └── SyncFailed
        └── CorruptLog              bytes that fail their checksum: quarantined, never served

An error is a sentence with the fact in it, a hint that says what to do, and whether trying again can help.
Assertions are for our bugs; these classes are for the world. All of them pickle, because they cross process
boundaries. How each protocol says them is in `error_codes`.
"""

from __future__ import annotations


class WalstreamError(Exception):
    """The root: a clear sentence, what to do about it, and whether a retry can succeed."""

    retryable = False

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class UsageError(WalstreamError):
    """The command line or an argument cannot be what was given."""


class ConfigError(UsageError):
    """A configuration value is wrong, unknown or contradicts another."""


class UnreachableError(WalstreamError):
    """No server answers at the address."""

    retryable = True


class ConnectionLost(UnreachableError):
    """The server answered, and then the connection ended."""


class UnhealthyError(WalstreamError):
    """The server answers and reports that something in it has failed."""


class RefusedError(WalstreamError):
    """Security refused."""


class AuthenticationFailed(RefusedError):
    """The credentials do not prove who the peer says it is."""


class UnsupportedMechanism(AuthenticationFailed):
    """The SASL mechanism is not offered on this connection."""


class IllegalSaslState(AuthenticationFailed):
    """A step of authentication came when it was not its turn."""


class NotAuthorized(RefusedError):
    """The principal is known but may not do this."""


class GroupNotAuthorized(NotAuthorized):
    """The principal may not do this to the consumer group."""


class ClusterNotAuthorized(NotAuthorized):
    """The principal may not do this to the cluster."""


class ProtocolError(WalstreamError):
    """The peer broke the protocol: answer what can be answered and close the connection."""


class MalformedRequest(ProtocolError):
    """The bytes do not parse as what they claim to be."""


class UnsupportedVersion(ProtocolError):
    """The API or the version of it is not one this node speaks."""


class RequestError(WalstreamError):
    """A well-formed request that cannot be granted."""


class InvalidRequest(RequestError):
    """The fields of the request contradict each other."""


class UnknownTopic(RequestError):
    """No such topic or partition."""

    retryable = True


class UnknownTopicId(RequestError):
    """No topic has this id: deleted, perhaps created again under the same name."""

    retryable = True


class TopicExists(RequestError):
    """A topic of that name is there already."""


class InvalidTopic(RequestError):
    """The name is not a legal topic name."""


class InvalidPartitions(RequestError):
    """The number of partitions is not possible."""


class InvalidReplication(RequestError):
    """The replication factor is larger than the number of nodes."""


class InvalidTopicConfig(RequestError):
    """A topic setting is unknown or its value is not allowed."""


class OffsetOutOfRange(RequestError):
    """The offset lies below the log's start or above its end."""


class CorruptBatch(RequestError):
    """A record batch fails its CRC or its own lengths."""


class InvalidRecord(RequestError):
    """A record batch is intact but breaks a rule of the topic."""


class InvalidTimestamp(RequestError):
    """A record's timestamp is outside what the topic accepts."""


class BatchTooLarge(RequestError):
    """A record batch is larger than the topic's `max.message.bytes`."""


class UnsupportedFormat(RequestError):
    """Message formats before record batch v2 are not accepted."""


class OutOfOrderSequence(RequestError):
    """An idempotent producer's sequence number leaves a gap."""


class InvalidProducerEpoch(RequestError):
    """A newer instance of this producer has taken over."""


class TooManyProducers(RequestError):
    """As many idempotent producers write to the partition as it can remember safely."""

    retryable = True


class FencedLeaderEpoch(RequestError):
    """The client knows an older leader epoch than the node."""

    retryable = True


class UnknownLeaderEpoch(RequestError):
    """The client knows a newer leader epoch than the node."""

    retryable = True


class TransactionsUnsupported(RequestError):
    """Kafka transactions are not offered."""


class PolicyViolation(RequestError):
    """The topic's settings do not allow it."""


class NotEnoughReplicas(RequestError):
    """The topic asks for more in-sync replicas than there are."""

    retryable = True


class InvalidAcks(RequestError):
    """The producer asks for a number of acknowledgements that does not exist."""


class RequestTimedOut(RequestError):
    """The request could not be finished in the time it allowed."""

    retryable = True


class GroupError(RequestError):
    """A consumer group request that cannot be granted now."""


class InvalidGroup(GroupError):
    """The group id is empty or otherwise not allowed."""


class UnknownMember(GroupError):
    """The member is not, or no longer, in the group."""


class IllegalGeneration(GroupError):
    """The member speaks of a generation that has passed."""


class RebalanceInProgress(GroupError):
    """The group is forming a new generation: join again."""

    retryable = True


class InconsistentProtocol(GroupError):
    """The member offers no assignment protocol that the others share."""


class InvalidSessionTimeout(GroupError):
    """The session timeout is outside what the node allows."""


class MemberIdRequired(GroupError):
    """The member must join again with the id it was given."""

    retryable = True


class FencedInstance(GroupError):
    """Another member has taken this static instance id."""


class GroupNotEmpty(GroupError):
    """The group has members, so it cannot be changed from outside."""


class GroupNotFound(GroupError):
    """No such group."""


class GroupSubscribed(GroupError):
    """The group is actively subscribed to the topic."""


class GroupFull(GroupError):
    """The group has as many members as the node allows."""


class CoordinatorLoading(GroupError):
    """The coordinator is still reading its offsets."""

    retryable = True


class CoordinatorUnavailable(GroupError):
    """The node is stopping: ask again for the coordinator."""

    retryable = True


class OffsetMetadataTooLarge(GroupError):
    """The note attached to a committed offset is longer than the node keeps."""


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
