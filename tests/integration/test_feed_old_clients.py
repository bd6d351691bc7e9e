"""Clients of the RFC's first version: a program made from its messages alone, without anything of walstream's.

The messages stand here as RFC-010 has them. They have the names of ours, so the program runs in a process of its own,
with stubs that protoc makes for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from grpc_tools import protoc

from walstream.feed.process import FeedProcess

from .feed_processes import MakeFeed, create_feed_topic, write
from .support import MakeNode

RFC = """
syntax = "proto3";
package kdb.wal.v1;

message WalEntry {
  string   lsn             = 1;
  uint64   committed_at_ms = 2;
  string   tenant_id       = 3;
  string   key_prefix      = 4;
  OpType   op_type         = 5;
  bytes    key             = 6;
  bytes    value           = 7;
  uint64   hlc_ts          = 8;
  bytes    checksum        = 9;
}

enum OpType { OP_PUT = 0; OP_DELETE = 1; OP_BATCH = 2; }

message WalBatch {
  repeated WalEntry entries = 1;
  string            first_lsn = 2;
  string            last_lsn  = 3;
  Compression       compression = 4;
}

enum Compression { NONE = 0; SNAPPY = 1; ZSTD = 2; }

service WalStream {
  rpc Subscribe(SubscribeRequest) returns (stream WalResponse);
  rpc Ack(AckRequest) returns (AckResponse);
  rpc GetLSN(GetLSNRequest) returns (GetLSNResponse);
}

message SubscribeRequest {
  string start_lsn        = 1;
  string tenant_filter    = 2;
  string key_prefix_filter = 3;
  uint32 batch_size_hint  = 4;
}

message WalResponse {
  oneof payload {
    WalBatch batch       = 1;
    Heartbeat heartbeat  = 2;
    string    error      = 3;
  }
}

message Heartbeat { string current_lsn = 1; }
message AckRequest  { string ack_lsn = 1; }
message AckResponse { string watermark_lsn = 1; }
message GetLSNRequest  {}
message GetLSNResponse { string head_lsn = 1; string oldest_lsn = 2; }
"""

PROGRAM = """
import json, sys
import crc32c, grpc
import wal_pb2 as wal, wal_pb2_grpc
from google.protobuf.json_format import MessageToDict

address, token, count, request = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
metadata = (("authorization", "Bearer " + token),)
stub = wal_pb2_grpc.WalStreamStub(grpc.insecure_channel(address))
found = {"entries": [], "sizes": [], "compressions": [], "error": "", "status": "", "beat": "", "watermark": ""}
try:
    for response in stub.Subscribe(wal.SubscribeRequest(**request), metadata=metadata, timeout=60):
        kind = response.WhichOneof("payload")
        if kind == "batch":
            batch = response.batch
            assert (batch.entries[0].lsn, batch.entries[-1].lsn) == (batch.first_lsn, batch.last_lsn)
            for entry in batch.entries:
                assert entry.checksum == crc32c.crc32c(entry.key + entry.value).to_bytes(4, "big")
                assert entry.hlc_ts == int(entry.lsn.split(".")[0], 16)
                found["entries"].append([entry.lsn, entry.tenant_id, entry.key_prefix, entry.op_type,
                                         entry.key.decode(), entry.value.decode(), entry.committed_at_ms])
            found["sizes"].append(len(batch.entries))
            found["compressions"].append(batch.compression)
            answer = stub.Ack(wal.AckRequest(ack_lsn=batch.last_lsn), metadata=metadata, timeout=30)
            found["watermark"] = answer.watermark_lsn
        elif kind == "heartbeat":
            found["beat"] = response.heartbeat.current_lsn
            if len(found["entries"]) >= count:
                break
        else:
            found["error"] = response.error
except grpc.RpcError as error:
    found["status"] = error.code().name
found["lsn"] = MessageToDict(stub.GetLSN(wal.GetLSNRequest(), metadata=metadata, timeout=30))
print(json.dumps(found))
"""


def make_client(folder: Path) -> None:
    (folder / "wal.proto").write_text(RFC)
    (folder / "program.py").write_text(PROGRAM)
    options = [f"-I{folder}", f"--python_out={folder}", f"--grpc_python_out={folder}", str(folder / "wal.proto")]
    assert protoc.main(["protoc", *options]) == 0


def run(folder: Path, feed: FeedProcess, token: str, count: int, **request: Any) -> dict[str, Any]:
    command = [sys.executable, str(folder / "program.py"), feed.address, token, str(count), json.dumps(request)]
    finished = subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True, timeout=100)
    assert finished.returncode == 0, finished.stderr
    document: dict[str, Any] = json.loads(finished.stdout)
    return document


def test_a_client_of_the_first_version(make_node: MakeNode, make_feed: MakeFeed, tmp_path: Path) -> None:
    make_client(tmp_path)
    node = make_node()
    create_feed_topic(node, "orders", 2)
    for number in range(20):
        write(node, "orders", [b"%d" % number], partition=number % 2, tenant="acme", key=b"k%d" % number)
    write(node, "orders", [b"long words " * 500] * 20, tenant="acme", key=b"long")
    write(node, "orders", [b"not its own"], tenant="other")
    feed = make_feed(node, heartbeat_ms=200)
    token = feed.token("old", "replication", "acme")
    found = run(tmp_path, feed, token, 40, batch_size_hint=7)
    entries = found["entries"]
    assert [entry[4:6] for entry in entries[:20]] == [[f"k{number}", str(number)] for number in range(20)]
    assert len(entries) == 40
    assert {(entry[1], entry[2], entry[3]) for entry in entries} == {("acme", "walstream:acme:orders:", 0)}
    assert [entry[0] for entry in entries] == sorted({entry[0] for entry in entries})
    assert all(entry[6] > 1_700_000_000_000 for entry in entries)
    assert max(found["sizes"]) <= 7
    assert set(found["compressions"]) == {0}, "it has not said that it can read anything else"
    assert found["watermark"] == entries[-1][0]
    assert found["beat"] == found["lsn"]["headLsn"] > entries[-1][0], "the head is everybody's"
    again = run(tmp_path, feed, token, 1, start_lsn=entries[-1][0])
    assert [entry[0] for entry in again["entries"]] == [entries[-1][0]], "at the last acknowledged, inclusive"
    only = run(tmp_path, feed, token, 20, start_lsn="", key_prefix_filter="walstream:acme:orders:long")
    assert {entry[4] for entry in only["entries"]} == {"long"}


def test_what_a_client_of_the_first_version_is_refused(
    make_node: MakeNode, make_feed: MakeFeed, tmp_path: Path
) -> None:
    make_client(tmp_path)
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"1"], tenant="acme")
    feed = make_feed(node)
    token = feed.token("old", "replication", "acme")
    for request, status in (
        ({"tenant_filter": "other"}, "PERMISSION_DENIED"),
        ({"start_lsn": "1.2.3"}, "INVALID_ARGUMENT"),
        ({"start_lsn": "ffffffffffffffff.0000000001.0000000001"}, "OUT_OF_RANGE"),
    ):
        found = run(tmp_path, feed, token, 1, **request)
        assert (found["status"], bool(found["error"]), found["entries"]) == (status, True, [])
