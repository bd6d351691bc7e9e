"""The way to the log: librdkafka's clients with capture's address and security, and its errors in our words.

Owns the translation and the settings that all clients share; refuses to know what is written. Every KafkaException that
leaves here is one of walstream's errors. librdkafka's own lines about lost connections do not go to stderr: the last
one is the reason in the error that the user sees.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from walstream import errors
from walstream.config import CaptureConfig
from walstream.errors import WalstreamError

T = TypeVar("T")

TIMEOUT_S: Final = 10.0

UNREACHABLE: Final = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._MSG_TIMED_OUT,
        KafkaError.REQUEST_TIMED_OUT,
    }
)
OF_GROUPS: Final = frozenset({KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.COORDINATOR_NOT_AVAILABLE})
"""librdkafka asks who coordinates its group; who reads by offsets has no use for one, and perhaps no right to it."""

_BY_CODE: Final[dict[int, type[WalstreamError]]] = {
    KafkaError._AUTHENTICATION: errors.AuthenticationFailed,
    KafkaError.SASL_AUTHENTICATION_FAILED: errors.AuthenticationFailed,
    KafkaError.UNSUPPORTED_SASL_MECHANISM: errors.AuthenticationFailed,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: errors.NotAuthorized,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: errors.NotAuthorized,
    KafkaError.UNKNOWN_TOPIC_OR_PART: errors.UnknownTopic,
    KafkaError._UNKNOWN_TOPIC: errors.UnknownTopic,
    KafkaError._UNKNOWN_PARTITION: errors.UnknownTopic,
    KafkaError.TOPIC_ALREADY_EXISTS: errors.TopicExists,
    KafkaError.TOPIC_EXCEPTION: errors.InvalidTopic,
    KafkaError.INVALID_CONFIG: errors.InvalidTopicConfig,
    KafkaError.MSG_SIZE_TOO_LARGE: errors.BatchTooLarge,
    KafkaError.OFFSET_OUT_OF_RANGE: errors.OffsetOutOfRange,
    KafkaError._AUTO_OFFSET_RESET: errors.OffsetOutOfRange,
    KafkaError.KAFKA_STORAGE_ERROR: errors.PartitionOffline,
}

_INVALID_TIMESTAMP: Final = KafkaError(KafkaError.INVALID_TIMESTAMP).str().removeprefix("Broker: ")
_CLOCK_AHEAD: Final = (
    "The clock of PostgreSQL, or of this machine, is ahead of the log's by more than message.timestamp.after.max.ms of "
    "the topic. Fix the clock, or let the leader give the times: "
    "walstream topic alter TOPIC --set message.timestamp.type=LogAppendTime"
)


@dataclass(frozen=True)
class LogAddress:
    """Where the log is and how to prove who we are; makes clients."""

    bootstrap: str
    security: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, config: CaptureConfig, environ: Mapping[str, str] | None = None) -> LogAddress:
        """Take it from the configuration; the password is in the environment. Raises ConfigError."""
        given, environ = config.security, os.environ if environ is None else environ
        is_tls = bool(given.tls or given.tls_ca or given.tls_certificate)
        security: dict[str, str] = {}
        if is_tls or given.user:
            security["security.protocol"] = ("SASL_" if given.user else "") + ("SSL" if is_tls else "PLAINTEXT")
        if given.user:
            if given.password_env not in environ:
                raise errors.ConfigError(
                    f"The environment has no variable {given.password_env}, which is to hold the password of the log.",
                    "capture.security.password_env names it.",
                )
            security["sasl.mechanism"] = given.mechanism
            security["sasl.username"] = given.user
            security["sasl.password"] = environ[given.password_env]
        files = {
            "ssl.ca.location": given.tls_ca,
            "ssl.certificate.location": given.tls_certificate,
            "ssl.key.location": given.tls_key,
        }
        return cls(config.bootstrap, security | {name: file for name, file in files.items() if file})

    def admin(self) -> AdminClient:
        """Return a client for topics and offsets; keep it until its answers are there."""
        return AdminClient(self._settings({}), logger=_quiet())

    def producer(self, settings: Mapping[str, Any]) -> Producer:
        """Return a producer."""
        return Producer(self._settings(settings), logger=_quiet())

    def consumer(self, settings: Mapping[str, Any] | None = None) -> Consumer:
        """Return a consumer that reads what it is assigned, commits nothing and joins no group."""
        # librdkafka wants a group name even so; no group of that name comes to be.
        own = {
            "group.id": "walstream-capture",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            **(settings or {}),
        }
        return Consumer(self._settings(own), logger=_quiet())

    def wait(self, future: Future[T], what: str = "") -> T:
        """Return what the log answers, or raise the error it answered with."""
        with self.translated(what):
            # librdkafka has a timeout of its own and says more when it ends by that one.
            return future.result(TIMEOUT_S + 5)

    @contextmanager
    def translated(self, what: str = "") -> Iterator[None]:
        """Turn librdkafka's errors into ours."""
        try:
            yield
        except KafkaException as error:
            raise self.error(error.args[0], what) from None
        except TimeoutError:
            raise errors.UnreachableError(f"The log at {self.bootstrap} did not answer in time.") from None

    def error(self, error: KafkaError, what: str = "") -> WalstreamError:
        """Return an error of librdkafka as one of ours."""
        code, text = error.code(), error.str().removeprefix("Broker: ").strip() or error.name()
        sentence = f"{what}: {text}".lstrip(": ").rstrip(".") + "."
        if code in UNREACHABLE:
            return errors.UnreachableError(
                f"The log at {self.bootstrap} cannot be reached: {text.rstrip('.')}.",
                "Start one with `walstream node start`, or set capture.bootstrap.",
            )
        # A producer without gaps may report the refusal first as a fatal error, which has the cause in its text alone.
        if code == KafkaError.INVALID_TIMESTAMP or _INVALID_TIMESTAMP in text:
            return errors.DeliveryFailed(sentence, _CLOCK_AHEAD)
        return _BY_CODE.get(code, errors.DeliveryFailed)(sentence)

    def _settings(self, more: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.bootstrap,
            "client.id": "walstream-capture",
            "socket.timeout.ms": int(TIMEOUT_S * 1000),
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 1_000,
            "retry.backoff.ms": 20,
            "retry.backoff.max.ms": 1_000,
            "topic.metadata.refresh.interval.ms": 60_000,
            "log_level": 3,
            **self.security,
            **more,
        }


def _quiet() -> logging.Logger:
    logger = logging.getLogger("librdkafka")
    logger.setLevel(logging.CRITICAL)
    return logger
