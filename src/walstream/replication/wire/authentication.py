"""Proofs that both ends of a link know the cluster's secret, without saying it.

Each proof is an HMAC-SHA256 with the secret over a label of the side and everything that was said before: the leader's
handshake and HELLO, the follower's CHALLENGE. These name both nodes, the cluster, both lives (incarnations) and
features, and hold a nonce of each side. So a proof is good for one link between two nodes, in one direction: replayed,
reflected or carried over to another node it proves nothing, and nobody in the middle can talk two peers into fewer
features.

The secret proves who is there; it does not hide or protect what follows. Where the network is not trusted, use TLS.
Secret and nonces enter as arguments; a nonce must never be used twice.
"""

from __future__ import annotations

import hmac
from enum import IntEnum
from typing import Final

from walstream.errors import AuthenticationFailed

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32

LEADER_LABEL: Final = b"walstream replication 2 leader\0"
FOLLOWER_LABEL: Final = b"walstream replication 2 follower\0"


class Authentication(IntEnum):
    """How the two ends of a link know each other; both must want the same."""

    NONE = 0
    """Not at all: on a loopback or a network that lets nobody else in."""
    SECRET = 1
    """By a secret that all nodes of the cluster share."""
    TLS = 2
    """By certificates on both sides, which the shell has checked before the first byte comes here."""


def prove(authentication: Authentication, secret: bytes, label: bytes, transcript: bytes) -> bytes:
    """Return the proof of the side with this label; empty where no secret is asked for."""
    if authentication is not Authentication.SECRET:
        return b""
    assert secret, "a proof without a secret"
    return hmac.digest(secret, label + transcript, "sha256")


def verify(authentication: Authentication, secret: bytes, label: bytes, transcript: bytes, proof: bytes) -> None:
    """Compare a peer's proof, in a time that tells nothing. Raises AuthenticationFailed."""
    if not hmac.compare_digest(prove(authentication, secret, label, transcript), proof):
        raise AuthenticationFailed(
            "The peer does not know the cluster's secret.", "Give all nodes the same secret, and restart them."
        )
