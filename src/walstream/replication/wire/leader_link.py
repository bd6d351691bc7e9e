"""The side of a link that dials, and pushes what its node leads.

Version 2 begins with HANDSHAKE and HELLO in one write; the follower's proof makes the link up. Data is sent against
credit; `ask` says to the follower that there is too little. Version 1 has no credit and no answers: what is pushed is
gone, and whoever pushes decides how much (`version_1_push`).
"""

from __future__ import annotations

from typing import Any, Final

from walstream.errors import LinkRefused, LinkVersionUnknown
from walstream.log.batch import Buffer
from walstream.replication.messages import (
    CatalogueAck,
    Credit,
    Data,
    DigestAnswer,
    Open,
    Progress,
    Refused,
    RepairRequest,
    Resync,
    State,
)
from walstream.replication.wire import version_1
from walstream.replication.wire.authentication import FOLLOWER_LABEL, LEADER_LABEL, prove, verify
from walstream.replication.wire.control import KIND_OF, encode_control
from walstream.replication.wire.credit import SpentCredit
from walstream.replication.wire.data import REPAIR_DATA, PayloadCompression, data_head, encode_data
from walstream.replication.wire.frames import VERSION
from walstream.replication.wire.hello import (
    CHALLENGE,
    PROOF,
    Challenge,
    Feature,
    Hello,
    decode_challenge,
    decode_proof,
    encode_proof,
)
from walstream.replication.wire.link import FROM_BOTH, Credited, Link, LinkEffect, LinkSettings, Peer, Write
from walstream.replication.wire.version_1 import STATUS_OK, Handshake, encode_batch, take_ack, take_echo

_FEATURES: Final = {
    PayloadCompression.NONE: Feature.NONE,
    PayloadCompression.LZ4: Feature.LZ4,
    PayloadCompression.ZSTD: Feature.ZSTD,
}


class LeaderLink(Link):
    """A link to the follower `follower_id`; `nonce` is random and never used again."""

    _expected = FROM_BOTH | {
        REPAIR_DATA,
        *(
            KIND_OF[message]
            for message in (State, Refused, Progress, Resync, DigestAnswer, RepairRequest, Credit, CatalogueAck)
        ),
    }

    def __init__(
        self, settings: LinkSettings, follower_id: int, nonce: bytes, now_ms: int, version: int = VERSION
    ) -> None:
        super().__init__(settings, now_ms)
        assert version == VERSION or settings.takes_version_1
        self.version = version
        self.follower_id = follower_id
        self.credit = SpentCredit(0)
        self._transcript = b""
        self._nonce = nonce
        self._frame_bytes = settings.frame_bytes_max
        self._chosen = PayloadCompression.NONE
        self._tells_gaps = False
        self._take = self._take_ack

    @property
    def frame_bytes_max(self) -> int:
        """The largest payload that the follower takes in one frame."""
        return self._frame_bytes

    def start(self) -> list[LinkEffect]:
        """Say who we are; the first thing on a new connection."""
        settings = self.settings
        words = Handshake(self.version, settings.node_id, settings.mode).encode()
        if self.version == VERSION:
            words += Hello(
                settings.cluster_id,
                self.follower_id,
                settings.incarnation,
                _FEATURES[settings.compression] | Feature.GAPS,
                settings.authentication,
                self._nonce,
            ).encode()
        self._transcript = words
        return [Write([words])]

    # ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def send_data(self, message: Data, batches_bytes: int) -> list[Buffer]:
        """Return a DATA frame, its batches uncopied; there must be credit for `batches_bytes`, their length."""
        key = self._keys.find(message.partition)
        if key is None or self.peer is None:
            return []
        message.may_have_gaps &= self._tells_gaps
        return encode_data(message, key, self.credit.take(batches_bytes), batches_bytes, self._chosen)

    def send_data_head(self, message: Data, payload_bytes: int) -> bytes:
        """Return what goes before `payload_bytes` of batches that are sent from a file; `message.batches` is ignored.

        The payload must follow, all of it: a link on which it does not is closed by the follower's checks.
        """
        key = self._keys.find(message.partition)
        if key is None or self.peer is None:
            return b""
        return data_head(message, key, self.credit.take(payload_bytes), payload_bytes, payload_bytes)

    def ask(self, size: int) -> list[Buffer]:
        """Return what to write when data of `size` bytes has to wait for credit; nothing if it was said already."""
        message = self.credit.ask(size) if self.peer is not None else None
        return [] if message is None else [*encode_control([message], self._keys)]

    def push(
        self, topic: str, partition: int, base_offset: int, record_count: int, timestamp_ms: int, batch: Buffer
    ) -> list[Buffer]:
        """Return a WA frame of version 1."""
        assert self.version == version_1.VERSION
        if self.peer is None:
            return []
        return encode_batch(topic, partition, base_offset, record_count, timestamp_ms, batch)

    # ── the handshake ────────────────────────────────────────────────────────────────────────────────────────────

    def _take_ack(self, effects: list[LinkEffect]) -> bool:
        ack = take_ack(self._inbox)
        if ack is None:
            return False
        if ack.status != STATUS_OK:
            self._close(
                LinkVersionUnknown(f"Node {self.follower_id} refuses protocol version {self.version}: {ack.error}"),
                effects,
                is_version_refused=self.version == VERSION,
            )
        elif self.version == VERSION:
            self._speaks_frames = True
            self._take = self._take_challenge
        else:
            self._take = self._take_echo
            self._up(Peer(self.follower_id, version_1.VERSION), effects)
        return True

    def _take_challenge(self, effects: list[LinkEffect]) -> bool:
        start = self._inbox.start
        view = self._inbox.view
        fields = self._handshake_frame(CHALLENGE, effects)
        if fields is None:
            return False
        challenge = decode_challenge(fields)
        self._transcript += view[start : self._inbox.start]
        self._check(challenge)
        settings = self.settings
        proof = prove(settings.authentication, settings.secret, LEADER_LABEL, self._transcript)
        effects.append(Write([encode_proof(proof)]))
        self.credit = SpentCredit(challenge.credit_bytes)
        self._frame_bytes = min(self._frame_bytes, challenge.frame_bytes_max)
        if _FEATURES[settings.compression] & challenge.features:
            self._chosen = settings.compression
        self._tells_gaps = Feature.GAPS in challenge.features
        self._challenge = challenge
        self._take = self._take_proof
        return True

    def _take_proof(self, effects: list[LinkEffect]) -> bool:
        fields = self._handshake_frame(PROOF, effects)
        if fields is None:
            return False
        settings, challenge = self.settings, self._challenge
        verify(settings.authentication, settings.secret, FOLLOWER_LABEL, self._transcript, decode_proof(fields))
        self._take = self._take_frames
        self._up(Peer(challenge.node_id, VERSION, challenge.cluster_id, challenge.incarnation), effects)
        return True

    def _check(self, challenge: Challenge) -> None:
        """Compare the follower with the one we mean. Raises LinkRefused."""
        settings = self.settings
        if challenge.node_id != self.follower_id:
            raise LinkRefused(
                f"Node {challenge.node_id} listens where node {self.follower_id} should.",
                "Compare the addresses of the nodes in the configuration.",
            )
        if challenge.cluster_id not in ("", settings.cluster_id):
            raise LinkRefused(
                f"Node {challenge.node_id} is of cluster {challenge.cluster_id}, this one of {settings.cluster_id}."
            )
        if challenge.authentication is not settings.authentication:
            raise LinkRefused(
                f"Node {challenge.node_id} authenticates by {challenge.authentication.name.lower()}, this one by "
                f"{settings.authentication.name.lower()}.",
                "Configure all nodes alike.",
            )

    # ── when it is up ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _compression(self) -> PayloadCompression:
        return self._chosen

    def _may_send(self, message: Any) -> bool:
        if isinstance(message, Open):
            self._keys.open(message.partition)
            return True
        return super()._may_send(message)

    def _handle(self, message: Any, effects: list[LinkEffect]) -> bool:
        if isinstance(message, Credit):
            if self.credit.granted(message):
                effects.append(Credited())
            return True
        return super()._handle(message, effects)

    def _take_echo(self, _effects: list[LinkEffect]) -> bool:
        echo = take_echo(self._inbox)
        if echo is None:
            return False
        self._answered(echo.timestamp_ms)
        return True

    def _heartbeat(self, now_ms: int) -> bytes:
        if self.version == version_1.VERSION:
            return version_1.encode_heartbeat(now_ms)
        return super()._heartbeat(now_ms)
