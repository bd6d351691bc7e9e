"""Protocol version 2 as bytes, written out by hand from its description: a field per line.

Only the checksum at the end of each frame was computed, by a CRC-32C of its own below (the definition of the sum, bit
by bit), which is held to the value that every description of it names.
"""

from __future__ import annotations

from uuid import UUID

from walstream.replication import messages as m
from walstream.replication.messages import ReplicaFlag, Why

TOPIC = UUID("00112233-4455-6677-8899-aabbccddeeff")
KEY = (TOPIC, 3)
_PLACE = "00112233445566778899aabbccddeeff 00000003 00000007 00000002"  # topic id, partition 3, epoch 7, session 2


def crc32c(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283


def sealed(head: str, payload: str = "") -> bytes:
    """Return a frame: what stands before the checksum, the checksum, the payload."""
    data = bytes.fromhex(head)
    return data + crc32c(data).to_bytes(4, "big") + bytes.fromhex(payload)


# Header: 5732 | type | flags | length of the fields and four bytes of checksum, and of the payload.
FRAMES: list[tuple[m.Message, bytes]] = [
    (m.Failure(5, "no"), sealed("5732 03 00 0000000a  0005 0002 6e6f")),
    (m.Heartbeat(1_700_000_000_000), sealed("5732 04 00 0000000c  0000018bcfe56800")),
    (m.HeartbeatAck(1_700_000_000_000), sealed("5732 05 00 0000000c  0000018bcfe56800")),
    (m.Credit(16_777_216), sealed("5732 06 00 0000000c  0000000001000000")),
    (m.CreditNeeded(1_048_576), sealed("5732 07 00 0000000c  0000000000100000")),
    (m.Catalogue(9, b"{}"), sealed("5732 08 00 0000000e  0000000000000009 7b7d")),
    (m.CatalogueAck(9), sealed("5732 09 00 0000000c  0000000000000009")),
    (
        m.Open(KEY, 7, 2, 10, 30, 20, 25, -1),
        sealed(
            f"5732 10 00 00000044 {_PLACE}"
            "000000000000000a"  # log start 10
            "000000000000001e"  # log end 30
            "0000000000000014"  # high watermark 20
            "0000000000000019"  # its epoch begins at 25
            "ffffffff"  # no unclean epoch
        ),
    ),
    (
        m.State(KEY, 7, 2, 10, 29, 6, 20, ReplicaFlag.UNCLEAN | ReplicaFlag.DAMAGED),
        sealed(
            f"5732 11 00 0000003d {_PLACE}"
            "000000000000000a"  # log start 10
            "000000000000001d"  # log end 29
            "00000006"  # last epoch 6
            "0000000000000014"  # high watermark 20
            "03"  # unclean, damaged
        ),
    ),
    (m.Accept(KEY, 7, 2, 29), sealed(f"5732 12 00 00000028 {_PLACE} 000000000000001d")),
    (m.Diverging(KEY, 7, 2, 5, 27), sealed(f"5732 13 00 0000002c {_PLACE} 00000005 000000000000001b")),
    (m.Reset(KEY, 7, 2, 10), sealed(f"5732 14 00 00000028 {_PLACE} 000000000000000a")),
    (m.Rewind(KEY, 7, 2, 15), sealed(f"5732 15 00 00000028 {_PLACE} 000000000000000f")),
    (m.Refused(KEY, 7, 2, Why.FENCED, 8), sealed(f"5732 16 00 00000025 {_PLACE} 01 00000008")),
    (
        m.Watermark(KEY, 7, 2, 28, 10, 30),
        sealed(f"5732 18 00 00000038 {_PLACE} 000000000000001c 000000000000000a 000000000000001e"),
    ),
    (
        m.Progress(KEY, 7, 2, 30, 28, ReplicaFlag.NONE),
        sealed(f"5732 19 00 00000031 {_PLACE} 000000000000001e 000000000000001c 00"),
    ),
    (m.Resync(KEY, 7, 2, 29), sealed(f"5732 1a 00 00000028 {_PLACE} 000000000000001d")),
    (
        m.DigestRequest(KEY, 7, 2, 4, 10, 29),
        sealed(f"5732 1b 00 00000034 {_PLACE} 00000004 000000000000000a 000000000000001d"),
    ),
    (
        m.DigestAnswer(KEY, 7, 2, 4, 10, b"\xab" * 4),
        sealed(f"5732 1c 00 00000030 {_PLACE} 00000004 000000000000000a abababab"),
    ),
    (
        m.RepairRequest(KEY, 7, 2, 5, 12, 14, 65_536),
        sealed(f"5732 1d 00 00000038 {_PLACE} 00000005 000000000000000c 000000000000000e 00010000"),
    ),
]

PROGRESS_OF_TWO = sealed(
    f"5732 19 00 0000005e {_PLACE} 000000000000001e 000000000000001c 00"
    "00112233445566778899aabbccddeeff 00000004 00000007 00000002 0000000000000005 0000000000000004 02"
)

DATA = m.Data(KEY, 7, 2, 28, 10, 29, 31, (b"1234", b"56789"))
DATA_POSITION = 1009
DATA_FRAME = sealed(
    f"5732 17 00 00000055 {_PLACE}"  # 72 bytes of fields, 4 of checksum, 9 of batches
    "000000000000001c"  # high watermark 28
    "000000000000000a"  # log start 10
    "000000000000001d"  # from 29
    "000000000000001f"  # to 31
    "00000000000003f1"  # 1009 bytes of batches on this link, with these
    "00000009",  # 9 bytes of batches
    "313233343536373839",
)

REPAIR = m.RepairData(KEY, 7, 2, 5, 12, 14, (b"123456789",))
REPAIR_FRAME = sealed(
    f"5732 1e 00 00000041 {_PLACE}"  # 52 bytes of fields, 4 of checksum, 9 of batches
    "00000005"  # request 5
    "000000000000000c"  # from 12
    "000000000000000e"  # to 14
    "00000009",  # 9 bytes of batches
    "313233343536373839",
)

# An lz4 block by hand: a token of 1 literal and a match of 4 + 15, its offset 1, the match's length goes on with 7
# (so 26 bytes), then a last token of 5 literals and these. 1 + 26 + 5 = 32 bytes of "a".
LZ4_PAYLOAD = "1f 61 0100 07 50 6161616161"
LZ4_DATA = m.Data(KEY, 7, 2, 28, 10, 29, 31, (b"a" * 32,))
LZ4_FRAME = sealed(
    f"5732 17 01 00000057 {_PLACE}"  # 72, 4 and 11
    "000000000000001c 000000000000000a 000000000000001d 000000000000001f 0000000000000020 00000020",
    LZ4_PAYLOAD,
)

# A zstd frame by hand: magic, a header that says "one segment, 32 bytes", the last block, of type RLE, 32 times "a".
ZSTD_PAYLOAD = "28b52ffd 20 20 030100 61"
ZSTD_FRAME = sealed(
    f"5732 17 02 00000056 {_PLACE}"  # 72, 4 and 10
    "000000000000001c 000000000000000a 000000000000001d 000000000000001f 0000000000000020 00000020",
    ZSTD_PAYLOAD,
)

HANDSHAKE = bytes.fromhex("0002 0000000000000001 01")  # version 2, node 1, sync
HELLO = bytes.fromhex(
    "003e"  # 62 bytes
    "0007 636c7573746572"  # "cluster"
    "0000000000000002"  # to node 2
    "0000000000000005"  # incarnation 5
    "00000006"  # zstd, gaps
    "01" + "4c" * 32  # by a shared secret  # nonce
)
CHALLENGE = sealed(
    "5732 01 00 0000004e"  # 74 and 4
    "0007 636c7573746572"  # "cluster"
    "0000000000000002"  # node 2
    "0000000000000009"  # incarnation 9
    "00000006"  # zstd, gaps
    "01"  # by a shared secret
    + "46"
    * 32  # nonce
    + "0000000001000000"  # 16 MiB of credit
    "08000000"  # frames of up to 128 MiB
)
