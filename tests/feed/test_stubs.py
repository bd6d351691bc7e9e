"""The generated messages are those of wal.proto, and the RFC's numbers are what they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_tools import protoc

from walstream.feed import wal_pb2

SOURCE = Path(__file__).parents[2] / "src"
PROTO = "walstream/feed/wal.proto"

RFC = {
    "WalEntry": "lsn committed_at_ms tenant_id key_prefix op_type key value hlc_ts checksum",
    "WalBatch": "entries first_lsn last_lsn compression",
    "SubscribeRequest": "start_lsn tenant_filter key_prefix_filter batch_size_hint",
    "WalResponse": "batch heartbeat error",
    "Heartbeat": "current_lsn",
    "AckRequest": "ack_lsn",
    "AckResponse": "watermark_lsn",
    "GetLSNResponse": "head_lsn oldest_lsn",
}


def test_they_are_generated_from_the_proto(tmp_path: Path) -> None:
    made = protoc.main(
        ["protoc", f"-I{SOURCE}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", str(SOURCE / PROTO)]
    )
    assert made == 0
    for name in ("wal_pb2.py", "wal_pb2.pyi"):
        written = (tmp_path / "walstream" / "feed" / name).read_text(encoding="utf-8")
        assert written == (SOURCE / "walstream" / "feed" / name).read_text(encoding="utf-8"), "run `make proto`"


@pytest.mark.parametrize("message", RFC)
def test_fields_of_the_rfc_have_its_numbers(message: str) -> None:
    fields = wal_pb2.DESCRIPTOR.message_types_by_name[message].fields
    names = RFC[message].split()
    assert [field.name for field in fields if field.number <= len(names)] == names


def test_the_service_is_the_rfcs() -> None:
    service = wal_pb2.DESCRIPTOR.services_by_name["WalStream"]
    assert service.full_name == "kdb.wal.v1.WalStream"
    assert [method.name for method in service.methods] == ["Subscribe", "Ack", "GetLSN"]
    assert [method.server_streaming for method in service.methods] == [True, False, False]


def test_enums_of_the_rfc_have_its_numbers() -> None:
    assert dict(wal_pb2.OpType.items()) == {"OP_PUT": 0, "OP_DELETE": 1, "OP_BATCH": 2, "OP_TRUNCATE": 3}
    assert dict(wal_pb2.Compression.items()) == {"NONE": 0, "SNAPPY": 1, "ZSTD": 2}
