"""The handshake of version 2, from the eleven bytes of version 1 to the first frame about a partition.

    leader → follower   HANDSHAKE (version 2), and behind it HELLO: length u16 |
                        cluster String | follower u64 | incarnation u64 | features u32 | authentication u8 | nonce 32
    follower → leader   HANDSHAKE_ACK, status OK: it speaks version 2; then, as frames like all that follow:
    follower → leader   CHALLENGE  cluster String | node u64 | incarnation u64 | features u32 | authentication u8
                                   | nonce 32 | credit window u64 | largest frame u32
    leader → follower   PROOF      u8 length | proof
    follower → leader   PROOF      u8 length | proof

With the follower's proof the link is up for the leader; for the follower it is when the leader's is right. Status
ERROR says one thing only: that the follower does not speak this version. Whatever else is wrong (another cluster,
another node, no proof) is a FAILURE after status OK, so that a leader never falls back to version 1 because of it.

The features of the CHALLENGE are those of the HELLO that the follower has too. Bytes behind the last field of a HELLO
or CHALLENGE are for later versions, and are passed over; the proofs cover them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from struct import Struct
from typing import Final

from walstream.errors import FrameTooLarge, MalformedFrame
from walstream.replication.wire.authentication import NONCE_BYTES, PROOF_BYTES, Authentication
from walstream.replication.wire.fields import Fields, string
from walstream.replication.wire.frames import frame
from walstream.replication.wire.inbox import Inbox

CHALLENGE: Final = 1
PROOF: Final = 2

HELLO_BYTES_MAX: Final = 4096
"""What a stranger may say before it has proved anything."""

_LENGTH: Final = Struct(">H")
_WHO: Final = Struct(f">QQIB{NONCE_BYTES}s")
_LIMITS: Final = Struct(">QI")
_PROOF: Final = Struct(">B")


class Feature(IntFlag):
    """What a link can do beyond the least."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2
    GAPS = 4
    """The flags of DATA tell whether the leader's log may have gaps there."""


KNOWN_FEATURES: Final = Feature.LZ4 | Feature.ZSTD | Feature.GAPS


@dataclass(frozen=True, slots=True)
class Hello:
    """The leader: who it is beyond its node id, and whom it means to speak to."""

    cluster_id: str
    follower_id: int
    incarnation: int
    features: Feature
    authentication: Authentication
    nonce: bytes

    def encode(self) -> bytes:
        """Return the bytes behind the handshake."""
        assert len(self.nonce) == NONCE_BYTES
        body = string(self.cluster_id) + _WHO.pack(
            self.follower_id, self.incarnation, self.features, self.authentication, self.nonce
        )
        return _LENGTH.pack(len(body)) + body


@dataclass(frozen=True, slots=True)
class Challenge:
    """The follower: who it is, what it can do, and how much it takes."""

    cluster_id: str
    node_id: int
    incarnation: int
    features: Feature
    authentication: Authentication
    nonce: bytes
    credit_bytes: int
    frame_bytes_max: int

    def encode(self) -> bytes:
        """Return the frame."""
        assert len(self.nonce) == NONCE_BYTES
        who = _WHO.pack(self.node_id, self.incarnation, self.features, self.authentication, self.nonce)
        return frame(CHALLENGE, string(self.cluster_id) + who + _LIMITS.pack(self.credit_bytes, self.frame_bytes_max))


def take_hello(inbox: Inbox) -> tuple[Hello, bytes] | None:
    """Take the extension, once it is whole; return it, and its bytes for the transcript. Raises LinkError."""
    if len(inbox) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(inbox.view, inbox.start)
    if length > HELLO_BYTES_MAX:
        raise FrameTooLarge(f"A HELLO announces {length} bytes; up to {HELLO_BYTES_MAX} are taken.")
    if len(inbox) < _LENGTH.size + length:
        inbox.need(_LENGTH.size + length)
        return None
    whole = inbox.take(_LENGTH.size + length)
    fields = Fields(whole, _LENGTH.size)
    cluster_id = fields.string("cluster id")
    follower_id, incarnation, features, authentication, nonce = fields.unpack(_WHO)
    hello = Hello(cluster_id, follower_id, incarnation, Feature(features & KNOWN_FEATURES), _way(authentication), nonce)
    return hello, bytes(whole)


def decode_challenge(data: memoryview) -> Challenge:
    """Read the fields of a CHALLENGE. Raises MalformedFrame."""
    fields = Fields(data)
    cluster_id = fields.string("cluster id")
    node_id, incarnation, features, authentication, nonce = fields.unpack(_WHO)
    credit_bytes, frame_bytes_max = fields.unpack(_LIMITS)
    return Challenge(
        cluster_id,
        node_id,
        incarnation,
        Feature(features & KNOWN_FEATURES),
        _way(authentication),
        nonce,
        credit_bytes,
        frame_bytes_max,
    )


def encode_proof(proof: bytes) -> bytes:
    """Return the frame of a proof."""
    return frame(PROOF, _PROOF.pack(len(proof)) + proof)


def decode_proof(data: memoryview) -> bytes:
    """Read the fields of a PROOF. Raises MalformedFrame."""
    fields = Fields(data)
    (length,) = fields.unpack(_PROOF)
    proof = bytes(fields.take(length))
    fields.finish()
    if length not in (0, PROOF_BYTES):
        raise MalformedFrame(f"A proof has {PROOF_BYTES} bytes or none, not {length}.")
    return proof


def _way(number: int) -> Authentication:
    try:
        return Authentication(number)
    except ValueError:
        raise MalformedFrame(f"Authentication {number} is none that this version knows.") from None
