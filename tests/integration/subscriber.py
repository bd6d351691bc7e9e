"""A subscriber in a process of its own: stock grpcio, the messages of wal.proto, and nothing else of walstream's.

    python subscriber.py ADDRESS TOKEN FOLDER [REQUEST]

REQUEST has further fields of SubscribeRequest, as JSON. It keeps two files in its folder: `entries`, a line for each
entry that it has processed (the LSN, and the WalEntry in base64), and `acked`, the last LSN that it knows to be
acknowledged. However it is killed, it begins again behind that one: lines beyond it are thrown away, because nobody was
told that they were processed. Of heartbeats it keeps the last, in `heartbeat`.
"""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import crc32c
import grpc

from walstream.feed import wal_pb2

SERVICE = "/kdb.wal.v1.WalStream/"


def after(lsn: str) -> str:
    stamp, region, index = lsn.split(".")
    number = (int(stamp, 16) << 64 | int(region) << 32 | int(index)) + 1
    return f"{number >> 64:016x}.{number >> 32 & 0xFFFFFFFF:010d}.{number & 0xFFFFFFFF:010d}"


def restore(folder: Path) -> str:
    """Return where to begin, having thrown away what is not acknowledged."""
    acked = (folder / "acked").read_text() if (folder / "acked").exists() else ""
    lines = (folder / "entries").read_text().splitlines(keepends=True) if (folder / "entries").exists() else []
    kept = [line for line in lines if line.endswith("\n") and line.split(" ", 1)[0] <= acked]
    (folder / "entries").write_text("".join(kept))
    return after(acked) if acked else "oldest"


def main(address: str, token: str, folder: Path, more: dict[str, Any]) -> None:
    channel = grpc.insecure_channel(address)
    metadata = (("authorization", f"Bearer {token}"),)
    subscribe = channel.unary_stream(
        SERVICE + "Subscribe", wal_pb2.SubscribeRequest.SerializeToString, wal_pb2.WalResponse.FromString
    )
    ack = channel.unary_unary(SERVICE + "Ack", wal_pb2.AckRequest.SerializeToString, wal_pb2.AckResponse.FromString)
    request = wal_pb2.SubscribeRequest(start_lsn=restore(folder), batch_size_hint=97, **more)
    with (folder / "entries").open("a") as output:
        for response in subscribe(request, metadata=metadata, wait_for_ready=True):
            if response.WhichOneof("payload") != "batch":
                (folder / "heartbeat").write_text(response.heartbeat.resolved_lsn)
                continue
            for entry in response.batch.entries:
                expected = crc32c.crc32c(entry.key + entry.value).to_bytes(4, "big")
                assert entry.checksum == expected, entry.lsn
                output.write(f"{entry.lsn} {b64encode(entry.SerializeToString()).decode()}\n")
            output.flush()
            answer = ack(wal_pb2.AckRequest(ack_lsn=response.batch.last_lsn), metadata=metadata)
            assert answer.acked_lsn == response.batch.last_lsn
            temporary = folder / "acked.new"
            temporary.write_text(answer.acked_lsn)
            temporary.replace(folder / "acked")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4] if len(sys.argv) > 4 else "{}"))
