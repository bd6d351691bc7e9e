"""What a node knows of topics and of itself, in files beside the log: topics, its cluster's id, its producer ids.

Owns `meta.json` (who this node is), `topics.json` (the catalogue) and `reserved.json` (numbers promised never to be
given again). In a static cluster one node, the controller, changes the catalogue and the others take it over whole
(`take_over`), so its version says whose is newer.

The invariant: what `topics` shows is durable. A change is planned (`Change`), written, which blocks, and then shown.
Each is planned from the one before, so one is under way at a time: see `log.change_queue`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from uuid import UUID, uuid4

import msgspec

from walstream import logs
from walstream.errors import (
    ConfigError,
    CorruptLog,
    DirectoryUnusable,
    InvalidPartitions,
    InvalidTopic,
    TopicExists,
    UnknownTopic,
    UnknownTopicId,
)
from walstream.log.disk import Disk
from walstream.log.settings import TopicSettings, usable

log = logs.get(__name__)

T = TypeVar("T")

FORMAT = 2
"""Of the data directory. 2: a topic's id is part of its folder's name, which format 1 would take for a stranger."""
TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
PARTITIONS_MAX = 10_000
PRODUCER_ID_BLOCK = 1_000
"""Producer ids are promised in blocks, so that one fsync serves many producers."""
ANY_PRODUCER_ID = range(2**47)
"""What a node gives that is alone. In a cluster the bits above are the node's: see `cluster/static.py`."""


class Topic(msgspec.Struct, frozen=True):
    """A topic as the catalogue has it."""

    name: str
    id: UUID
    partitions: int
    config: dict[str, str] = {}
    replicas: list[int] = []
    """The nodes that hold it; empty on a node that is alone."""
    since: int = 0
    """The version of the catalogue that was the first to have it."""
    grown: list[tuple[int, int]] = []
    """(number of the first added partition, version of the catalogue that was the first to have it), per growth."""

    @property
    def is_internal(self) -> bool:
        """Whether walstream keeps its own state in it: clients may read it but not create it."""
        return self.name.startswith("__")

    def since_of(self, index: int) -> int:
        """Return the version of the catalogue that was the first to have a partition."""
        return next((version for first, version in reversed(self.grown) if index >= first), self.since)


class _Meta(msgspec.Struct, frozen=True):
    cluster_id: str
    node_id: int
    format: int = FORMAT
    joined_version: int = -1


class _Topics(msgspec.Struct, frozen=True):
    topics: list[Topic] = []
    version: int = 0
    joined: list[int] = []


class _Reserved(msgspec.Struct, frozen=True):
    producer_id: int = 0
    append_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class NewTopic:
    """What is asked for."""

    name: str
    partitions: int
    config: Mapping[str, str]
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """The catalogue as it is to be."""

    topics: dict[str, Topic]
    version: int
    joined: frozenset[int]
    affected: list[Topic] = field(default_factory=list)
    """The topics that are made, changed or removed; not those of another catalogue that is taken over."""
    meta: _Meta | None = None
    """What the node is from now on, if it joins a cluster."""


class Catalogue:
    """What this node knows of topics and of itself."""

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        *,
        node_id: int,
        defaults: TopicSettings,
        founds_cluster: bool = True,
        producer_ids: range = ANY_PRODUCER_ID,
    ) -> None:
        """Read the files, or make them. A node that does not found a cluster waits for the id of the one it joins.

        `producer_ids` are those this node may give; in a cluster no two nodes have one in common.
        """
        self._disk = disk
        self._folder = folder
        self._defaults = defaults
        disk.make_directory(folder)
        self.is_new = disk.read(folder / "meta.json") is None
        """Whether the folder was empty at this start: the disk is new, or somebody has wiped it."""
        if disk.read(folder / "topics.json") is None and disk.list(folder / "topics"):
            raise CorruptLog(
                f"{folder / 'topics.json'} is missing, and {folder / 'topics'} holds records.",
                "Restore it from a copy. Without it the records belong to no topic, and would be removed.",
            )
        meta = self._load_meta(node_id, founds_cluster=founds_cluster)
        self.cluster_id = meta.cluster_id
        self.node_id = meta.node_id
        self.joined_version = meta.joined_version
        """The catalogue's version when this node joined: an earlier disk may have held an older partition."""
        catalogue = self._load("topics.json", _Topics)
        self.version = catalogue.version
        self.joined = frozenset(catalogue.joined)
        """Of the controller's catalogue: the nodes that ever had it."""
        self.is_file_current = True
        """Whether `topics.json` has what is in force, as far as is known: a write that failed may have replaced it."""
        self.changed: Callable[[], None] | None = None
        """Called after each change, before the log has the partitions that it says."""
        self.topics = {topic.name: topic for topic in catalogue.topics}
        self.by_id = {topic.id: topic for topic in self.topics.values()}
        self._warn_of_unusable(catalogue.topics)
        reserved = self._load("reserved.json", _Reserved)
        first = reserved.producer_id if reserved.producer_id in producer_ids else producer_ids.start
        self._reserving = threading.Lock()
        """Held while `reserved.json` is written."""
        self._producer_id = self._producer_id_end = first
        self.append_time_floor_ms = self._append_time_ms = reserved.append_time_ms

    def _load_meta(self, node_id: int, *, founds_cluster: bool) -> _Meta:
        if self.is_new:
            meta = _Meta(cluster_id=uuid4().hex[:22] if founds_cluster else "", node_id=node_id)
            self._save_meta(meta)
            return meta
        meta = self._load("meta.json", _Meta)
        if not 1 <= meta.format <= FORMAT:
            raise CorruptLog(
                f"The data directory has format {meta.format}; this walstream knows {FORMAT}.",
                "Start the version of walstream that wrote it.",
            )
        if meta.node_id != node_id:
            raise ConfigError(
                f"The data directory belongs to node {meta.node_id}, the configuration says node {node_id}.",
                "Set node.node_id to the first, or node.data to another folder.",
            )
        if meta.format < FORMAT:
            # Before any folder is renamed: an earlier version would remove what it does not know.
            self._save_meta(msgspec.structs.replace(meta, format=FORMAT))
        return meta

    def _save_meta(self, meta: _Meta) -> None:
        self._write("meta.json", meta)

    def join(self, cluster_id: str, version: int) -> Change:
        """Belong to a cluster from now on, whose catalogue has this version. Only for a node that belongs to none."""
        assert not self.cluster_id, f"the node belongs to {self.cluster_id}"
        return Change(self.topics, self.version, self.joined, meta=_Meta(cluster_id, self.node_id, FORMAT, version))

    def note_joined(self, node_id: int) -> Change | None:
        """Remember that a node has this catalogue: from now on it can be given partitions to lead."""
        return None if node_id in self.joined else Change(self.topics, self.version, self.joined | {node_id})

    def is_older_than_disk(self, topic: Topic, index: int) -> bool:
        """Return whether a partition existed before this node's folder: an earlier disk may have held records of it."""
        return topic.since_of(index) <= self.joined_version

    def _load(self, name: str, kind: type[T]) -> T:
        data = self._disk.read(self._folder / name)
        if data is None:
            return kind()
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise CorruptLog(f"{self._folder / name} cannot be read: {error}.", "Restore it from a copy.") from error

    def _write(self, name: str, content: msgspec.Struct) -> None:
        try:
            self._disk.write(self._folder / name, msgspec.json.encode(content), durable=True)
        except OSError as error:
            raise self._unwritable(name, error) from error

    def _unwritable(self, name: str, error: OSError) -> DirectoryUnusable:
        return DirectoryUnusable(
            f"{self._folder / name} cannot be written: {error.strerror}.",
            "Nothing has changed. Free some space, or fix the disk, and try again.",
        )

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────────

    def topic(self, name: str) -> Topic:
        """Return a topic; raises UnknownTopic."""
        try:
            return self.topics[name]
        except KeyError:
            raise UnknownTopic(f"There is no topic {name!r}.") from None

    def topic_by_id(self, topic_id: UUID) -> Topic:
        """Return a topic; raises UnknownTopicId."""
        try:
            return self.by_id[topic_id]
        except KeyError:
            raise UnknownTopicId(f"No topic has the id {topic_id}.") from None

    def settings(self, topic: Topic) -> TopicSettings:
        """Return a topic's settings over the node's defaults, without those that only a newer version can use."""
        return TopicSettings.parse(usable(topic.config), self._defaults)

    def _warn_of_unusable(self, topics: Iterable[Topic]) -> None:
        """Log the settings of these topics that are ignored, in one line."""
        found = {
            topic.name: [f"{name}={text}" for name, text in topic.config.items() if name not in usable(topic.config)]
            for topic in topics
        }
        ignored = sorted({setting for settings in found.values() for setting in settings})
        if ignored:
            names = [name for name, settings in found.items() if settings]
            log.warning(
                "topic settings ignored", settings=", ".join(ignored), topics=len(names), first=names[0],
                hint="A newer version of walstream has set them. They are kept in the catalogue: upgrade this node.",
            )  # fmt: skip

    def check_new(self, new: NewTopic) -> None:
        """Raise what forbids this topic, if anything does."""
        if not TOPIC_NAME.fullmatch(new.name) or new.name in (".", ".."):
            raise InvalidTopic(
                f"{new.name!r} cannot be a topic's name.",
                "Use 1 to 249 letters, digits, dots, underscores and hyphens.",
            )
        if new.name in self.topics:
            raise TopicExists(f"The topic {new.name} exists already.")
        if not 1 <= new.partitions <= PARTITIONS_MAX:
            raise InvalidPartitions(f"A topic has 1 to {PARTITIONS_MAX} partitions, not {new.partitions}.")
        TopicSettings.parse(new.config, self._defaults)

    # The following plan a change, and raise what forbids it.

    def create(self, specifications: list[NewTopic]) -> Change:
        """Add topics, all or none."""
        for new in specifications:
            self.check_new(new)
        made = [
            Topic(new.name, uuid4(), new.partitions, dict(new.config), list(new.replicas), self.version + 1)
            for new in specifications
        ]
        return self._next({**self.topics, **{topic.name: topic for topic in made}}, made)

    def delete(self, names: list[str]) -> Change:
        """Remove topics, all or none."""
        gone = [self.topic(name) for name in names]
        return self._next({name: topic for name, topic in self.topics.items() if name not in set(names)}, gone)

    def grow(self, name: str, partitions: int) -> Change:
        """Give a topic more partitions."""
        topic = self.topic(name)
        if not topic.partitions < partitions <= PARTITIONS_MAX:
            raise InvalidPartitions(
                f"{name} has {topic.partitions} partitions; it can be given more, up to {PARTITIONS_MAX}, "
                f"not {partitions}."
            )
        grown = [*topic.grown, (topic.partitions, self.version + 1)]
        return self._replace(msgspec.structs.replace(topic, partitions=partitions, grown=grown))

    def configure(self, name: str, config: Mapping[str, str]) -> Change:
        """Replace a topic's own settings."""
        topic = self.topic(name)
        # What only a newer version can use may stay as it is.
        TopicSettings.parse({name: text for name, text in config.items() if topic.config.get(name) != text})
        return self._replace(msgspec.structs.replace(topic, config=dict(config)))

    def place(self, name: str, replicas: Iterable[int]) -> Change:
        """Say which nodes hold a topic."""
        return self._replace(msgspec.structs.replace(self.topic(name), replicas=list(replicas)))

    def _replace(self, topic: Topic) -> Change:
        return self._next({**self.topics, topic.name: topic}, [topic])

    def _next(self, topics: dict[str, Topic], affected: list[Topic]) -> Change:
        return Change(topics, self.version + 1, self.joined, affected)

    def take_over(self, version: int, topics: Iterable[Topic]) -> Change:
        """Have the controller's catalogue in the place of the own."""
        return Change({topic.name: topic for topic in topics}, version, self.joined)

    # A change that is planned

    def altered(self, change: Change) -> list[Topic]:
        """Return the topics that are new in a change, or differ from what is in force."""
        return [topic for topic in change.topics.values() if self.topics.get(topic.name) != topic]

    def write(self, change: Change) -> None:
        """Make a change durable. Blocks; may be called on any thread, for one change at a time."""
        if change.meta is not None:
            self._save_meta(change.meta)
        if change.topics is self.topics and change.joined is self.joined:
            return
        try:
            self._write_topics(change.topics, change.version, change.joined)
        except DirectoryUnusable:
            # Perhaps the file was replaced, and only its name not synced: the next start would go by it, and remove
            # topics of which the client was told that they are still there.
            self.is_file_current = False
            try:
                self.restore()
            except DirectoryUnusable as error:
                log.error("catalogue not restored", error=str(error))
            raise
        self.is_file_current = True

    def restore(self) -> None:
        """Write `topics.json` again if a failed write may have replaced it. Blocks; raises DirectoryUnusable."""
        if not self.is_file_current:
            self._write_topics(self.topics, self.version, self.joined)
            self.is_file_current = True

    def _write_topics(self, topics: Mapping[str, Topic], version: int, joined: frozenset[int]) -> None:
        self._write("topics.json", _Topics(list(topics.values()), version, sorted(joined)))

    def show(self, change: Change) -> None:
        """Have a change, which is durable."""
        if change.meta is not None:
            self.cluster_id, self.joined_version = change.meta.cluster_id, change.meta.joined_version
        before = self.topics
        self.version, self.joined, self.topics = change.version, change.joined, change.topics
        self.by_id = {topic.id: topic for topic in self.topics.values()}
        known = {topic.name: topic.config for topic in before.values()}
        self._warn_of_unusable(topic for topic in self.topics.values() if known.get(topic.name) != topic.config)
        if self.changed is not None:
            self.changed()

    def apply(self, change: Change) -> list[Topic]:
        """Make a change durable and have it; return the topics that it affects. Blocks."""
        self.write(change)
        self.show(change)
        return change.affected

    # ── numbers that are never given twice ───────────────────────────────────────────────────────────────────────

    def next_producer_id(self) -> int:
        """Return a producer id that no producer ever had. May block for one fsync; may be called on any thread."""
        with self._reserving:
            if self._producer_id == self._producer_id_end:
                try:
                    self._reserve(self._producer_id_end + PRODUCER_ID_BLOCK, self._append_time_ms)
                except OSError as error:
                    raise self._unwritable("reserved.json", error) from error
            producer_id = self._producer_id
            self._producer_id += 1
        return producer_id

    def reserve_append_time(self, until_ms: int) -> None:
        """Promise that later processes stamp above `until_ms`; raises OSError. Blocks; may be called on any thread."""
        with self._reserving:
            self._reserve(self._producer_id_end, max(until_ms, self._append_time_ms))

    def _reserve(self, producer_id: int, append_time_ms: int) -> None:
        data = msgspec.json.encode(_Reserved(producer_id, append_time_ms))
        self._disk.write(self._folder / "reserved.json", data, durable=True)
        self._producer_id_end, self._append_time_ms = producer_id, append_time_ms
