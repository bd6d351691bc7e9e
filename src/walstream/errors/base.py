"""The root of the tree, and what can happen to every stage: wrong use, nobody there, refused, not the protocol."""

from __future__ import annotations

from typing import Self


class WalstreamError(Exception):
    """The root: a clear sentence, what to do about it, and whether a retry can succeed."""

    retryable = False
    nameless: WalstreamError | None = None
    """The same for those who may not know the names in it; None: nobody has said how that would be put."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def without_names(self, message: str, hint: str = "") -> Self:
        """Say how to put it to those who may not know the names in it."""
        self.nameless = type(self)(message, hint)
        return self

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


class TokenExpired(AuthenticationFailed):
    """The token was good and its time is over: the same call with a newer one can succeed."""


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
