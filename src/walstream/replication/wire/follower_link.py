"""The side of a link that listens: it checks who dials, takes what is pushed, and grants credit.

It speaks version 2, and version 1 where the settings allow it. A stranger gets little before it has proved who it is:
a few kilobytes of memory, a few seconds of patience, and as an answer the reason why not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from walstream.errors import LinkRefused, LinkVersionUnknown, WalstreamError
from walstream.log.batch import Buffer
from walstream.replication.messages import (
    Accept,
    Catalogue,
    CreditNeeded,
    Data,
    DigestRequest,
    Diverging,
    Open,
    Refused,
    RepairRequest,
    Reset,
    Rewind,
    Watermark,
)
from walstream.replication.wire import version_1
from walstream.replication.wire.authentication import FOLLOWER_LABEL, LEADER_LABEL, prove, verify
from walstream.replication.wire.control import KIND_OF, encode_control
from walstream.replication.wire.credit import GrantedCredit
from walstream.replication.wire.data import DATA, DATA_HEAD_BYTES, REPAIR_DATA, take_data
from walstream.replication.wire.frames import VERSION
from walstream.replication.wire.hello import (
    PROOF,
    Challenge,
    Hello,
    decode_proof,
    encode_proof,
    take_hello,
)
from walstream.replication.wire.link import (
    FROM_BOTH,
    NEVER,
    Deliver,
    Link,
    LinkEffect,
    LinkSettings,
    Peer,
    Write,
)
from walstream.replication.wire.version_1 import (
    STATUS_ERROR,
    HandshakeAck,
    PushedBatch,
    encode_echo,
    take_handshake,
    take_pushed,
)


class FollowerLink(Link):
    """A link from whoever dialled; `nonce` is random and never used again.

    With TLS the shell has seen the certificate of whoever dialled: `certifies` tells whether it is that of a node.
    """

    _expected = FROM_BOTH | {
        DATA,
        REPAIR_DATA,
        *(
            KIND_OF[message]
            for message in (
                Open,
                Accept,
                Diverging,
                Reset,
                Rewind,
                Refused,
                Watermark,
                DigestRequest,
                RepairRequest,
                Catalogue,
                CreditNeeded,
            )
        ),
    }

    def __init__(
        self, settings: LinkSettings, nonce: bytes, now_ms: int, certifies: Callable[[int], bool] | None = None
    ) -> None:
        super().__init__(settings, now_ms)
        self.credit = GrantedCredit(settings.credit_bytes, settings.frame_bytes_max)
        self._certifies = certifies
        self._nonce = nonce
        self._transcript = b""
        self._is_acknowledged = False
        self._take = self._take_handshake

    # ── credit ───────────────────────────────────────────────────────────────────────────────────────────────────

    def released(self, size: int) -> list[Buffer]:
        """Hear that so many bytes of data are no longer held; return the grant to write, if one is due."""
        credit = self.credit.released(size)
        return [] if credit is None or self.peer is None else [*encode_control([credit], self._keys)]

    # ── the handshake ────────────────────────────────────────────────────────────────────────────────────────────

    def _take_handshake(self, effects: list[LinkEffect]) -> bool:
        handshake = take_handshake(self._inbox)
        if handshake is None:
            return False
        self._handshake = handshake
        if handshake.version == VERSION:
            self._take = self._take_hello
        elif handshake.version != version_1.VERSION:
            raise LinkVersionUnknown(f"Protocol version {handshake.version} is not spoken here; versions 1 and 2 are.")
        elif not self.settings.takes_version_1:
            raise LinkRefused("Protocol version 1 is not taken here.", "Set replication.version_1_fallback to take it.")
        else:
            self._check_certificate()
            self._acknowledge(effects, b"")
            self._take = self._take_pushed
            self._up(Peer(handshake.node_id, version_1.VERSION, mode=handshake.mode), effects)
            self._heartbeat_at_ms = NEVER  # It is the leader's to send.
        return True

    def _take_hello(self, effects: list[LinkEffect]) -> bool:
        taken = take_hello(self._inbox)
        if taken is None:
            return False
        self._hello, said = taken
        self._speaks_frames = True
        settings = self.settings
        self._check(self._hello)
        challenge = Challenge(
            settings.cluster_id,
            settings.node_id,
            settings.incarnation,
            self._hello.features,
            settings.authentication,
            self._nonce,
            settings.credit_bytes,
            settings.frame_bytes_max,
        ).encode()
        self._transcript = self._handshake.encode() + said + challenge
        self._acknowledge(effects, challenge)
        self._take = self._take_proof
        return True

    def _take_proof(self, effects: list[LinkEffect]) -> bool:
        fields = self._handshake_frame(PROOF, effects)
        if fields is None:
            return False
        settings, hello = self.settings, self._hello
        verify(settings.authentication, settings.secret, LEADER_LABEL, self._transcript, decode_proof(fields))
        proof = prove(settings.authentication, settings.secret, FOLLOWER_LABEL, self._transcript)
        effects.append(Write([encode_proof(proof)]))
        self._take = self._take_frames
        peer = Peer(self._handshake.node_id, VERSION, hello.cluster_id, hello.incarnation, self._handshake.mode)
        self._up(peer, effects)
        return True

    def _check(self, hello: Hello) -> None:
        """Compare the leader with what it must be. Raises LinkRefused."""
        settings, leader_id = self.settings, self._handshake.node_id
        if hello.follower_id != settings.node_id or leader_id == settings.node_id:
            raise LinkRefused(
                f"Node {leader_id} means to speak to node {hello.follower_id}; this is node {settings.node_id}.",
                "Compare the addresses of the nodes in the configuration.",
            )
        if settings.cluster_id not in ("", hello.cluster_id):
            raise LinkRefused(
                f"Node {leader_id} belongs to cluster {hello.cluster_id}, this one to {settings.cluster_id}.",
                "A controller with an empty data folder makes a new cluster; give it back the folder it had.",
            )
        if not hello.cluster_id:
            raise LinkRefused(f"Node {leader_id} belongs to no cluster yet, so it cannot lead.")
        if hello.authentication is not settings.authentication:
            raise LinkRefused(
                f"Node {leader_id} authenticates by {hello.authentication.name.lower()}, this one by "
                f"{settings.authentication.name.lower()}.",
                "Configure all nodes alike.",
            )
        self._check_certificate()

    def _check_certificate(self) -> None:
        if self._certifies is not None and not self._certifies(self._handshake.node_id):
            raise LinkRefused(
                f"The certificate that was shown is not that of node {self._handshake.node_id}.",
                "A node's certificate names the host of its address in replication.nodes.",
            )

    def _acknowledge(self, effects: list[LinkEffect], more: bytes) -> None:
        self._is_acknowledged = True
        effects.append(Write([HandshakeAck().encode() + more]))

    def _last_words(self, error: WalstreamError) -> bytes:
        words = super()._last_words(error)
        if self._is_acknowledged:
            return words
        if words:
            # It does speak this version, so that the leader must not try an older one.
            return HandshakeAck().encode() + words
        return HandshakeAck(STATUS_ERROR, 0, str(error)).encode()

    # ── when it is up ────────────────────────────────────────────────────────────────────────────────────────────

    def _take_data(self, flags: int, length: int) -> Data:
        return take_data(self._inbox, flags, length, self._keys, self.credit)

    def _frame_bytes_max(self, kind: int) -> int:
        if kind == DATA:
            return DATA_HEAD_BYTES + min(self.credit.frame_bytes_max, self.settings.frame_bytes_max)
        return super()._frame_bytes_max(kind)

    def _handle(self, message: Any, effects: list[LinkEffect]) -> bool:
        if isinstance(message, CreditNeeded):
            credit = self.credit.needed(message)
            if credit is not None:
                effects.append(Write([*encode_control([credit], self._keys)]))
            return True
        return super()._handle(message, effects)

    def _take_pushed(self, effects: list[LinkEffect]) -> bool:
        """Take everything that a leader of version 1 has pushed."""
        pushed: list[Any] = []
        try:
            while (taken := take_pushed(self._inbox, self.settings.frame_bytes_max)) is not None:
                if isinstance(taken, PushedBatch):
                    pushed.append(taken)
                else:
                    effects.append(Write([encode_echo(taken.timestamp_ms)]))
        finally:
            if pushed:
                effects.append(Deliver(pushed))
        return False
