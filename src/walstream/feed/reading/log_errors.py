"""What the log says, in our words: error codes, lost connections, and how to connect at all.

Owns the translation between aiokafka, Kafka's codes and walstream's errors, as `capture.kafka` does for librdkafka.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from aiokafka.conn import collect_hosts, create_conn
from aiokafka.errors import AuthenticationFailedError, KafkaError

from walstream import errors
from walstream.capture.kafka import LogAddress
from walstream.error_codes import codes
from walstream.errors import ConnectionLost, UnreachableError, WalstreamError

_BY_CODE: Final[dict[int, type[WalstreamError]]] = {
    codes(kind).kafka: kind
    for kind in (
        errors.OffsetOutOfRange,
        errors.CorruptBatch,
        errors.UnknownTopic,
        errors.LeaderNotAvailable,
        errors.NotLeader,
        errors.RequestTimedOut,
        errors.BatchTooLarge,
        errors.NotEnoughReplicas,
        errors.NotEnoughReplicasAfterAppend,
        errors.NotAuthorized,
        errors.ClusterNotAuthorized,
        errors.TopicExists,
        errors.InvalidTopic,
        errors.InvalidTopicConfig,
        errors.NotController,
        errors.PolicyViolation,
        errors.FencedLeaderEpoch,
        errors.UnknownLeaderEpoch,
        errors.OffsetNotAvailable,
        errors.UnknownTopicId,
    )
} | {56: errors.PartitionOffline}
NAMELESS: Final = ("The log cannot be reached.", "Try again.")
"""Where it is, and how it fails, is not for tenants to know."""

STALE: Final = (errors.NotLeader, errors.LeaderNotAvailable, errors.UnknownTopic, errors.UnknownLeaderEpoch)
"""What says that somebody else leads by now."""


def error_of(code: int, what: str) -> WalstreamError:
    """Return an error code of the log as one of our errors."""
    kind = _BY_CODE.get(code, errors.RequestError)
    answer = f"the log answered {kind.__name__ if kind is not errors.RequestError else f'error {code}'}."
    return kind(f"{what}: {answer}").without_names(f"T{answer[1:]}")


def passes(error: WalstreamError) -> bool:
    """Tell whether the same question may be answered a moment later."""
    return error.retryable or isinstance(error, (UnreachableError, *STALE))


def unreachable(bootstrap: str, reason: str) -> UnreachableError:
    """Return the error that the log does not answer."""
    return UnreachableError(
        f"The log at {bootstrap} cannot be reached: {reason}.",
        "Start one with `walstream node start`, or set capture.bootstrap.",
    ).without_names(*NAMELESS)


def unanswered(bootstrap: str) -> UnreachableError:
    """Return the error that nobody who leads a partition answers."""
    return unreachable(bootstrap, "who leads a partition does not answer")


@contextmanager
def translated(bootstrap: str) -> Iterator[None]:
    """Turn errors of aiokafka into ours."""
    try:
        yield
    except (OSError, TimeoutError) as error:
        raise unreachable(bootstrap, _reason(error)) from error
    except KafkaError as error:
        raise ConnectionLost(unreachable(bootstrap, _reason(error)).message).without_names(*NAMELESS) from error


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


def connection_settings(address: LogAddress, timeout_s: float) -> dict[str, Any]:
    """Say in aiokafka's words what the address says in librdkafka's. Raises ConfigError."""
    given = address.security
    settings: dict[str, Any] = {
        "client_id": "walstream-feed",
        "request_timeout_ms": int(timeout_s * 1000),
        "security_protocol": given.get("security.protocol", "PLAINTEXT"),
    }
    if "SSL" in settings["security_protocol"]:
        try:
            context = ssl.create_default_context(cafile=given.get("ssl.ca.location"))
            if "ssl.certificate.location" in given:
                context.load_cert_chain(given["ssl.certificate.location"], given.get("ssl.key.location"))
        except (OSError, ssl.SSLError) as error:
            raise errors.ConfigError(
                f"The certificates for the log cannot be used: {error}.", "capture.security names them."
            ) from error
        settings["ssl_context"] = context
    if "sasl.mechanism" in given:
        settings["sasl_mechanism"] = given["sasl.mechanism"]
        settings["sasl_plain_username"] = given["sasl.username"]
        settings["sasl_plain_password"] = given["sasl.password"]
    return settings


async def try_out(address: LogAddress, settings: Mapping[str, Any]) -> None:
    """Connect once by hand: the client itself only says that it could not. Raises what is really the matter."""
    reason = "no address is given"
    for host, port, _ in collect_hosts(address.bootstrap.split(",")):
        try:
            connection = await create_conn(host, port, **settings)
        except (OSError, KafkaError, TimeoutError) as error:
            if isinstance(error, AuthenticationFailedError) or "uthenti" in str(error):
                raise errors.AuthenticationFailed(f"The log at {host}:{port}: {_reason(error)}.") from error
            reason = _reason(error)
            continue
        await connection.close()
        return
    raise unreachable(address.bootstrap, reason)
