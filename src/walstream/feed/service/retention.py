"""Retention: what the log keeps for subscribers, and who loses its place.

Owns the safe point, from which on nothing may be removed, and tells it to the log as settings of the topics. Entries
are kept for a minimum time, and beyond it for the slowest active subscriber; one that would hold back more bytes than
allowed is ended by name instead. The decisions are functions of the state; `Retention` does them, every half a minute.

A walstream node keeps to the settings. Apache Kafka does not know them: there its own `retention.ms` decides, which is
said once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from walstream import logs
from walstream.capture.kafka import TIMEOUT_S, LogAddress
from walstream.config import FeedConfig
from walstream.errors import InvalidTopicConfig, SubscriberLapsed, UnknownTopic, WalstreamError
from walstream.feed.service.ack_log import AckLog, now_ms
from walstream.feed.service.watermarks import Subscriber, Watermarks
from walstream.positions import GlobalLsn

if TYPE_CHECKING:
    from walstream.feed.reading.reading import Reading
    from walstream.feed.service.service import Service

log = logs.get(__name__)

HOLD_FROM: Final = "walstream.hold.from.ms"
HOLD_BYTES: Final = "walstream.hold.bytes.max"

INTERVAL_S: Final = 30.0
MINUTE_MS: Final = 60_000

MARGIN_MS: Final = 15 * MINUTE_MS
"""Whoever reads by transactions acknowledges commit points, whose rows were appended earlier: ten minutes at most,
because a capture whose log takes nothing for longer gives up. Only the rows of a table's snapshot may be older."""

ELSEWHERE_MS: Final = 3 * int(INTERVAL_S * 1000)
"""A subscriber that another feed serves is heard of more often than this."""


def safe_point_ms(now_ms: int, retention_minutes: int, slowest: int | None) -> int:
    """Return the time from which on everything is kept, with the slowest active subscriber at this LSN."""
    kept_ms = now_ms - retention_minutes * MINUTE_MS
    if slowest is not None:
        kept_ms = min(kept_ms, GlobalLsn(slowest).time_ms - MARGIN_MS)
    return max(0, kept_ms)


class Lag(NamedTuple):
    """How far a subscriber is behind, in what it would take to keep it."""

    subscriber: Subscriber
    entries: int
    size_bytes: int


def too_far_behind(lags: Iterable[Lag], bytes_max: int) -> list[Lag]:
    """Return those that hold back more than they may."""
    return [lag for lag in lags if lag.size_bytes > bytes_max]


class Retention:
    """Keeps the log's settings in step with the subscribers."""

    def __init__(
        self,
        config: FeedConfig,
        address: LogAddress,
        reading: Reading,
        service: Service,
        marks: Watermarks,
        acks: AckLog,
    ) -> None:
        self._config = config
        self._address = address
        self._reading = reading
        self._service = service
        self._marks = marks
        self._acks = acks
        self._admin: AdminClient | None = None
        self._is_supported = True
        self.safe_point_ms = 0
        """What the log was told last."""
        self.lapsed = 0
        """How many subscribers have lost their place."""
        self.lags: list[Lag] = []
        """How far behind those were for whom the log was last told to keep something, connected or not."""

    async def run(self, interval_s: float = INTERVAL_S) -> None:
        """Do what is due, for as long as the feed runs, whatever goes wrong in one round."""
        while True:
            try:
                await self.look()
            except WalstreamError as error:
                log.warning("retention not brought up to date", reason=error.message, hint=error.hint)
            except Exception:
                log.exception("retention failed")
            await asyncio.sleep(interval_s)

    async def look(self) -> None:
        """Tell other feeds who is here, end who is too far behind, tell the log what to keep."""
        await self.tell_who_is_here()
        self.lags = await self._find_lags()
        for lag in too_far_behind(self.lags, self._config.retention_bytes_max):
            await self._end(lag)
        now = now_ms()
        self.safe_point_ms = safe_point_ms(now, self._config.wal_retention_minutes, self._marks.needed_from(now))
        if self._is_supported:
            settings = {HOLD_FROM: str(self.safe_point_ms), HOLD_BYTES: str(self._config.retention_bytes_max)}
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self._set, self._reading.topics(), settings)

    async def tell_who_is_here(self) -> None:
        """Let other feeds, and the next start of this one, know who is connected and how far it is."""
        here = list(self._marks.connected())
        await asyncio.gather(*(self._acks.tell(subscriber, sent) for subscriber, sent in here))

    async def _find_lags(self) -> list[Lag]:
        metrics, now = self._reading.metrics, now_ms()
        mean_bytes = metrics.bytes_total / metrics.entries_total if metrics.entries_total else 0.0
        found = []
        for subscriber, _ in list(self._marks.active(now)):
            silence_ms = self._marks.silence_ms(subscriber, now)
            # Another feed that has its stream ends it; one that nobody serves is anybody's to end.
            if silence_ms == 0 or silence_ms > ELSEWHERE_MS:
                entries = await self._reading.entries_behind(self._marks.done(subscriber) + 1)
                found.append(Lag(subscriber, entries, int(entries * mean_bytes)))
        return found

    async def _end(self, lag: Lag) -> None:
        self.lapsed += 1
        limit = self._config.retention_bytes_max
        log.warning(
            "subscriber lost its place",
            subscriber=str(lag.subscriber),
            role=lag.subscriber.role,
            lag_entries=lag.entries,
            lag_bytes=lag.size_bytes,
            limit_bytes=limit,
        )
        self._service.end(
            lag.subscriber,
            SubscriberLapsed(
                f"subscriber_lapsed: {lag.subscriber} is {lag.entries} entries behind what it acknowledged, about "
                f"{lag.size_bytes} bytes, and may hold back {limit}",
                "Acknowledge what is processed, or subscribe again while the entries are still there.",
            ),
        )
        self._marks.lapse(lag.subscriber)
        await self._acks.tell(lag.subscriber, 0, is_active=False)

    def _set(self, topics: Collection[str], settings: Mapping[str, str]) -> None:
        """Set topic settings, without changing the others. Blocks."""
        if not topics:
            return
        if self._admin is None:
            self._admin = self._address.admin()
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
        ]
        resources = [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries) for topic in topics]
        answers = self._admin.incremental_alter_configs(resources, request_timeout=TIMEOUT_S)
        for resource, future in answers.items():
            try:
                self._address.wait(future, resource.name)
            except UnknownTopic:
                continue  # Deleted meanwhile: there is nothing to keep.
            except InvalidTopicConfig:
                if self._is_supported:
                    self._is_supported = False
                    self._say_what_to_set()
                return

    def _say_what_to_set(self) -> None:
        config = self._config
        kept_ms = (config.wal_retention_minutes + config.subscriber_timeout_minutes) * MINUTE_MS
        log.warning(
            "the log cannot keep entries for slow subscribers",
            reason=f"it does not know {HOLD_FROM}",
            hint=f"Set retention.ms of the topics to at least {kept_ms}: whoever is behind by more loses its place.",
        )
