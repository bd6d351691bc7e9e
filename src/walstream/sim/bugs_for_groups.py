# ruff: noqa: ARG001, ARG005  What replaces a method has its signature.
"""Mistakes in committed offsets and in look-ups by time: planted to prove the checkers (see `planting`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from walstream.errors import WalstreamError
from walstream.log import times
from walstream.log.partition_log import PartitionLog
from walstream.log.records import Record, build_batch
from walstream.log.segment import Segment
from walstream.node import offsets_log
from walstream.node.groups.service import GroupService
from walstream.node.offsets import Change, Committed, encode
from walstream.node.offsets_log import OffsetsLog
from walstream.sim.clock import MS
from walstream.sim.planting import Bug, Patch

# ── loading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _skipping_damage() -> list[Patch]:
    return [(OffsetsLog, "_is_only_replica", lambda self: True)]


def _never_loading_again() -> list[Patch]:
    async def load(self: GroupService) -> None:
        await self._try_to_load()

    return [(GroupService, "_load", load)]


def _loading_below_an_old_high_watermark() -> list[Patch]:
    async def visible(partition: PartitionLog) -> None:
        pass

    return [(offsets_log, "_visible", visible)]


# ── committing and deleting ─────────────────────────────────────────────────────────────────────────────────────────


def _applying_only_what_was_answered() -> list[Patch]:
    def append(
        self: OffsetsLog, partition: PartitionLog, changes: list[Change], done: Callable[[WalstreamError | None], None]
    ) -> None:
        now_ms = self._store.now_ms()
        records = [Record(offset, now_ms, *encode(change)) for offset, change in enumerate(changes)]
        appended = partition.append(memoryview(build_batch(records)), now_ms=now_ms)

        def visible(error: WalstreamError | None) -> None:
            if error is None:
                for change in changes:
                    self.table.apply(change)
            done(error)

        partition.when_visible(appended.last_offset, visible)

    return [(OffsetsLog, "_append", append)]


def _answering_before_it_is_committed() -> list[Patch]:
    original = OffsetsLog._append

    def append(
        self: OffsetsLog, partition: PartitionLog, changes: list[Change], done: Callable[[WalstreamError | None], None]
    ) -> None:
        original(self, partition, changes, lambda _: None)
        done(None)

    return [(OffsetsLog, "_append", append)]


def _deleting_only_what_is_committed() -> list[Patch]:
    def keys(
        self: OffsetsLog, *, group_id: str | None = None, topics: Iterable[str] | None = None
    ) -> set[tuple[str, str, int]]:
        return {(group, *where) for group in self.table for where in self.table.of(group) if group_id in (None, group)}

    return [(OffsetsLog, "keys", keys)]


def _comparing_names_of_topics() -> list[Patch]:
    def is_of_deleted_topic(self: OffsetsLog, topic: str, committed: Committed) -> bool:
        return topic not in self._store.catalogue.topics

    return [(OffsetsLog, "is_of_deleted_topic", is_of_deleted_topic)]


def _raising_what_the_log_raises() -> list[Patch]:
    @contextmanager
    def writing(self: GroupService) -> Iterator[None]:
        yield

    return [(GroupService, "_writing", writing)]


# ── looking up times ────────────────────────────────────────────────────────────────────────────────────────────────


def _comparing_headers() -> list[Patch]:
    def max_timestamp(segments: Sequence[Segment], start: int, end: int) -> tuple[int, int] | None:
        largest = max((segment.index.max_timestamp for segment in segments), default=-1)
        if largest < 0:
            return None
        found = times.offset_for_time(segments, largest, start, end)
        if found is not None:
            return found
        largest = max(
            (
                header.max_timestamp
                for segment in segments
                for _, header in segment.headers(0, segment.durable_size)
                if start <= header.base_offset < end and header.record_count
            ),
            default=-1,
        )
        return times.offset_for_time(segments, largest, start, end) if largest >= 0 else None

    return [(times, "max_timestamp", max_timestamp)]


def _looking_above_the_high_watermark() -> list[Patch]:
    original = times.offset_for_time

    def offset_for_time(segments: Sequence[Segment], timestamp_ms: int, start: int, end: int) -> tuple[int, int] | None:
        return original(segments, timestamp_ms, start, 1 << 62)

    return [(times, "offset_for_time", offset_for_time)]


BUGS_FOR_GROUPS = (
    Bug(
        "skipping damage", "A coordinator loads what it can read, although another replica has the rest.",
        ("committed offsets",),
        _skipping_damage, ("rot", "rot", "handover"), (20 * MS, 200 * MS), has_groups=True,
    ),
    Bug(
        "never loading again", "A load of the offsets that failed is not retried.",
        ("coordinator resumes",),
        _never_loading_again, ("handover", "kill"), (20 * MS, 200 * MS), has_groups=True,
    ),
    Bug(
        "loading below an old high watermark", "A new coordinator loads what it can see, not to the end of its log.",
        ("committed offsets", "deleted offsets"),
        _loading_below_an_old_high_watermark, ("handover", "isolate"), (20 * MS, 200 * MS), has_groups=True,
    ),
    Bug(
        "applying only what was answered", "A commit that is refused after its append is left out of the table.",
        ("deleted offsets", "committed offsets"),
        _applying_only_what_was_answered, ("isolate", "pause", "slow disk"), (20 * MS, 200 * MS), has_groups=True,
    ),
    Bug(
        "answering before it is committed", "A commit is acknowledged when it is appended.",
        ("committed offsets", "deleted offsets"),
        _answering_before_it_is_committed, ("isolate", "kill"), (20 * MS, 200 * MS), has_groups=True,
    ),
    Bug(
        "deleting only what is committed", "A deletion leaves out the commits that are appended and not committed yet.",
        ("deleted offsets",),
        _deleting_only_what_is_committed, ("slow disk", "isolate"), (20 * MS, 200 * MS), has_groups=True,
    ),
    Bug(
        "comparing names of topics", "A topic that is created again begins with the offsets of the deleted one.",
        ("deleted offsets",),
        _comparing_names_of_topics, ("slow disk",), (20 * MS, 200 * MS), has_groups=True, has_topic_changes=True,
    ),
    Bug(
        "raising what the log raises", "A commit is answered with the errors of a partition, not of a coordinator.",
        ("coordinator errors",),
        _raising_what_the_log_raises, ("isolate", "handover"), (20 * MS, 200 * MS), has_groups=True,
    ),
    Bug(
        "comparing headers", "The largest timestamp is looked for in the headers of batches only.",
        ("time look-ups",),
        _comparing_headers, ("slow disk",), (20 * MS, 200 * MS), has_trims=True, has_lookups=True,
    ),
    Bug(
        "looking above the high watermark", "A look-up by time finds records that are not committed.",
        ("time look-ups",),
        _looking_above_the_high_watermark, ("slow disk",), (20 * MS, 200 * MS), has_lookups=True,
    ),
)  # fmt: skip
