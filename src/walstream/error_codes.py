"""How each protocol says an error: a Kafka error code, a gRPC status, an exit code.

One table over the tree of `errors`; a class without a row of its own takes its parent's.
"""

from __future__ import annotations

from dataclasses import dataclass

from walstream.errors import (
    AuthenticationFailed,
    BatchTooLarge,
    CaptureError,
    ClusterNotAuthorized,
    ConfigError,
    CoordinatorLoading,
    CoordinatorUnavailable,
    CorruptBatch,
    CorruptLog,
    DataLoss,
    DecodeError,
    DeliveryFailed,
    DirectoryLocked,
    DirectoryUnusable,
    FencedInstance,
    FencedLeaderEpoch,
    GroupFull,
    GroupNotAuthorized,
    GroupNotEmpty,
    GroupNotFound,
    GroupSubscribed,
    IllegalGeneration,
    IllegalSaslState,
    InconsistentProtocol,
    InvalidAcks,
    InvalidGroup,
    InvalidPartitions,
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidReplication,
    InvalidSessionTimeout,
    InvalidTimestamp,
    InvalidTopic,
    InvalidTopicConfig,
    MemberIdRequired,
    NotAuthorized,
    NotEnoughReplicas,
    OffsetMetadataTooLarge,
    OffsetOutOfRange,
    OutOfOrderSequence,
    PolicyViolation,
    ProtocolError,
    QueryFailed,
    RebalanceInProgress,
    RefusedError,
    RequestError,
    RequestTimedOut,
    SlotBusy,
    SlotExists,
    SourceError,
    StorageError,
    TableChanged,
    TooManyProducers,
    TopicExists,
    TransactionsUnsupported,
    UnhealthyError,
    UnknownLeaderEpoch,
    UnknownMember,
    UnknownTopic,
    UnknownTopicId,
    UnreachableError,
    UnsupportedFormat,
    UnsupportedMechanism,
    UnsupportedVersion,
    UsageError,
    WalstreamError,
)


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
    SourceError: Codes(-1, "FAILED_PRECONDITION", 5),
    SlotBusy: Codes(-1, "UNAVAILABLE", 1),
    SlotExists: Codes(-1, "ALREADY_EXISTS", 1),
    TableChanged: Codes(-1, "ABORTED", 1),
    QueryFailed: Codes(-1, "INTERNAL", 1),
    DecodeError: Codes(-1, "DATA_LOSS", 5),
    CaptureError: Codes(-1, "FAILED_PRECONDITION", 5),
    DeliveryFailed: Codes(-1, "UNAVAILABLE", 1),
    DataLoss: Codes(-1, "DATA_LOSS", 4),
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
