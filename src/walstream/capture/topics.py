"""The topics of a capture: their names, their settings, and that they are as they must be.

Owns creating them and the check at the start; refuses to know records. What must hold for the rule to work, so that
nothing is written where it does not: data topics are not compacted, `<prefix>.commits` has one partition, is not
compacted and keeps its records at least as long as every data topic keeps its own.

    <prefix>.<schema>.<table>   rows
    <prefix>.commits            generations and commit points
    <prefix>.schema             compacted: the versions of each table's columns
    <prefix>.status             compacted: how far each stage has come
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

from confluent_kafka import TopicCollection
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from walstream import logs
from walstream.capture.kafka import TIMEOUT_S, LogAddress
from walstream.errors import InvalidTopic, LogUnfit, NotAuthorized, TopicExists, UnknownTopic, UnreachableError
from walstream.positions import TopicPartition

log = logs.get(__name__)

MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""The largest record of a topic that capture creates: a row is one record, and rows can be large."""

POLL_S: Final = 0.02

_TIME: Final = "message.timestamp.type"
_APPEND_TIME: Final = "LogAppendTime"

# The leader's clock decides what retention removes, not the time of the commit, which may be long ago in a backlog;
# the time of the commit stays in the record's own timestamp. It also gives rows and commit points their order over all
# partitions, and no record is refused (INVALID_TIMESTAMP) because the clock of PostgreSQL or of capture is ahead.
DATA: Final[Mapping[str, str]] = {
    "cleanup.policy": "delete",
    _TIME: _APPEND_TIME,
    "max.message.bytes": str(MESSAGE_BYTES_MAX),
}
COMMITS: Final[Mapping[str, str]] = {
    "cleanup.policy": "delete",
    _TIME: _APPEND_TIME,
    "retention.bytes": "-1",
    "max.message.bytes": str(MESSAGE_BYTES_MAX),
}
COMPACTED: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    _TIME: _APPEND_TIME,
    "max.message.bytes": str(MESSAGE_BYTES_MAX),
}

_EARLIEST = cast(OffsetSpec, OffsetSpec.earliest())
_LATEST = cast(OffsetSpec, OffsetSpec.latest())


@dataclass(frozen=True, slots=True)
class Names:
    """The topics that every capture with this prefix has."""

    prefix: str

    @property
    def commits(self) -> str:
        """Generations and commit points."""
        return f"{self.prefix}.commits"

    @property
    def schema(self) -> str:
        """Versions of tables."""
        return f"{self.prefix}.schema"

    @property
    def status(self) -> str:
        """How far each stage has come."""
        return f"{self.prefix}.status"

    @property
    def dead_letter(self) -> str:
        """Changes that could not be understood; rows like others to the rule."""
        return f"{self.prefix}.dead_letter"

    @property
    def internal(self) -> frozenset[str]:
        """Topics without rows."""
        return frozenset((self.commits, self.schema, self.status))


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """What the log says of a topic."""

    name: str
    id: str
    partitions: int


class Topics:
    """The topics of one prefix on one log."""

    def __init__(self, address: LogAddress, prefix: str, partitions: int = 1) -> None:
        """Take the number of partitions that a new data topic gets; one that is there keeps its own."""
        self.names = Names(prefix)
        self._address = address
        self._partitions = partitions
        self._admin: AdminClient | None = None
        self._commits_retention_ms = -1
        self._checked: dict[str, TopicFacts] = {}
        self._met: set[str] = set()

    @property
    def admin(self) -> AdminClient:
        """The client, connected when first needed."""
        if self._admin is None:
            self._admin = self._address.admin()
        return self._admin

    def prepare(self) -> None:
        """Create what is missing of the internal topics and check them. Raises LogUnfit, UnreachableError."""
        names = self.names
        wanted = {names.commits: COMMITS, names.schema: COMPACTED, names.status: COMPACTED}
        there = self.facts(wanted)
        for topic, settings in wanted.items():
            if topic not in there:
                self._create(topic, 1, settings)
        settings_of = self._settings(wanted)
        self._check_commits(settings_of[names.commits])
        if settings_of[names.commits].get(_TIME) != _APPEND_TIME:
            self._stamp(names.commits)
        for topic in (names.schema, names.status):
            if "compact" not in settings_of[topic].get("cleanup.policy", ""):
                raise LogUnfit(
                    f"{topic} is not compacted.", f"walstream topic alter {topic} --set cleanup.policy=compact"
                )
        if "delete" in settings_of[names.schema].get("cleanup.policy", ""):
            raise LogUnfit(
                f"{names.schema} is subject to retention (cleanup.policy=compact,delete): versions of tables would be "
                "removed while their rows are still there.",
                f"walstream topic alter {names.schema} --set cleanup.policy=compact",
            )

    def check_data(self, topics: Iterable[str]) -> dict[str, TopicFacts]:
        """Check topics that hold rows, and return those that are there. Raises LogUnfit."""
        found = self.facts(topics)
        for topic, settings in self._settings(found).items():
            self._check_data(topic, settings)
        self._checked |= found
        return found

    def data(self, topic: str) -> TopicFacts:
        """Return a topic for rows, created when it is missing and checked once. Raises LogUnfit."""
        facts = self._checked.get(topic) or self.check_data([topic]).get(topic)
        if facts is None:
            self._create(topic, self._partitions, DATA)
            facts = self.check_data([topic])[topic]
        return facts

    def facts(self, topics: Iterable[str]) -> dict[str, TopicFacts]:
        """Return what the log says of these topics; those that are not there are left out."""
        with self._address.translated():
            there = self.admin.list_topics(timeout=TIMEOUT_S).topics
        wanted = [topic for topic in topics if topic in there]
        if not wanted:
            return {}
        futures = self.admin.describe_topics(TopicCollection(wanted), request_timeout=TIMEOUT_S)
        found = {}
        for topic, future in futures.items():
            described = self._address.wait(future, topic)
            found[topic] = TopicFacts(topic, str(described.topic_id), len(described.partitions))
        return found

    def ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return where each partition ends: the offset that the next record gets."""
        return self._offsets(partitions, _LATEST)

    def starts(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the first offset that each partition still has."""
        return self._offsets(partitions, _EARLIEST)

    def _offsets(self, partitions: Iterable[TopicPartition], which: OffsetSpec) -> dict[TopicPartition, int]:
        request = {KafkaPartition(*partition): which for partition in partitions}
        if not request:
            return {}
        self._meet({partition.topic for partition in request})
        futures = self.admin.list_offsets(request, request_timeout=TIMEOUT_S)
        return {
            TopicPartition(asked.topic, asked.partition): self._address.wait(future, f"{asked.topic}").offset
            for asked, future in futures.items()
        }

    def _meet(self, topics: set[str]) -> None:
        """Have the client know who leads these topics: asked for offsets, it may wait 3 s before it looks again."""
        if not topics <= self._met:
            with self._address.translated():
                self._met |= set(self.admin.list_topics(timeout=TIMEOUT_S).topics)

    def _create(self, topic: str, partitions: int, settings: Mapping[str, str]) -> None:
        new = NewTopic(topic, partitions, config=dict(settings))
        future = self.admin.create_topics([new], request_timeout=TIMEOUT_S)[topic]
        try:
            self._address.wait(future, f"Creating the topic {topic}")
        except TopicExists:
            pass
        except InvalidTopic as error:
            hint = (
                "Apache Kafka takes '.' and '_' for the same in names: another topic may have this one already. "
                "Give the table a topic of its own in [[streams]]."
            )
            raise InvalidTopic(error.message, hint) from error
        self._wait_for(topic)

    def _wait_for(self, topic: str) -> None:
        """Wait until a topic that was created is known: brokers of Apache Kafka learn of it a moment later."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            with suppress(UnknownTopic):
                if self.facts([topic]):
                    return
            time.sleep(POLL_S)
        raise UnreachableError(f"The topic {topic} was created, and the log does not know it.")

    def _settings(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        if not resources:
            return {}
        futures = self.admin.describe_configs(resources, request_timeout=TIMEOUT_S)
        return {
            resource.name: {name: _value(entry) for name, entry in self._address.wait(future, resource.name).items()}
            for resource, future in futures.items()
        }

    def _stamp(self, topic: str) -> None:
        """Have the leader stamp a topic that an earlier version made without append time; nothing else reads its times.

        Capture works without it, so one that may not change topics goes on.
        """
        entry = ConfigEntry(_TIME, _APPEND_TIME, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        future = self.admin.incremental_alter_configs([resource], request_timeout=TIMEOUT_S)[resource]
        try:
            self._address.wait(future, f"Changing the topic {topic}")
        except NotAuthorized as error:
            hint = f"walstream topic alter {topic} --set {_TIME}={_APPEND_TIME}"
            log.warning("commit points have no append time", topic=topic, error=error.message, hint=hint)
        else:
            log.info("commit points have append time from now on", topic=topic)

    def _check_commits(self, settings: Mapping[str, str]) -> None:
        topic = self.names.commits
        facts = self.facts([topic])[topic]
        if facts.partitions != 1:
            raise LogUnfit(f"{topic} has {facts.partitions} partitions; commit points need exactly one.")
        if "compact" in settings.get("cleanup.policy", ""):
            raise LogUnfit(
                f"{topic} is compacted: commit points would be lost.",
                f"walstream topic alter {topic} --set cleanup.policy=delete",
            )
        if int(settings.get("retention.bytes", "-1")) != -1:
            raise LogUnfit(
                f"{topic} is limited in size: commit points would be removed while their rows are still there.",
                f"walstream topic alter {topic} --set retention.bytes=-1",
            )
        self._commits_retention_ms = int(settings.get("retention.ms", "-1"))

    def _check_data(self, topic: str, settings: Mapping[str, str]) -> None:
        if "compact" in settings.get("cleanup.policy", ""):
            raise LogUnfit(
                f"{topic} is compacted: rows that commit points count would be removed.",
                f"walstream topic alter {topic} --set cleanup.policy=delete",
            )
        kept_ms, limit_ms = int(settings.get("retention.ms", "-1")), self._commits_retention_ms
        if limit_ms != -1 and (kept_ms == -1 or kept_ms > limit_ms):
            commits = self.names.commits
            raise LogUnfit(
                f"{topic} keeps its records longer (retention.ms={kept_ms}) than {commits} ({limit_ms}): the older "
                "ones could not be read any more.",
                f"walstream topic alter {commits} --set retention.ms={kept_ms}",
            )


def _value(entry: Any) -> str:
    return str(entry.value if entry.value is not None else "")
