"""Topic settings: Kafka's names and text values outside, one typed object inside.

`SETTINGS` is the table of every setting a topic can have: what it means, what it may be, its default. The admin
APIs describe topics from it, and `TopicSettings.parse` refuses what is not in it. What a newer version has put into the
catalogue stays there and is ignored: `usable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from walstream.errors import InvalidTopicConfig

HOUR_MS = 60 * 60 * 1000
DAY_MS = 24 * HOUR_MS
UNLIMITED = -1
TIME_MAX = 2**63 - 1
NO_HOLD = -1


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: a topic setting as its users see it."""

    name: str
    field: str
    parse: Callable[[str], Any]
    allowed: str
    documentation: str


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """A topic's settings, typed. The defaults are those of a topic that sets nothing on a node that sets nothing."""

    compacted: bool = False
    deleted: bool = True
    retention_ms: int = 7 * DAY_MS
    retention_bytes: int = UNLIMITED
    segment_bytes: int = 128 * 1024 * 1024
    segment_ms: int = 7 * DAY_MS
    batch_bytes_max: int = 1024 * 1024 + 12
    append_time: bool = False
    timestamp_before_max_ms: int = TIME_MAX
    timestamp_after_max_ms: int = HOUR_MS
    delete_retention_ms: int = DAY_MS
    min_dirty_ratio: float = 0.5
    compression: str = "producer"
    min_isr: int = 1
    ack_before_fsync: bool = False
    hold_from_ms: int = NO_HOLD
    hold_bytes_max: int = 10 * 1024**3

    @classmethod
    def parse(cls, overrides: Mapping[str, str], defaults: TopicSettings | None = None) -> TopicSettings:
        """Read a topic's settings over the node's defaults; raises InvalidTopicConfig for what cannot be."""
        base = defaults or cls()
        values = {field.name: getattr(base, field.name) for field in fields(cls)}
        for name, text in overrides.items():
            values |= _parsed(name, text)
        return cls(**values)

    def text(self, name: str) -> str:
        """Return the value of a setting as its users write it."""
        setting = BY_NAME[name]
        if setting.field == "cleanup":
            return ",".join(word for word, on in (("compact", self.compacted), ("delete", self.deleted)) if on)
        value = getattr(self, setting.field)
        if setting.field == "append_time":
            return "LogAppendTime" if value else "CreateTime"
        return str(value).lower() if isinstance(value, bool) else str(value)


def _parsed(name: str, text: str) -> dict[str, Any]:
    """Return the fields of `TopicSettings` that a setting gives; raises InvalidTopicConfig."""
    setting = BY_NAME.get(name)
    if setting is None:
        raise InvalidTopicConfig(f"There is no topic setting {name!r}.", f"Known: {', '.join(BY_NAME)}.")
    try:
        value = setting.parse(text)
    except (ValueError, TypeError):
        raise InvalidTopicConfig(f"{name} cannot be {text!r}.", f"Allowed: {setting.allowed}.") from None
    if setting.field == "cleanup":
        compacted, deleted = value
        return {"compacted": compacted, "deleted": deleted}
    return {setting.field: value}


def usable(config: Mapping[str, str]) -> dict[str, str]:
    """Leave out what this version of walstream does not know, or cannot parse: a newer one has written it."""
    found = {}
    for name, text in config.items():
        with suppress(InvalidTopicConfig):
            _parsed(name, text)
            found[name] = text
    return found


def _cleanup(text: str) -> tuple[bool, bool]:
    words = {word.strip() for word in text.split(",")}
    if not words or words - {"compact", "delete"}:
        raise ValueError(text)
    return "compact" in words, "delete" in words


def _whole(low: int, high: int = 2**63 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return parse


def _choice(**values: Any) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text not in values:
            raise ValueError(text)
        return values[text]

    return parse


def _ratio(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise ValueError(text)
    return value


_truth = _choice(true=True, false=False)

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "cleanup.policy",
        "cleanup",
        _cleanup,
        "delete, compact or both",
        "Drop old segments, keep the last record per key, or both.",
    ),
    Setting(
        "retention.ms",
        "retention_ms",
        _whole(-1),
        "-1 or more",
        "How long records are kept, in milliseconds; -1 is forever.",
    ),
    Setting(
        "retention.bytes",
        "retention_bytes",
        _whole(-1),
        "-1 or more",
        "How many bytes a partition keeps; -1 is no limit.",
    ),
    Setting(
        "segment.bytes",
        "segment_bytes",
        _whole(1024, 2**31 - 1),
        "1024 to 2147483647",
        "A segment is closed when it would grow beyond this.",
    ),
    Setting(
        "segment.ms",
        "segment_ms",
        _whole(1),
        "1 or more",
        "A segment is closed when it is older than this, so that retention can drop it.",
    ),
    Setting(
        "max.message.bytes",
        "batch_bytes_max",
        _whole(1024, 2**30),
        "1024 to 1073741824",
        "The largest record batch the topic takes, compressed.",
    ),
    Setting(
        "message.timestamp.type",
        "append_time",
        _choice(CreateTime=False, LogAppendTime=True),
        "CreateTime or LogAppendTime",
        "Whether the producer's clock or the leader's gives a record its time.",
    ),
    Setting(
        "message.timestamp.before.max.ms",
        "timestamp_before_max_ms",
        _whole(0),
        "0 to 9223372036854775807",
        "CreateTime: a batch whose first record is earlier than the leader's clock by more is refused.",
    ),
    Setting(
        "message.timestamp.after.max.ms",
        "timestamp_after_max_ms",
        _whole(0),
        "0 to 9223372036854775807",
        "CreateTime: a batch whose latest record is later than the leader's clock by more is refused.",
    ),
    Setting(
        "delete.retention.ms",
        "delete_retention_ms",
        _whole(0),
        "0 or more",
        "How long compaction keeps a tombstone, so that slow readers see it.",
    ),
    Setting(
        "min.cleanable.dirty.ratio",
        "min_dirty_ratio",
        _ratio,
        "0.0 to 1.0",
        "How much of the log must be uncleaned before compaction runs.",
    ),
    Setting(
        "compression.type",
        "compression",
        _choice(producer="producer"),
        "producer",
        "Batches are stored as the producer compressed them.",
    ),
    Setting(
        "min.insync.replicas",
        "min_isr",
        _whole(1, 64),
        "1 to 64",
        "How many replicas must hold a record before acks=all is answered.",
    ),
    Setting(
        "walstream.unsafe.ack.before.fsync",
        "ack_before_fsync",
        _truth,
        "true or false",
        "Acknowledge once the operating system has the bytes: a power cut loses acknowledged records.",
    ),
    Setting(
        "walstream.hold.from.ms",
        "hold_from_ms",
        _whole(-1),
        "-1 or more",
        "Retention and compaction leave records with this time or a later one alone, in milliseconds; -1 is no hold.",
    ),
    Setting(
        "walstream.hold.bytes.max",
        "hold_bytes_max",
        _whole(0),
        "0 or more",
        "How many bytes of a partition a hold keeps that would be removed without it; then the oldest go.",
    ),
)

BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}
