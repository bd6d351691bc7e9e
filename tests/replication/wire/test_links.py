"""Both sides of a link against each other, over a connection of lists: handshake, credit, heartbeats, ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from walstream.errors import (
    AuthenticationFailed,
    BadChecksum,
    BadMagic,
    ConnectionLost,
    CreditExceeded,
    FrameTooLarge,
    LinkRefused,
    LinkTimeout,
    LinkVersionUnknown,
    MalformedFrame,
    PartitionUnknown,
    PeerFailed,
    UnexpectedFrame,
    WalstreamError,
)
from walstream.replication.messages import (
    Accept,
    Catalogue,
    CatalogueAck,
    Data,
    HeartbeatAck,
    Message,
    Open,
    Progress,
    RepairData,
    ReplicaFlag,
    State,
)
from walstream.replication.wire import hello, version_1
from walstream.replication.wire.authentication import Authentication
from walstream.replication.wire.control import encode_control
from walstream.replication.wire.data import PayloadCompression
from walstream.replication.wire.follower_link import FollowerLink
from walstream.replication.wire.frames import Keys, frame
from walstream.replication.wire.leader_link import LeaderLink
from walstream.replication.wire.link import (
    NEVER,
    Closed,
    Credited,
    Deliver,
    Link,
    LinkEffect,
    LinkSettings,
    Opened,
    Peer,
    Write,
)
from walstream.replication.wire.refusals import CODES

KEY = (UUID("00112233-4455-6677-8899-aabbccddeeff"), 3)
OTHER_KEY = (KEY[0], 4)
LEADER = LinkSettings(node_id=1, cluster_id="c", incarnation=5)
FOLLOWER = LinkSettings(node_id=2, cluster_id="c", incarnation=9, credit_bytes=1000, frame_bytes_max=5000)
NONCE_L, NONCE_F = b"L" * 32, b"F" * 32
OPEN = Open(KEY, 4, 1, 0, 100, 90, 50, -1)
STATE = State(KEY, 4, 1, 0, 80, 3, 70, ReplicaFlag.NONE)


def data(size: int, offset: int = 80) -> Data:
    return Data(KEY, 4, 1, 90, 0, offset, offset + 10, (bytes(size),))


def secret(settings: LinkSettings, value: bytes = b"hush") -> LinkSettings:
    return replace(settings, authentication=Authentication.SECRET, secret=value)


class Pair:
    """A leader's link and a follower's, and what came out of them."""

    def __init__(self, leader: LinkSettings = LEADER, follower: LinkSettings = FOLLOWER, **options: Any) -> None:
        self.now = 1_000_000
        self.leader = LeaderLink(leader, 2, NONCE_L, self.now, options.pop("version", 2))
        self.follower = FollowerLink(follower, NONCE_F, self.now, **options)
        self.at_leader: list[LinkEffect] = []
        self.at_follower: list[LinkEffect] = []
        self.wires: list[tuple[str, bytes]] = []

    def run(self, effects: list[LinkEffect] | None = None, side: str = "leader", step: int = 1 << 30) -> Pair:
        """Carry bytes back and forth until nobody has any more."""
        todo = [(side, self.leader.start() if effects is None else effects)]
        while todo:
            side, effects = todo.pop(0)
            (self.at_leader if side == "leader" else self.at_follower).extend(effects)
            sent = b"".join(buffer for effect in effects if isinstance(effect, Write) for buffer in effect.buffers)
            if not sent:
                continue
            self.wires.append((side, sent))
            other, name = (self.follower, "follower") if side == "leader" else (self.leader, "leader")
            for start in range(0, len(sent), step):
                todo.append((name, other.feed(sent[start : start + step], self.now)))
        return self

    def send(self, messages: Iterable[Message], side: str = "leader") -> Pair:
        link: Link = self.leader if side == "leader" else self.follower
        return self.run([Write(link.send(messages))], side)

    def up(self) -> Pair:
        self.run()
        assert self.leader.peer is not None
        assert self.follower.peer is not None
        self.send([OPEN]).send([STATE], "follower")
        self.at_leader.clear()
        self.at_follower.clear()
        return self


def delivered(effects: list[LinkEffect]) -> list[Any]:
    return [message for effect in effects if isinstance(effect, Deliver) for message in effect.messages]


def closed(effects: list[LinkEffect]) -> WalstreamError:
    (found,) = [effect for effect in effects if isinstance(effect, Closed)]
    assert effects[-1] is found, "nothing follows the end"
    assert found.error.__traceback__ is None, "it would hold what was received"
    return found.error


# ── the handshake ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", [1, 3, 1 << 30])
@pytest.mark.parametrize("wrap", [lambda settings: settings, secret], ids=["open", "secret"])
def test_handshake(wrap: Any, step: int) -> None:
    pair = Pair(wrap(LEADER), wrap(FOLLOWER)).run(step=step)
    assert Opened(Peer(2, 2, "c", 9)) in pair.at_leader
    assert Opened(Peer(1, 2, "c", 5)) in pair.at_follower
    assert pair.leader.credit.available_bytes == 1000
    assert pair.leader.frame_bytes_max == 5000


def test_a_new_follower_hears_the_cluster_id() -> None:
    pair = Pair(follower=replace(FOLLOWER, cluster_id="")).run()
    assert Opened(Peer(1, 2, "c", 5)) in pair.at_follower
    assert Opened(Peer(2, 2, "", 9)) in pair.at_leader


@pytest.mark.parametrize(
    ("leader", "follower", "error", "code"),
    [
        (LEADER, replace(FOLLOWER, cluster_id="d"), LinkRefused, 9),
        (replace(LEADER, cluster_id=""), FOLLOWER, LinkRefused, 9),
        (LEADER, replace(FOLLOWER, node_id=3), LinkRefused, 9),
        (replace(LEADER, node_id=2), FOLLOWER, LinkRefused, 9),
        (secret(LEADER), FOLLOWER, LinkRefused, 9),
        (LEADER, secret(FOLLOWER), LinkRefused, 9),
        (secret(LEADER, b"hush"), secret(FOLLOWER, b"shout"), AuthenticationFailed, 10),
    ],
    ids=["cluster", "no cluster", "node", "itself", "only leader", "only follower", "another secret"],
)
def test_the_follower_refuses(
    leader: LinkSettings, follower: LinkSettings, error: type[WalstreamError], code: int
) -> None:
    pair = Pair(leader, follower).run()
    assert type(closed(pair.at_follower)) is error
    told = closed(pair.at_leader)
    assert isinstance(told, PeerFailed)
    assert told.code == code
    # It is not for want of a version, so version 1 would be no way around it.
    assert not [effect for effect in pair.at_leader if isinstance(effect, Closed) and effect.is_version_refused]
    assert not [effect for effect in pair.at_leader + pair.at_follower if isinstance(effect, Opened)]


def test_the_leader_refuses_a_follower_that_cannot_prove_itself() -> None:
    # The follower's own check is left out, as an impostor's would be.
    pair = Pair(secret(LEADER), secret(FOLLOWER, b"guess"))
    impostor = pair.follower
    pair.at_follower += impostor.feed(pair.leader.start()[0].buffers[0], pair.now)  # type: ignore[union-attr]
    answer = next(effect for effect in pair.at_follower if isinstance(effect, Write)).buffers[0]
    assert [type(effect) for effect in pair.leader.feed(answer, pair.now)] == [Write]
    effects = pair.leader.feed(frame(2, b"\x20" + b"?" * 32), pair.now)
    assert isinstance(closed(effects), AuthenticationFailed)
    assert pair.leader.peer is None


def test_the_leader_refuses_an_address_where_another_node_listens() -> None:
    pair = Pair()
    hello = pair.leader.start()[0].buffers[0]  # type: ignore[union-attr]
    third = FollowerLink(replace(FOLLOWER, node_id=2), NONCE_F, pair.now)
    answer = third.feed(hello, pair.now)[0].buffers[0]  # type: ignore[union-attr]
    wrong = LeaderLink(LEADER, 3, NONCE_L, pair.now)
    wrong.start()
    effects = wrong.feed(answer, pair.now)
    assert isinstance(closed(effects), LinkRefused)
    assert isinstance(effects[0], Write), "it says why"


def test_a_recorded_handshake_proves_nothing_later() -> None:
    pair = Pair(secret(LEADER), secret(FOLLOWER)).run()
    recorded = b"".join(sent for side, sent in pair.wires if side == "leader")
    later = FollowerLink(secret(FOLLOWER), b"G" * 32, pair.now)
    effects = later.feed(recorded, pair.now)
    assert isinstance(closed(effects), AuthenticationFailed)
    assert not [effect for effect in effects if isinstance(effect, Opened)]


def test_a_proof_cannot_be_sent_back_to_who_made_it() -> None:
    pair = Pair(secret(LEADER), secret(FOLLOWER)).run()
    proof = next(sent for side, sent in pair.wires[1:] if side == "leader")
    fresh = Pair(secret(LEADER), secret(FOLLOWER))
    hello = fresh.leader.start()[0].buffers[0]  # type: ignore[union-attr]
    answer = fresh.follower.feed(hello, fresh.now)[0].buffers[0]  # type: ignore[union-attr]
    (own,) = fresh.leader.feed(answer, fresh.now)
    assert isinstance(own, Write)
    assert own.buffers[0] == proof, "the same nonces, the same proof: that is why they must not be used twice"
    assert isinstance(closed(fresh.leader.feed(own.buffers[0], fresh.now)), AuthenticationFailed)


def test_the_secret_is_never_on_the_wire_nor_in_a_log() -> None:
    value = b"a secret of some length"
    pair = Pair(secret(LEADER, value), secret(FOLLOWER, value)).run()
    assert pair.leader.peer is not None
    assert value not in b"".join(sent for _, sent in pair.wires)
    assert value.decode() not in repr(pair.leader.settings)


@pytest.mark.parametrize("place", range(0, 80, 7))
def test_whoever_changes_a_word_of_the_handshake_breaks_it(place: int) -> None:
    pair = Pair(secret(LEADER), secret(FOLLOWER))
    hello = bytearray(pair.leader.start()[0].buffers[0])  # type: ignore[union-attr]
    hello[place % len(hello)] ^= 1
    effects = pair.follower.feed(hello, pair.now)
    for effect in effects:
        if isinstance(effect, Write) and not pair.leader.is_closed:
            for answer in pair.leader.feed(effect.buffers[0], pair.now):
                if isinstance(answer, Write):
                    pair.follower.feed(answer.buffers[0], pair.now)
    assert pair.leader.peer is None
    assert pair.follower.peer is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_certificate_of_another_node(version: int) -> None:
    tls = {"authentication": Authentication.TLS, "takes_version_1": True}
    leader, follower = replace(LEADER, **tls), replace(FOLLOWER, **tls)
    own = Pair(leader, follower, version=version, certifies=lambda node_id: node_id == 1).run()
    assert own.follower.peer is not None
    pair = Pair(leader, follower, version=version, certifies=lambda node_id: node_id == 7).run()
    assert isinstance(closed(pair.at_follower), LinkRefused)
    assert pair.follower.peer is None
    assert pair.leader.peer is None


@pytest.mark.parametrize("version", [0, 3, 0x4745])
def test_an_unknown_version_is_answered_and_closed(version: int) -> None:
    link = FollowerLink(FOLLOWER, NONCE_F, 0)
    effects = link.feed(version_1.Handshake(version, 1).encode(), 0)
    assert isinstance(closed(effects), LinkVersionUnknown)
    assert isinstance(effects[0], Write)
    inbox = version_1.Inbox()
    inbox.feed(effects[0].buffers[0])
    ack = version_1.take_ack(inbox)
    assert ack is not None
    assert ack.status == version_1.STATUS_ERROR
    assert f"version {version} " in ack.error


def test_a_follower_of_version_1_makes_the_leader_fall_back() -> None:
    # What a node that knows version 1 alone answers, and what becomes of it.
    leader = LeaderLink(replace(LEADER, takes_version_1=True), 2, NONCE_L, 0)
    leader.start()
    effects = leader.feed(version_1.HandshakeAck(1, 0, "unsupported protocol version 2").encode(), 0)
    assert isinstance(closed(effects), LinkVersionUnknown)
    assert isinstance(effects[-1], Closed)
    assert effects[-1].is_version_refused


@pytest.mark.parametrize("side", ["leader", "follower"])
def test_a_handshake_that_takes_too_long(side: str) -> None:
    pair = Pair()
    pair.leader.start()
    link: Link = getattr(pair, side)
    assert link.deadline_ms == pair.now + 5000
    assert link.tick(pair.now + 4999) == []
    assert isinstance(closed(link.tick(pair.now + 5000)), LinkTimeout)
    assert link.deadline_ms == NEVER
    assert link.tick(pair.now + 9000) == []


# ── messages and data ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", [1, 50, 1 << 30])
@pytest.mark.parametrize("compression", PayloadCompression)
def test_messages_and_data_arrive_in_order(compression: PayloadCompression, step: int) -> None:
    pair = Pair(replace(LEADER, compression=compression), replace(FOLLOWER, credit_bytes=100_000)).up()
    payload = b"some batches " * 200
    accept = Accept(KEY, 4, 1, 80)
    push = Data(KEY, 4, 1, 90, 0, 80, 95, (payload[:1000], bytearray(payload[1000:])))
    buffers = [*pair.leader.send([accept]), *pair.leader.send_data(push, len(payload))]
    pair.run([Write(buffers)], step=step)
    found = delivered(pair.at_follower)
    assert found == [accept, replace(push, batches=found[1].batches)]
    assert b"".join(found[1].batches) == payload
    assert (sum(map(len, buffers)) < 1000) == (compression is not PayloadCompression.NONE)
    progress = [Progress(KEY, 4, 1, end, 90, ReplicaFlag.NONE) for end in (85, 95)]
    pair.send(progress, "follower")
    assert delivered(pair.at_leader) == progress


@pytest.mark.parametrize("is_known", [True, False])
def test_gaps_are_told_only_to_a_follower_that_knows_the_flag(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_known:  # A follower of an earlier version answers with the features that it knows.
        monkeypatch.setattr(hello, "KNOWN_FEATURES", hello.Feature.LZ4 | hello.Feature.ZSTD)
    pair = Pair().up()
    message = replace(data(100), may_have_gaps=True)
    pair.run([Write(pair.leader.send_data(message, 100))])
    assert [came.may_have_gaps for came in delivered(pair.at_follower)] == [is_known]


def test_data_is_neither_copied_on_its_way_out_nor_in() -> None:
    pair = Pair().up()
    batch = bytearray(b"b" * 300)
    head, body = pair.leader.send_data(replace(data(0), batches=(batch,)), 300)
    assert body is batch
    pair.follower.feed(head, pair.now)
    room = pair.follower.buffer()
    room[:300] = body
    (effect,) = pair.follower.received(300, pair.now)
    assert isinstance(effect, Deliver)
    (message,) = effect.messages
    assert isinstance(message, Data)
    (view,) = message.batches
    assert isinstance(view, memoryview)
    assert view.obj is room.obj


def test_a_file_may_follow_its_head() -> None:
    pair = Pair().up()
    head = pair.leader.send_data_head(data(0), 300)
    whole = Pair().up().leader.send_data(data(300), 300)
    assert [head, bytes(300)] == whole


def test_catalogue_and_repairs_pass_both_ways() -> None:
    pair = Pair().up()
    pair.send([Catalogue(3, b"{}")])
    pair.send([CatalogueAck(3)], "follower")
    assert delivered(pair.at_follower) == [Catalogue(3, b"{}")]
    assert delivered(pair.at_leader) == [CatalogueAck(3)]
    repair = RepairData(KEY, 4, 1, 7, 10, 20, (b"x" * 2000,))
    pair.send([repair]).send([repair], "follower")
    assert delivered(pair.at_follower)[1:] == delivered(pair.at_leader)[1:] == [repair]


def test_what_answers_an_earlier_link_is_not_sent_on_this_one() -> None:
    pair = Pair().run()
    assert pair.follower.send([Progress(KEY, 4, 1, 80, 70, ReplicaFlag.NONE)]) == []
    assert pair.leader.send([Accept(KEY, 4, 1, 80)]) == []
    assert pair.leader.send_data(data(10), 10) == []
    assert pair.leader.send_data_head(data(10), 10) == b""
    assert pair.leader.credit.sent_bytes == 0


def test_credit_is_spent_asked_for_and_granted() -> None:
    pair = Pair().up()
    pair.run([Write(pair.leader.send_data(data(900), 900))])
    assert pair.leader.credit.available_bytes == 100
    pair.run([Write(pair.leader.ask(200))])
    assert pair.leader.ask(200) == []
    assert Credited() not in pair.at_leader
    pair.run([Write(pair.follower.released(900))], "follower")
    assert pair.at_leader[-1] == Credited()
    assert pair.leader.credit.available_bytes == 1000


def test_more_data_than_credit_ends_the_link() -> None:
    pair = Pair().up()
    pair.leader.credit.granted_bytes = 10_000  # A leader that cannot count.
    pair.run([Write(pair.leader.send_data(data(600), 600))])
    pair.run([Write(pair.leader.send_data(data(600), 600))])
    assert len(delivered(pair.at_follower)) == 1
    assert isinstance(closed(pair.at_follower), CreditExceeded)
    told = closed(pair.at_leader)
    assert isinstance(told, PeerFailed)
    assert told.code == CODES[CreditExceeded]


def test_a_frame_longer_than_the_credit_is_refused_before_it_comes() -> None:
    pair = Pair(follower=replace(FOLLOWER, credit_bytes=8000, frame_bytes_max=100_000)).up()
    pair.leader.credit.granted_bytes = 1 << 30
    head = pair.leader.send_data_head(data(0), 9000)
    effects = pair.follower.feed(head[:8], pair.now)
    assert isinstance(closed(effects), FrameTooLarge)


# ── wrong frames ────────────────────────────────────────────────────────────────────────────────────────────────────


def spoil(buffers: list[Any], place: int) -> bytes:
    whole = bytearray(b"".join(buffers))
    whole[place] ^= 0x40
    return bytes(whole)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda pair: b"GET / HTTP/1.1\r\n", BadMagic),
        (lambda pair: spoil(pair.leader.send_data(data(9), 9), 20), BadChecksum),
        (lambda pair: spoil(pair.leader.send([Accept(KEY, 4, 1, 80)]), 20), BadChecksum),
        (lambda pair: frame(18, b"short"), MalformedFrame),
        (lambda pair: frame(18, b""), MalformedFrame),
        (lambda pair: frame(99, b""), UnexpectedFrame),
        (lambda pair: b"".join(encode_control([STATE], Keys())), UnexpectedFrame),
        (lambda pair: b"".join(encode_control([Accept(OTHER_KEY, 4, 1, 80)], Keys())), PartitionUnknown),
        (lambda pair: b"".join(encode_control([replace(OPEN, log_start=-5)], Keys())), MalformedFrame),
        (lambda pair: b"W2\x12\x00\x00\xff\xff\xff", FrameTooLarge),
        (lambda pair: b"W2\x12\x00\x00\x00\x00\x03abc", MalformedFrame),
        (lambda pair: b"W2\x17\x00\x00\x00\x00\x04abcd", MalformedFrame),
    ],
    ids=[
        "magic",
        "checksum of data",
        "checksum",
        "fields",
        "no fields",
        "type",
        "not its to send",
        "partition",
        "negative",
        "oversize",
        "undersize",
        "short data",
    ],
)
def test_a_wrong_frame_is_answered_and_ends_the_link(make: Any, error: type[WalstreamError]) -> None:
    pair = Pair().up()
    good = Accept(KEY, 4, 1, 80)
    pair.run([Write([*pair.leader.send([good]), make(pair), *pair.leader.send([good])])])
    # What was whole before it is delivered, nothing after it.
    assert delivered(pair.at_follower) == [good]
    assert type(closed(pair.at_follower)) is error
    told = closed(pair.at_leader)
    assert isinstance(told, PeerFailed)
    assert told.code == CODES[error]
    assert pair.follower.feed(b"W2", pair.now) == []
    assert pair.follower.send([STATE]) == []


def test_data_for_a_partition_that_was_never_opened() -> None:
    pair = Pair().up()
    pair.leader._keys.open(OTHER_KEY)
    pair.run([Write(pair.leader.send_data(replace(data(9), partition=OTHER_KEY), 9))])
    assert delivered(pair.at_follower) == []
    assert isinstance(closed(pair.at_follower), PartitionUnknown)


def test_the_shell_may_end_a_link_and_say_why() -> None:
    pair = Pair().up()
    pair.run(pair.follower.fail(LinkRefused("The node stops.")), "follower")
    assert isinstance(closed(pair.at_follower), LinkRefused)
    assert "The node stops." in str(closed(pair.at_leader))
    assert pair.follower.fail(LinkRefused("again")) == []


def test_a_connection_that_breaks() -> None:
    pair = Pair().up()
    assert isinstance(closed(pair.leader.lost()), ConnectionLost)
    assert pair.leader.lost() == []
    assert pair.leader.peer is None


# ── heartbeats ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("side", ["leader", "follower"])
def test_heartbeats_go_both_ways_and_measure(side: str) -> None:
    pair = Pair().up()
    link: Link = getattr(pair, side)
    assert link.deadline_ms == pair.now + 10_000
    pair.now += 10_000
    beats = link.tick(pair.now)
    assert len(beats) == 1
    pair.now += 7
    pair.run(beats, side)
    assert link.round_trip_ms == 7
    assert delivered(pair.at_leader + pair.at_follower) == []
    assert link.tick(pair.now) == []


@pytest.mark.parametrize("side", ["leader", "follower"])
def test_silence_ends_a_link(side: str) -> None:
    pair = Pair().up()
    link: Link = getattr(pair, side)
    for now in range(pair.now, pair.now + 30_000, 500):
        assert not [effect for effect in link.tick(now) if isinstance(effect, Closed)]
    assert isinstance(closed(link.tick(pair.now + 30_000)), LinkTimeout)


def test_an_echo_of_its_own_invention_measures_nothing() -> None:
    pair = Pair().up()
    pair.leader.feed(b"".join(encode_control([HeartbeatAck(1), HeartbeatAck(pair.now + 1)], Keys())), pair.now)
    assert pair.leader.round_trip_ms is None


# ── version 1 ───────────────────────────────────────────────────────────────────────────────────────────────────────

BOTH_1 = {
    "leader": replace(LEADER, takes_version_1=True, mode=version_1.MODE_SYNC),
    "follower": replace(FOLLOWER, takes_version_1=True),
}


def test_version_1_pushes_and_beats() -> None:
    pair = Pair(**BOTH_1, version=1).run(step=1)
    assert pair.at_leader[-1] == Opened(Peer(2, 1))
    assert pair.at_follower[-1] == Opened(Peer(1, 1, mode=version_1.MODE_SYNC))
    pair.run([Write(pair.leader.push("orders", 3, 1000, 2, 5, b"123456789"))])
    assert delivered(pair.at_follower) == [version_1.PushedBatch("orders", 3, 1000, 2, 5, memoryview(b"123456789"))]
    pair.now += 10_000
    assert pair.follower.tick(pair.now) == [], "beats are the leader's"
    pair.run(pair.leader.tick(pair.now))
    assert pair.leader.round_trip_ms == 0
    assert pair.wires[-1] == ("follower", pair.now.to_bytes(8, "big"))


def test_version_1_is_refused_where_it_is_not_allowed() -> None:
    link = FollowerLink(FOLLOWER, NONCE_F, 0)
    effects = link.feed(version_1.Handshake(1, 1).encode(), 0)
    assert isinstance(closed(effects), LinkRefused)
    assert isinstance(effects[0], Write)
    assert effects[0].buffers[0][0] == version_1.STATUS_ERROR


def test_version_1_has_no_words_for_an_error() -> None:
    pair = Pair(**BOTH_1, version=1).run()
    good = pair.leader.push("orders", 3, 1000, 2, 5, b"123456789")
    effects = pair.follower.feed(b"".join([*good, b"??", *good]), pair.now)
    assert len(delivered(effects)) == 1
    assert isinstance(closed(effects), BadMagic)
    assert not [effect for effect in effects if isinstance(effect, Write)]


def test_silence_of_version_1_ends_it_on_both_sides() -> None:
    pair = Pair(**BOTH_1, version=1).run()
    for link in (pair.leader, pair.follower):
        link.tick(pair.now + 29_999)
        assert isinstance(closed(link.tick(pair.now + 30_000)), LinkTimeout)
