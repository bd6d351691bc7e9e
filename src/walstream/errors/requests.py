"""What a Kafka client is answered with: one class per error code that walstream gives."""

from __future__ import annotations

from walstream.errors.base import WalstreamError


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


class NotEnoughReplicasAfterAppend(RequestError):
    """The batch is in the leader's log, and too few replicas were in sync to keep it."""

    retryable = True


class NotLeader(RequestError):
    """Another node leads the partition, or nobody does for now: ask again who."""

    retryable = True


class LeaderNotAvailable(RequestError):
    """Nobody leads the partition for now."""

    retryable = True


class NotController(RequestError):
    """Topics are changed by another node: ask again who the controller is."""

    retryable = True


class OffsetNotAvailable(RequestError):
    """A leader that is new does not know yet how far its followers had come."""

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


class NotCoordinator(GroupError):
    """Another node keeps the consumer groups: ask again which."""

    retryable = True


class InvalidCommitSize(GroupError):
    """A commit is larger than the topic of the offsets takes."""


class OffsetMetadataTooLarge(GroupError):
    """The note attached to a committed offset is longer than the node keeps."""
