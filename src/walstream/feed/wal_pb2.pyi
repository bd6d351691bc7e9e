from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OP_PUT: _ClassVar[OpType]
    OP_DELETE: _ClassVar[OpType]
    OP_BATCH: _ClassVar[OpType]
    OP_TRUNCATE: _ClassVar[OpType]

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[Compression]
    SNAPPY: _ClassVar[Compression]
    ZSTD: _ClassVar[Compression]

class Framing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECORDS: _ClassVar[Framing]
    TRANSACTIONS: _ClassVar[Framing]
OP_PUT: OpType
OP_DELETE: OpType
OP_BATCH: OpType
OP_TRUNCATE: OpType
NONE: Compression
SNAPPY: Compression
ZSTD: Compression
RECORDS: Framing
TRANSACTIONS: Framing

class WalEntry(_message.Message):
    __slots__ = ("lsn", "committed_at_ms", "tenant_id", "key_prefix", "op_type", "key", "value", "hlc_ts", "checksum", "topic", "partition", "offset", "commit_lsn", "seq", "txid", "local_lsn", "headers")
    LSN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    OP_TYPE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    HLC_TS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    COMMIT_LSN_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TXID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_LSN_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    lsn: str
    committed_at_ms: int
    tenant_id: str
    key_prefix: str
    op_type: OpType
    key: bytes
    value: bytes
    hlc_ts: int
    checksum: bytes
    topic: str
    partition: int
    offset: int
    commit_lsn: int
    seq: int
    txid: int
    local_lsn: int
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    def __init__(self, lsn: _Optional[str] = ..., committed_at_ms: _Optional[int] = ..., tenant_id: _Optional[str] = ..., key_prefix: _Optional[str] = ..., op_type: _Optional[_Union[OpType, str]] = ..., key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., hlc_ts: _Optional[int] = ..., checksum: _Optional[bytes] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., commit_lsn: _Optional[int] = ..., seq: _Optional[int] = ..., txid: _Optional[int] = ..., local_lsn: _Optional[int] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: bytes
    def __init__(self, name: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class BatchWrite(_message.Message):
    __slots__ = ("entries", "commit_lsn", "txid", "commit_time_ms", "part", "is_last", "snapshot")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_LSN_FIELD_NUMBER: _ClassVar[int]
    TXID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[WalEntry]
    commit_lsn: int
    txid: int
    commit_time_ms: int
    part: int
    is_last: bool
    snapshot: str
    def __init__(self, entries: _Optional[_Iterable[_Union[WalEntry, _Mapping]]] = ..., commit_lsn: _Optional[int] = ..., txid: _Optional[int] = ..., commit_time_ms: _Optional[int] = ..., part: _Optional[int] = ..., is_last: _Optional[bool] = ..., snapshot: _Optional[str] = ...) -> None: ...

class WalBatch(_message.Message):
    __slots__ = ("entries", "first_lsn", "last_lsn", "compression", "compressed", "resume_token")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FIRST_LSN_FIELD_NUMBER: _ClassVar[int]
    LAST_LSN_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[WalEntry]
    first_lsn: str
    last_lsn: str
    compression: Compression
    compressed: bytes
    resume_token: bytes
    def __init__(self, entries: _Optional[_Iterable[_Union[WalEntry, _Mapping]]] = ..., first_lsn: _Optional[str] = ..., last_lsn: _Optional[str] = ..., compression: _Optional[_Union[Compression, str]] = ..., compressed: _Optional[bytes] = ..., resume_token: _Optional[bytes] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("start_lsn", "tenant_filter", "key_prefix_filter", "batch_size_hint", "accept_compression", "subscriber_id", "resume_token", "framing", "topics", "credit_entries", "accept_watermarks", "capture", "message_bytes_max")
    START_LSN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FILTER_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FILTER_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_HINT_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FRAMING_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_WATERMARKS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    start_lsn: str
    tenant_filter: str
    key_prefix_filter: str
    batch_size_hint: int
    accept_compression: _containers.RepeatedScalarFieldContainer[Compression]
    subscriber_id: str
    resume_token: bytes
    framing: Framing
    topics: _containers.RepeatedScalarFieldContainer[str]
    credit_entries: int
    accept_watermarks: bool
    capture: str
    message_bytes_max: int
    def __init__(self, start_lsn: _Optional[str] = ..., tenant_filter: _Optional[str] = ..., key_prefix_filter: _Optional[str] = ..., batch_size_hint: _Optional[int] = ..., accept_compression: _Optional[_Iterable[_Union[Compression, str]]] = ..., subscriber_id: _Optional[str] = ..., resume_token: _Optional[bytes] = ..., framing: _Optional[_Union[Framing, str]] = ..., topics: _Optional[_Iterable[str]] = ..., credit_entries: _Optional[int] = ..., accept_watermarks: _Optional[bool] = ..., capture: _Optional[str] = ..., message_bytes_max: _Optional[int] = ...) -> None: ...

class WalResponse(_message.Message):
    __slots__ = ("batch", "heartbeat", "error", "watermark")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    batch: WalBatch
    heartbeat: Heartbeat
    error: str
    watermark: HeartbeatWatermark
    def __init__(self, batch: _Optional[_Union[WalBatch, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., error: _Optional[str] = ..., watermark: _Optional[_Union[HeartbeatWatermark, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("current_lsn", "resolved_lsn", "held_back_by")
    CURRENT_LSN_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_LSN_FIELD_NUMBER: _ClassVar[int]
    HELD_BACK_BY_FIELD_NUMBER: _ClassVar[int]
    current_lsn: str
    resolved_lsn: str
    held_back_by: str
    def __init__(self, current_lsn: _Optional[str] = ..., resolved_lsn: _Optional[str] = ..., held_back_by: _Optional[str] = ...) -> None: ...

class HeartbeatWatermark(_message.Message):
    __slots__ = ("watermark_lsn",)
    WATERMARK_LSN_FIELD_NUMBER: _ClassVar[int]
    watermark_lsn: str
    def __init__(self, watermark_lsn: _Optional[str] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("ack_lsn", "subscriber_id")
    ACK_LSN_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_ID_FIELD_NUMBER: _ClassVar[int]
    ack_lsn: str
    subscriber_id: str
    def __init__(self, ack_lsn: _Optional[str] = ..., subscriber_id: _Optional[str] = ...) -> None: ...

class AckResponse(_message.Message):
    __slots__ = ("watermark_lsn", "acked_lsn")
    WATERMARK_LSN_FIELD_NUMBER: _ClassVar[int]
    ACKED_LSN_FIELD_NUMBER: _ClassVar[int]
    watermark_lsn: str
    acked_lsn: str
    def __init__(self, watermark_lsn: _Optional[str] = ..., acked_lsn: _Optional[str] = ...) -> None: ...

class GetLSNRequest(_message.Message):
    __slots__ = ("framing", "capture")
    FRAMING_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_FIELD_NUMBER: _ClassVar[int]
    framing: Framing
    capture: str
    def __init__(self, framing: _Optional[_Union[Framing, str]] = ..., capture: _Optional[str] = ...) -> None: ...

class GetLSNResponse(_message.Message):
    __slots__ = ("head_lsn", "oldest_lsn", "resolved_lsn", "watermark_lsn")
    HEAD_LSN_FIELD_NUMBER: _ClassVar[int]
    OLDEST_LSN_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_LSN_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_LSN_FIELD_NUMBER: _ClassVar[int]
    head_lsn: str
    oldest_lsn: str
    resolved_lsn: str
    watermark_lsn: str
    def __init__(self, head_lsn: _Optional[str] = ..., oldest_lsn: _Optional[str] = ..., resolved_lsn: _Optional[str] = ..., watermark_lsn: _Optional[str] = ...) -> None: ...
