"""The frames of version 2: golden bytes, round trips, and garbage of every kind."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replication.wire import golden
from walstream.errors import BadChecksum, LinkError, MalformedFrame, PartitionUnknown, WalstreamError
from walstream.replication import messages as m
from walstream.replication.wire import control, data
from walstream.replication.wire.authentication import FOLLOWER_LABEL, LEADER_LABEL, Authentication, prove
from walstream.replication.wire.credit import GrantedCredit
from walstream.replication.wire.data import PayloadCompression, encode_data, encode_repair, take_data, take_repair
from walstream.replication.wire.follower_link import FollowerLink
from walstream.replication.wire.frames import FRAME_BYTES_MAX, Keys, next_frame, take_fields
from walstream.replication.wire.hello import Challenge, Feature, Hello, decode_challenge, take_hello
from walstream.replication.wire.inbox import Inbox
from walstream.replication.wire.leader_link import LeaderLink
from walstream.replication.wire.link import Deliver, LinkSettings, Write

ALL_KINDS = frozenset(range(256))


class AnyKeys(Keys):
    """As if every partition had been opened."""

    def decode(self, data: bytes) -> tuple[UUID, int]:
        return self.decode_new(data)


class AnyCredit(GrantedCredit):
    """As if everything had been granted."""

    def __init__(self) -> None:
        super().__init__(1 << 20, 1 << 20)
        self.arrivals: list[tuple[int, int]] = []

    def arrived(self, position: int, size: int) -> None:
        self.arrivals.append((position, size))


def take(inbox: Inbox) -> list[Any]:
    """Take every message of whole frames, DATA with its position and size."""
    keys, credit, found = AnyKeys(), AnyCredit(), []
    while (head := next_frame(inbox, ALL_KINDS, lambda _kind: FRAME_BYTES_MAX)) is not None:
        kind, flags, length = head
        if kind == data.DATA:
            found.append((take_data(inbox, flags, length, keys, credit), *credit.arrivals[-1]))
        elif kind == data.REPAIR_DATA:
            found.append(take_repair(inbox, flags, length, keys, 1 << 20))
        else:
            control.decode_control(kind, take_fields(inbox, flags, length), keys, found)
    return found


def taken(frame: bytes) -> list[Any]:
    inbox = Inbox()
    while frame:
        frame = frame[inbox.feed(frame) :]
    return take(inbox)


# ── golden bytes ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("message", "frame"), golden.FRAMES, ids=lambda value: type(value).__name__)
def test_messages(message: m.Message, frame: bytes) -> None:
    assert control.encode_control([message], Keys()) == [frame]
    assert taken(frame) == [message]


def test_every_message_has_golden_bytes() -> None:
    shown = {type(message) for message, _ in golden.FRAMES} | {m.Data, m.RepairData}
    assert shown == set(m.PartitionMessage.__args__) | set(m.LinkMessage.__args__)


def test_progress_of_many_partitions_is_one_frame() -> None:
    first = m.Progress(golden.KEY, 7, 2, 30, 28, m.ReplicaFlag.NONE)
    second = m.Progress((golden.TOPIC, 4), 7, 2, 5, 4, m.ReplicaFlag.DAMAGED)
    assert control.encode_control([first, second], Keys()) == [golden.PROGRESS_OF_TWO]
    assert taken(golden.PROGRESS_OF_TWO) == [first, second]


def test_only_neighbours_share_a_frame() -> None:
    messages = [message for message, _ in golden.FRAMES]
    mixed = [*messages, messages[-1], *reversed(messages)]
    frames = control.encode_control(mixed, Keys())
    assert len(frames) == len(mixed) - 2
    assert taken(b"".join(frames)) == mixed


def test_data() -> None:
    key = Keys().encode(golden.KEY)
    assert b"".join(encode_data(golden.DATA, key, golden.DATA_POSITION, 9)) == golden.DATA_FRAME
    ((message, position, size),) = taken(golden.DATA_FRAME)
    assert (position, size) == (1009, 9)
    assert message == replace(golden.DATA, batches=(b"123456789",))


def test_data_without_batches() -> None:
    """A range that compaction has emptied."""
    empty = replace(golden.DATA, batches=())
    frame = b"".join(encode_data(empty, Keys().encode(golden.KEY), 5, 0))
    assert taken(frame) == [(empty, 5, 0)]


@pytest.mark.parametrize("compression", PayloadCompression)
def test_data_tells_whether_it_may_have_gaps(compression: PayloadCompression) -> None:
    for may_have_gaps in (True, False):
        message = replace(golden.DATA, batches=(bytes(5000),), may_have_gaps=may_have_gaps)
        frame = b"".join(encode_data(message, Keys().encode(golden.KEY), 5000, 5000, compression))
        assert frame[3] == (compression if frame[3] & 3 else 0) | (4 if may_have_gaps else 0)
        assert taken(frame) == [(message, 5000, 5000)]


@pytest.mark.parametrize("frame", [golden.LZ4_FRAME, golden.ZSTD_FRAME], ids=["lz4", "zstd"])
def test_compressed_data(frame: bytes) -> None:
    assert taken(frame) == [(golden.LZ4_DATA, 32, 32)]


def test_repair() -> None:
    assert b"".join(encode_repair(golden.REPAIR, Keys().encode(golden.KEY))) == golden.REPAIR_FRAME
    assert taken(golden.REPAIR_FRAME) == [golden.REPAIR]


def test_hello_and_challenge() -> None:
    hello = Hello("cluster", 2, 5, Feature.ZSTD | Feature.GAPS, Authentication.SECRET, b"L" * 32)
    assert hello.encode() == golden.HELLO
    inbox = Inbox()
    inbox.feed(golden.HELLO)
    assert take_hello(inbox) == (hello, golden.HELLO)
    challenge = Challenge(
        "cluster", 2, 9, Feature.ZSTD | Feature.GAPS, Authentication.SECRET, b"F" * 32, 1 << 24, 1 << 27
    )
    assert challenge.encode() == golden.CHALLENGE
    assert decode_challenge(memoryview(golden.CHALLENGE)[8:-4]) == challenge


def test_proofs() -> None:
    transcript = golden.HANDSHAKE + golden.HELLO + golden.CHALLENGE
    for label in (LEADER_LABEL, FOLLOWER_LABEL):
        # The HMAC of RFC 2104, from its definition.
        block = b"secret".ljust(64, b"\0")
        inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block) + label + transcript).digest()
        expected = hashlib.sha256(bytes(byte ^ 0x5C for byte in block) + inner).digest()
        assert prove(Authentication.SECRET, b"secret", label, transcript) == expected
    assert prove(Authentication.TLS, b"", LEADER_LABEL, transcript) == b""


def test_a_whole_handshake() -> None:
    shared = {"cluster_id": "cluster", "authentication": Authentication.SECRET, "secret": b"secret"}
    leader = LeaderLink(
        LinkSettings(node_id=1, incarnation=5, mode=1, compression=PayloadCompression.ZSTD, **shared), 2, b"L" * 32, 0
    )
    follower = FollowerLink(LinkSettings(node_id=2, incarnation=9, **shared), b"F" * 32, 0)
    (first,) = leader.start()
    assert isinstance(first, Write)
    assert b"".join(first.buffers) == golden.HANDSHAKE + golden.HELLO
    (second,) = follower.feed(b"".join(first.buffers), 0)
    assert isinstance(second, Write)
    assert b"".join(second.buffers) == bytes(11) + golden.CHALLENGE


# ── round trips ─────────────────────────────────────────────────────────────────────────────────────────────────────

OFFSETS = st.integers(0, 2**63 - 1)
KEYS = st.tuples(st.uuids(), st.integers(0, 2**31 - 1))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "partition": KEYS,
    "epoch": st.integers(0, 2**31 - 1),
    "session": st.integers(0, 2**32 - 1),
    "request": st.integers(0, 2**32 - 1),
    "bytes_max": st.integers(0, 2**32 - 1),
    "unclean_epoch": st.integers(-1, 2**31 - 1),
    "last_epoch": st.integers(-1, 2**31 - 1),
    "end_epoch": st.integers(-1, 2**31 - 1),
    "known_epoch": st.integers(-1, 2**31 - 1),
    "flags": st.integers(0, 3).map(m.ReplicaFlag),
    "why": st.sampled_from(m.Why),
    "code": st.integers(0, 2**16 - 1),
    "text": st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    "value": st.binary(max_size=40),
    "body": st.binary(max_size=400),
}
CONTROL = st.one_of(
    *(
        st.builds(kind, **{field.name: FIELDS.get(field.name, OFFSETS) for field in fields(kind)})
        for kind in control.KIND_OF
    )
)


@settings(max_examples=200)
@given(st.lists(CONTROL, max_size=20), st.integers(1, 64))
def test_messages_round_trip(messages: list[Any], step: int) -> None:
    stream = b"".join(control.encode_control(messages, Keys()))
    inbox, found = Inbox(), []
    for start in range(0, len(stream), step):
        inbox.feed(stream[start : start + step])
        found += take(inbox)
    assert found == messages
    assert len(inbox) == 0


@given(
    st.builds(
        m.Data,
        KEYS,
        FIELDS["epoch"],
        FIELDS["session"],
        OFFSETS,
        OFFSETS,
        st.integers(0, 2**62),
        st.integers(2**62, 2**63 - 1),
        st.lists(st.binary(min_size=1, max_size=2000), max_size=4).map(tuple),
    ),
    st.sampled_from(PayloadCompression),
    st.integers(0, 2**64 - 1),
)
def test_data_round_trips(message: m.Data, compression: PayloadCompression, position: int) -> None:
    size = sum(map(len, message.batches))
    frame = b"".join(encode_data(message, Keys().encode(message.partition), position, size, compression))
    ((found, *rest),) = taken(frame)
    assert rest == [position, size]
    assert replace(found, batches=()) == replace(message, batches=())
    assert b"".join(found.batches) == b"".join(message.batches)


def test_what_does_not_shrink_is_sent_as_it_is() -> None:
    noise = hashlib.shake_256(b"noise").digest(5000)
    for compression in PayloadCompression:
        _, payload = encode_data(
            replace(golden.DATA, batches=(noise,)), Keys().encode(golden.KEY), 1, 5000, compression
        )
        assert payload is noise


# ── garbage ─────────────────────────────────────────────────────────────────────────────────────────────────────────

EVERY_FRAME = [frame for _, frame in golden.FRAMES] + [
    golden.DATA_FRAME,
    golden.REPAIR_FRAME,
    golden.LZ4_FRAME,
    golden.ZSTD_FRAME,
    golden.PROGRESS_OF_TWO,
]


def test_every_single_bit_of_a_frame_without_payload_matters() -> None:
    for frame in (golden.FRAMES[7][1], golden.DATA_FRAME[: data.DATA_HEAD_BYTES]):
        for place in range(len(frame) * 8):
            spoilt = bytearray(frame.ljust(data.DATA_HEAD_BYTES + 9, b"x"))
            spoilt[place // 8] ^= 1 << place % 8
            try:
                found = taken(bytes(spoilt))
            except LinkError:
                continue
            # The length may have grown beyond what is there: then the rest is waited for.
            assert not found


@pytest.mark.parametrize("frame", [golden.LZ4_FRAME, golden.ZSTD_FRAME], ids=["lz4", "zstd"])
def test_spoilt_compression_is_malformed_or_the_batches_own_checksums_will_tell(frame: bytes) -> None:
    for place in range(data.DATA_HEAD_BYTES * 8, len(frame) * 8):
        spoilt = bytearray(frame)
        spoilt[place // 8] ^= 1 << place % 8
        try:
            ((message, _, size),) = taken(bytes(spoilt))
        except MalformedFrame:
            continue
        assert sum(map(len, message.batches)) == size == 32


def test_compressed_bytes_expand_to_what_was_said_and_no_further() -> None:
    bomb = encode_data(
        replace(golden.DATA, batches=(bytes(1 << 20),)),
        Keys().encode(golden.KEY),
        1,
        1 << 20,
        PayloadCompression.ZSTD,
    )
    lie = data.data_head(golden.DATA, Keys().encode(golden.KEY), 1, 5000, len(bomb[1]), PayloadCompression.ZSTD)
    with pytest.raises(MalformedFrame):
        taken(lie + bomb[1])


def test_unknown_flags() -> None:
    frame = data.data_head(golden.DATA, Keys().encode(golden.KEY), 1, 9, 9, flags=3) + b"123456789"
    with pytest.raises(MalformedFrame, match="0x03"):
        taken(frame)


def test_a_frame_whose_batches_are_not_as_long_as_it_says() -> None:
    with pytest.raises(MalformedFrame, match="8 bytes"):
        taken(data.data_head(golden.DATA, Keys().encode(golden.KEY), 1, 8, 9) + b"123456789")


def test_offsets_that_go_back() -> None:
    with pytest.raises(MalformedFrame):
        taken(b"".join(encode_data(replace(golden.DATA, next_offset=28), Keys().encode(golden.KEY), 1, 9)))


def test_a_topic_id_is_told_from_its_neighbours() -> None:
    keys = Keys()
    for number in range(3):
        for topic in (UUID(int=1), UUID(int=2)):
            with pytest.raises(PartitionUnknown):
                keys.decode(keys.encode((topic, number)))
            keys.open((topic, number))
            assert keys.decode(keys.encode((topic, number))) == (topic, number)


def test_bad_checksum_has_a_name() -> None:
    with pytest.raises(BadChecksum):
        taken(golden.FRAMES[7][1][:-1] + b"\0")


def up() -> tuple[LeaderLink, FollowerLink]:
    leader = LeaderLink(LinkSettings(node_id=1, cluster_id="c", incarnation=1), 2, b"L" * 32, 0)
    follower = FollowerLink(LinkSettings(node_id=2, cluster_id="c", incarnation=1, takes_version_1=True), b"F" * 32, 0)
    (hello,) = leader.start()
    answers = follower.feed(hello.buffers[0], 0)  # type: ignore[union-attr]
    proofs = leader.feed(answers[0].buffers[0], 0)  # type: ignore[union-attr]
    ends = follower.feed(proofs[0].buffers[0], 0)  # type: ignore[union-attr]
    leader.feed(ends[0].buffers[0], 0)  # type: ignore[union-attr]
    assert leader.peer is not None
    assert follower.peer is not None
    return leader, follower


PIECES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(EVERY_FRAME),
    st.tuples(st.sampled_from(EVERY_FRAME), st.integers(0, 200), st.integers(1, 255)).map(
        lambda spoil: bytes(byte ^ (spoil[2] if place == spoil[1] else 0) for place, byte in enumerate(spoil[0]))
    ),
    st.tuples(st.integers(0, 40), st.binary(max_size=120)).map(
        lambda made: golden.sealed(f"5732 {made[0]:02x} 00 {len(made[1]) + 4:08x}" + made[1].hex())
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=8), st.sampled_from(["fresh", "up"]), st.sampled_from(["leader", "follower"]))
def test_garbage_ends_a_link_by_name_and_never_otherwise(pieces: list[bytes], state: str, side: str) -> None:
    leader, follower = up()
    if state == "fresh":
        leader = LeaderLink(leader.settings, 2, b"L" * 32, 0)
        leader.start()
        follower = FollowerLink(follower.settings, b"F" * 32, 0)
    link: LeaderLink | FollowerLink = leader if side == "leader" else follower
    for piece in pieces:
        was_closed = link.is_closed
        effects = link.feed(piece, 0)
        assert not (was_closed and effects)
        for effect in effects:
            if isinstance(effect, Deliver):
                for message in effect.messages:
                    assert not isinstance(message, m.Data) or message.partition in link._keys
    assert isinstance(link.fail(WalstreamError("enough")), list)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=300), st.sampled_from([b"", golden.HANDSHAKE, golden.HANDSHAKE + golden.HELLO[:20], bytes(11)])
)
def test_strangers(garbage: bytes, beginning: bytes) -> None:
    follower = FollowerLink(LinkSettings(node_id=2, cluster_id="c", incarnation=1, takes_version_1=True), b"F" * 32, 0)
    follower.feed(beginning + garbage, 0)
    leader = LeaderLink(LinkSettings(node_id=1, cluster_id="c", incarnation=1), 2, b"L" * 32, 0)
    leader.start()
    leader.feed(beginning + garbage, 0)
    assert leader.peer is None
