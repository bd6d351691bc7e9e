"""The commands' way to a node: librdkafka with the address and security of the flags, and its errors in our words.

Owns nothing but the translation: every KafkaException that leaves here is one of walstream's errors, with a sentence, a
hint and an exit code. librdkafka writes its own lines about lost connections to stderr; they are kept instead, and the
last one becomes the reason in the error that the user sees.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ClusterMetadata, OffsetSpec

from walstream import errors
from walstream.errors import WalstreamError

T = TypeVar("T")

EARLIEST: OffsetSpec = cast(OffsetSpec, OffsetSpec.earliest())
LATEST: OffsetSpec = cast(OffsetSpec, OffsetSpec.latest())

_UNREACHABLE = {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE, KafkaError._TIMED_OUT}
_UNREACHABLE |= {KafkaError._MSG_TIMED_OUT}
_REFUSED = {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError.UNSUPPORTED_SASL_MECHANISM}

_BY_CODE: dict[int, type[WalstreamError]] = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: errors.NotAuthorized,
    KafkaError.GROUP_AUTHORIZATION_FAILED: errors.NotAuthorized,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: errors.NotAuthorized,
    KafkaError.UNKNOWN_TOPIC_OR_PART: errors.UnknownTopic,
    KafkaError._UNKNOWN_TOPIC: errors.UnknownTopic,
    KafkaError._UNKNOWN_PARTITION: errors.UnknownTopic,
    KafkaError.TOPIC_ALREADY_EXISTS: errors.TopicExists,
    KafkaError.TOPIC_EXCEPTION: errors.InvalidTopic,
    KafkaError.INVALID_PARTITIONS: errors.InvalidPartitions,
    KafkaError.INVALID_REPLICATION_FACTOR: errors.InvalidReplication,
    KafkaError.INVALID_CONFIG: errors.InvalidTopicConfig,
    KafkaError.MSG_SIZE_TOO_LARGE: errors.BatchTooLarge,
    KafkaError.INVALID_RECORD: errors.InvalidRecord,
    KafkaError.INVALID_TIMESTAMP: errors.InvalidTimestamp,
    KafkaError.OFFSET_OUT_OF_RANGE: errors.OffsetOutOfRange,
    KafkaError._AUTO_OFFSET_RESET: errors.OffsetOutOfRange,
    KafkaError.GROUP_ID_NOT_FOUND: errors.GroupNotFound,
    KafkaError.NON_EMPTY_GROUP: errors.GroupNotEmpty,
    KafkaError.UNKNOWN_MEMBER_ID: errors.GroupNotEmpty,
    KafkaError.INVALID_GROUP_ID: errors.InvalidGroup,
    KafkaError.KAFKA_STORAGE_ERROR: errors.PartitionOffline,
}

_HINTS: dict[type[WalstreamError], str] = {
    errors.UnknownTopic: "`walstream topic list` shows the topics there are.",
    errors.GroupNotFound: "`walstream group list` shows the groups there are.",
    errors.GroupNotEmpty: "Stop the group's consumers first: an active group moves its own offsets.",
    errors.InvalidTimestamp: "Times are milliseconds since 1970. Fix the clock, or raise the topic's "
    "message.timestamp.after.max.ms or message.timestamp.before.max.ms.",
    errors.InvalidRecord: "A compacted topic takes only records with a key: give --key or --key-separator.",
    errors.NotAuthorized: "Ask for a rule in [[security.acls]] that allows it, or connect as another --user.",
    errors.AuthenticationFailed: "Check --user, the password and --mechanism; PLAIN works only over --tls.",
    errors.PartitionOffline: "`walstream status` tells why.",
}


@dataclass
class Client:
    """A way to one cluster. Connections are made when they are first needed."""

    bootstrap: str
    security: dict[str, Any] = field(default_factory=dict, repr=False)
    timeout_ms: int = 10_000
    verbose: bool = False
    _reason: str = ""
    _is_reached: bool = False
    _admin: AdminClient | None = None

    @property
    def timeout_s(self) -> float:
        """Return the timeout as librdkafka's calls take it."""
        return self.timeout_ms / 1000

    def admin(self) -> AdminClient:
        """Return the connection for everything that is not records."""
        if self._admin is None:
            self._reach()
            self._admin = AdminClient(self._settings(), logger=self._logger())
        return self._admin

    def producer(self, **settings: Any) -> Producer:
        """Return a producer; keyword `linger_ms` is librdkafka's `linger.ms`."""
        self._reach()
        return Producer(self._settings(settings), logger=self._logger())

    def consumer(self, **settings: Any) -> Consumer:
        """Return a consumer that reads what it is assigned, commits nothing and joins no group."""
        # librdkafka wants a group name even so; no group of that name comes to be.
        given = {"group_id": "walstream-cli", "enable_auto_commit": False, **settings}
        return Consumer(self._settings(given), logger=self._logger())

    def wait(self, future: Future[T], what: str = "") -> T:
        """Return what the node answers, or raise the error it answered with; `what` names the thing asked about."""
        with self.translated(what):
            # librdkafka has its own timeout and says more when it ends by that one.
            return future.result(self.timeout_s + 5)

    def metadata(self, topic: str | None = None) -> ClusterMetadata:
        """Return topics, partitions and nodes; asking for one topic that does not exist is an error."""
        with self.translated(f"topic {topic}" if topic else ""):
            found = self.admin().list_topics(timeout=self.timeout_s)
        if topic is not None and topic not in found.topics:
            raise errors.UnknownTopic(f"There is no topic {topic}.", _HINTS[errors.UnknownTopic])
        return found

    def partitions(self, topic: str) -> list[int]:
        """Return the partitions of a topic."""
        return sorted(self.metadata(topic).topics[topic].partitions)

    def offsets(self, wanted: dict[tuple[str, int], OffsetSpec]) -> dict[tuple[str, int], int]:
        """Return an offset per partition, asked for all at once; -1 where a timestamp is after the last record."""
        if not wanted:
            return {}
        request = {TopicPartition(topic, index): spec for (topic, index), spec in wanted.items()}
        futures = self.admin().list_offsets(request, request_timeout=self.timeout_s)
        return {
            (at.topic, at.partition): self.wait(future, f"{at.topic}-{at.partition}").offset
            for at, future in futures.items()
        }

    def bounds(self, partitions: list[tuple[str, int]]) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the first offset and the end of each partition."""
        starts = self.offsets(dict.fromkeys(partitions, EARLIEST))
        ends = self.offsets(dict.fromkeys(partitions, LATEST))
        return {at: (starts[at], ends[at]) for at in partitions}

    @contextmanager
    def translated(self, what: str = "") -> Iterator[None]:
        """Turn librdkafka's exceptions into ours."""
        try:
            yield
        except KafkaException as error:
            if self._admin is not None:
                # Only a poll delivers the reason that librdkafka has noted.
                self._admin.poll(0)
            raise self.translate(error.args[0], what) from None
        except TimeoutError:
            raise self._unreachable("no answer in time") from None

    def translate(self, error: Any, what: str = "") -> WalstreamError:
        """Return our error for one of librdkafka's."""
        if not isinstance(error, KafkaError):
            return errors.UsageError(f"{error}.")
        code, sentence = error.code(), _sentence(error)
        if what and what.split()[-1] not in sentence:
            sentence = f"{what}: {sentence}"
        if "uthentication" in self._reason and code in _UNREACHABLE | _REFUSED:
            return errors.AuthenticationFailed(
                f"The node at {self.bootstrap} refused the credentials.", _HINTS[errors.AuthenticationFailed]
            )
        if code in _REFUSED:
            return errors.AuthenticationFailed(sentence, _HINTS[errors.AuthenticationFailed])
        if code in _UNREACHABLE:
            lost = "the connection was closed" if code == KafkaError._TRANSPORT else "no answer in time"
            return self._unreachable(self._reason or lost)
        kind = _BY_CODE.get(code, WalstreamError)
        return kind(sentence, _HINTS.get(kind, ""))

    def _reach(self) -> None:
        """Fail at once when no address takes a connection: librdkafka would try again until the timeout."""
        if self._is_reached:
            return
        reason = "it is no address"
        for address in self.bootstrap.split(","):
            host, _, port = address.strip().rpartition(":")
            try:
                with socket.create_connection((host.strip("[]"), int(port)), timeout=self.timeout_s):
                    self._is_reached = True
                    return
            except ValueError:
                raise errors.UsageError(f"{address!r} is no address.", "Write it as host:port.") from None
            except OSError as error:
                reason = error.strerror or str(error)
        raise self._unreachable(reason)

    def _unreachable(self, reason: str) -> WalstreamError:
        if "SSL" in reason:
            return errors.UnreachableError(
                f"TLS with the node at {self.bootstrap} failed: {reason.rsplit(':', 1)[-1].strip()}.",
                "--tls-ca FILE names the authority that signed the node's certificate.",
            )
        if self._is_reached:
            return errors.UnreachableError(
                f"Something listens at {self.bootstrap} but does not answer: {reason}.",
                "A node may want TLS (--tls-ca) or to know who asks (--user); others may speak another protocol.",
            )
        return errors.UnreachableError(
            f"No node answers at {self.bootstrap}: {reason}.",
            "Start one with `walstream node start`, or name another with --bootstrap HOST:PORT.",
        )

    def _settings(self, more: dict[str, Any] | None = None) -> dict[str, Any]:
        own = {key.replace("_", "."): value for key, value in (more or {}).items()}
        return {
            "bootstrap.servers": self.bootstrap,
            "client.id": "walstream-cli",
            "socket.timeout.ms": self.timeout_ms,
            "socket.connection.setup.timeout.ms": max(1_000, self.timeout_ms),
            "reconnect.backoff.max.ms": 1_000,
            "error_cb": self._remember,
            "log_level": 7 if self.verbose else 3,
            **self.security,
            **own,
        }

    def _remember(self, error: KafkaError) -> None:
        if error.code() in _UNREACHABLE | _REFUSED and error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._reason = _reason_of(error.str())

    def _logger(self) -> logging.Logger:
        logger = logging.getLogger("librdkafka")
        logger.setLevel(logging.DEBUG if self.verbose else logging.CRITICAL)
        return logger


def _sentence(error: KafkaError) -> str:
    text = error.str().removeprefix("Broker: ").strip() or error.name()
    return text if text.endswith(".") else f"{text}."


def _reason_of(text: str) -> str:
    """Return the telling part of `host:1/bootstrap: Connect to ipv4#… failed: Connection refused (after …)`."""
    return text.split(" (after ")[0].rsplit("failed: ", 1)[-1].rsplit("/bootstrap: ", 1)[-1].strip().rstrip(".")
