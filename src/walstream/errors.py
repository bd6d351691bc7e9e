"""The one error tree: every failure walstream names, and how each protocol says it.

    WalstreamError
    ├── UsageError                  the caller asked for something that cannot be
    │   └── ConfigError             … in the configuration
    ├── UnreachableError            nobody answers at that address
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
    └── StorageError                the disk, or what is on it
        ├── DirectoryLocked, DirectoryUnusable
        ├── PartitionOffline        writes refused until the cause is mended, reads go on
        │   ├── DiskFull
        │   └── SyncFailed
        └── CorruptLog              bytes that fail their checksum: quarantined, never served

An error is a sentence with the fact in it, a hint that says what to do, and whether trying again can help.
Assertions are for our bugs; these classes are for the world. All of them pickle, because they cross process
boundaries. The table at the end maps each class to a Kafka error code, a gRPC status and an exit code; a
class without a row of its own takes its parent's.
"""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Codes:
    """How one class of errors is said in each protocol."""

    kafka: int
    grpc: str
    exit: int


UNKNOWN = Codes(kafka=-1, grpc="UNKNOWN", exit=1)

_TABLE: dict[type[WalstreamError], Codes] = {
    WalstreamError: UNKNOWN,
    UsageError: Codes(42, "INVALID_ARGUMENT", 2),
    ConfigError: Codes(40, "INVALID_ARGUMENT", 2),
    UnreachableError: Codes(8, "UNAVAILABLE", 3),
    UnhealthyError: Codes(-1, "FAILED_PRECONDITION", 4),
    RefusedError: Codes(31, "PERMISSION_DENIED", 5),
    AuthenticationFailed: Codes(58, "UNAUTHENTICATED", 5),
    UnsupportedMechanism: Codes(33, "UNAUTHENTICATED", 5),
    IllegalSaslState: Codes(34, "UNAUTHENTICATED", 5),
    NotAuthorized: Codes(29, "PERMISSION_DENIED", 5),
    GroupNotAuthorized: Codes(30, "PERMISSION_DENIED", 5),
    ClusterNotAuthorized: Codes(31, "PERMISSION_DENIED", 5),
    ProtocolError: Codes(42, "INVALID_ARGUMENT", 1),
    UnsupportedVersion: Codes(35, "UNIMPLEMENTED", 1),
    RequestError: Codes(42, "INVALID_ARGUMENT", 1),
    UnknownTopic: Codes(3, "NOT_FOUND", 1),
    UnknownTopicId: Codes(100, "NOT_FOUND", 1),
    TopicExists: Codes(36, "ALREADY_EXISTS", 1),
    InvalidTopic: Codes(17, "INVALID_ARGUMENT", 1),
    InvalidPartitions: Codes(37, "INVALID_ARGUMENT", 1),
    InvalidReplication: Codes(38, "INVALID_ARGUMENT", 1),
    InvalidTopicConfig: Codes(40, "INVALID_ARGUMENT", 1),
    OffsetOutOfRange: Codes(1, "OUT_OF_RANGE", 1),
    CorruptBatch: Codes(2, "DATA_LOSS", 1),
    InvalidRecord: Codes(87, "INVALID_ARGUMENT", 1),
    InvalidTimestamp: Codes(32, "INVALID_ARGUMENT", 1),
    BatchTooLarge: Codes(10, "INVALID_ARGUMENT", 1),
    UnsupportedFormat: Codes(43, "INVALID_ARGUMENT", 1),
    OutOfOrderSequence: Codes(45, "FAILED_PRECONDITION", 1),
    InvalidProducerEpoch: Codes(47, "FAILED_PRECONDITION", 1),
    TooManyProducers: Codes(89, "RESOURCE_EXHAUSTED", 1),
    FencedLeaderEpoch: Codes(74, "FAILED_PRECONDITION", 1),
    UnknownLeaderEpoch: Codes(75, "FAILED_PRECONDITION", 1),
    TransactionsUnsupported: Codes(35, "UNIMPLEMENTED", 1),
    PolicyViolation: Codes(44, "FAILED_PRECONDITION", 1),
    NotEnoughReplicas: Codes(19, "FAILED_PRECONDITION", 1),
    InvalidAcks: Codes(21, "INVALID_ARGUMENT", 1),
    RequestTimedOut: Codes(7, "DEADLINE_EXCEEDED", 1),
    InvalidGroup: Codes(24, "INVALID_ARGUMENT", 1),
    UnknownMember: Codes(25, "FAILED_PRECONDITION", 1),
    IllegalGeneration: Codes(22, "FAILED_PRECONDITION", 1),
    RebalanceInProgress: Codes(27, "FAILED_PRECONDITION", 1),
    InconsistentProtocol: Codes(23, "FAILED_PRECONDITION", 1),
    InvalidSessionTimeout: Codes(26, "INVALID_ARGUMENT", 1),
    MemberIdRequired: Codes(79, "FAILED_PRECONDITION", 1),
    FencedInstance: Codes(82, "FAILED_PRECONDITION", 1),
    GroupNotEmpty: Codes(68, "FAILED_PRECONDITION", 1),
    GroupNotFound: Codes(69, "NOT_FOUND", 1),
    GroupSubscribed: Codes(86, "FAILED_PRECONDITION", 1),
    GroupFull: Codes(81, "RESOURCE_EXHAUSTED", 1),
    CoordinatorLoading: Codes(14, "UNAVAILABLE", 1),
    CoordinatorUnavailable: Codes(15, "UNAVAILABLE", 1),
    OffsetMetadataTooLarge: Codes(12, "INVALID_ARGUMENT", 1),
    StorageError: Codes(56, "INTERNAL", 4),
    DirectoryLocked: Codes(56, "FAILED_PRECONDITION", 5),
    DirectoryUnusable: Codes(56, "FAILED_PRECONDITION", 5),
    CorruptLog: Codes(2, "DATA_LOSS", 4),
}


def codes(error: BaseException | type[BaseException]) -> Codes:
    """Return how the protocols say this error: the row of its class or of the nearest parent with one."""
    kind = error if isinstance(error, type) else type(error)
    for parent in kind.__mro__:
        if issubclass(parent, WalstreamError) and parent in _TABLE:
            return _TABLE[parent]
    return UNKNOWN
