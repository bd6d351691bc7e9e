"""Who a subscriber is: what a token that has been verified says, what that allows, and for how long.

Owns the meaning of claims: the times, the subject, the role and its tenant. Signature, audience and issuer were checked
before, in `auth`. Sans-IO: the time enters as a number.

The invariant: an identity of the role `replication` has exactly one tenant and reads no other, and a session never
outlives the tokens that were shown for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from walstream.config import FeedAuthConfig
from walstream.errors import AuthenticationFailed, NotAuthorized, TokenExpired

Role = Literal["replication", "admin"]

NAME_CHARACTERS_MAX: Final = 255
"""Of a subject or a token's id: they are kept for each subscriber, logged and used as labels."""

TENANT_CHARACTERS_MAX: Final = 1024
"""Of a tenant: as long as the log has them."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a token, for as long as the token counts."""

    subject: str
    role: Role
    tenant: str
    """The one tenant of the role `replication`; empty for an admin."""

    expires_at_s: float
    """When the token ceases to count, in seconds since 1970: its `exp`, and the skew that is allowed."""

    token_id: str = ""
    """The token's `jti`, for the log; empty when it has none."""

    def may_read(self, tenant_filter: str) -> str:
        """Return the tenant that a filter of this subscriber means, empty for all, or raise NotAuthorized."""
        if self.role == "admin":
            return tenant_filter
        if tenant_filter not in ("", self.tenant):
            raise NotAuthorized(
                "The token does not allow this tenant to be read.",
                "An empty tenant filter reads the token's own tenant; others need the role admin.",
            )
        return self.tenant

    def is_same_as(self, other: Identity) -> bool:
        """Say whether both are the same subscriber with the same rights."""
        return (self.subject, self.role, self.tenant) == (other.subject, other.role, other.tenant)


class Session:
    """A running stream's right to go on: it ends with its token, unless a newer one of the same holder is shown."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity

    def renew(self, identity: Identity) -> None:
        """Go on for as long as this identity counts, too; raise NotAuthorized when it is another's."""
        if not self.identity.is_same_as(identity):
            raise NotAuthorized(
                "The token belongs to another subscriber, or has another role or tenant, than the stream's.",
                "Renew it with a token of the same subject, role and tenant; other rights need a new stream.",
            )
        # A client with several tokens at hand may show the older one last.
        if identity.expires_at_s > self.identity.expires_at_s:
            self.identity = identity

    def is_over(self, now_s: float) -> bool:
        """Say whether the stream has to end."""
        return now_s >= self.identity.expires_at_s

    def check(self, now_s: float) -> None:
        """Raise TokenExpired when the stream has to end."""
        if self.is_over(now_s):
            raise TokenExpired(
                "The token of this stream has expired.",
                "Subscribe again with a new one; a stream goes on when Ack is called with a newer token in time.",
            )


def identify(claims: Mapping[str, Any], config: FeedAuthConfig, now_s: float) -> Identity:
    """Return whom the claims of a verified token name; raise AuthenticationFailed, or NotAuthorized without rights."""
    expires_at_s = _time(claims, "exp", config.clock_skew_s)
    if expires_at_s is None:
        raise AuthenticationFailed("The token has no end (exp).", "Tokens that never expire are not accepted.")
    if now_s >= expires_at_s:
        raise TokenExpired("The token has expired.", "Get a new one.")
    for name in ("nbf", "iat"):
        begins_at_s = _time(claims, name, -config.clock_skew_s)
        if begins_at_s is not None and now_s < begins_at_s:
            raise AuthenticationFailed(
                f"The token does not count yet ({name}).", "Wait, or compare the clock here with the issuer's."
            )
    subject = _name(claims, "sub")
    if not subject:
        raise AuthenticationFailed("The token names nobody (sub).", "It needs a subject.")
    token_id = _name(claims, "jti")
    role = _role(claims, config)
    return Identity(subject, role, _tenant(claims, config, role), expires_at_s, token_id)


def _time(claims: Mapping[str, Any], name: str, skew_s: float) -> float | None:
    """Return the time in a claim, moved by the skew; None when there is no such claim."""
    value = claims.get(name)
    if value is None:
        return None
    # `exp` as text, as a truth value or as a number without end is a mistake of the issuer, not a date.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**53:
        raise AuthenticationFailed(f"The token's {name} is no time.", "Times are numbers of seconds since 1970.")
    return value + skew_s


def _name(claims: Mapping[str, Any], claim: str, characters_max: int = NAME_CHARACTERS_MAX) -> str:
    """Return the text in a claim, empty when there is none."""
    value = claims.get(claim)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > characters_max or not value.isprintable():
        raise AuthenticationFailed(
            f"The token's {claim} cannot be used.", f"It has to be a text of up to {characters_max:,} characters."
        )
    return value


def _role(claims: Mapping[str, Any], config: FeedAuthConfig) -> Role:
    match claims.get(config.role_claim):
        case "admin":
            return "admin"
        case "replication":
            return "replication"
    raise NotAuthorized(
        "The token has no role that the feed knows.",
        f"Its claim {config.role_claim!r} has to be replication or admin.",
    )


def _tenant(claims: Mapping[str, Any], config: FeedAuthConfig, role: Role) -> str:
    if role == "admin":
        return ""
    tenant = _name(claims, config.tenant_claim, TENANT_CHARACTERS_MAX)
    if not tenant:
        raise NotAuthorized(
            "The token has the role replication and no tenant.",
            f"Its claim {config.tenant_claim!r} has to name the one tenant that it may read.",
        )
    return tenant
