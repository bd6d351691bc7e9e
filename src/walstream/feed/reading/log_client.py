"""The way to the log for the feed: one asyncio client, over the Kafka protocol alone.

Owns the connections and who leads what; refuses to know what records mean. aiokafka keeps the connections (TLS, SASL,
versions, reconnecting); requests and answers are our own bytes (`calls`). Every error that leaves here is one of
walstream's (`log_errors`). What can be tried again is the caller's to try: `Patience` says for how long and how
often.

A connection answers in order, so what may wait has a *line* of its own: the tail's long poll, the questions about
resolved positions, and a few for reading from disk, of which one slow answer does not hold up the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from aiokafka.client import AIOKafkaClient

from walstream import errors
from walstream.capture.kafka import LogAddress
from walstream.error_codes import codes
from walstream.errors import UnknownTopic, UnreachableError, WalstreamError
from walstream.feed.reading.calls import (
    Call,
    FetchAnswer,
    Fetched,
    Found,
    Session,
    TopicMetadata,
    Wanted,
    fetch_call,
    message_call,
    offsets_call,
)
from walstream.feed.reading.log_errors import (
    STALE,
    connection_settings,
    error_of,
    passes,
    translated,
    try_out,
    unanswered,
    unreachable,
)
from walstream.log.batch import Compression
from walstream.log.records import Record, build_batch
from walstream.positions import TopicPartition

__all__ = ["LogClient", "Patience", "error_of", "passes"]

TIMEOUT_S: Final = 20.0
"""After so long without an answer the connection is given up."""

WAIT_S: Final = 30.0
"""For so long a question that the log cannot answer for now is asked again."""

COMPRESSED_FROM: Final = 100
"""Records of a batch that is appended compressed."""

RETRY_S_MIN: Final = 0.02
RETRY_S_MAX: Final = 1.0

_PRODUCE, _METADATA, _CREATE_TOPICS, _DESCRIBE_CONFIGS = 0, 3, 19, 32
_TOPIC_RESOURCE: Final = 2


class Patience:
    """Tries again, more slowly each time, until a time is over."""

    def __init__(self, client: LogClient, seconds: float) -> None:
        self._client = client
        self._end = asyncio.get_running_loop().time() + seconds
        self._pause_s = RETRY_S_MIN

    async def after(self, error: WalstreamError) -> None:
        """Wait before the next try; raise the error when it makes no sense, or the time is over."""
        left = self._end - asyncio.get_running_loop().time()
        if not passes(error) or left <= 0:
            raise error
        await asyncio.sleep(min(self._pause_s, left))
        self._pause_s = min(self._pause_s * 2, RETRY_S_MAX)
        if isinstance(error, (*STALE, UnreachableError)):
            await self._client.refresh_quietly()


class Settings(NamedTuple):
    """One setting of several topics."""

    values: dict[str, str]
    """Empty where a topic has no such setting."""
    errors: dict[str, WalstreamError]
    """Of those that the log does not tell; what they have is not known."""


class LogClient:
    """Connections to all nodes of one log."""

    def __init__(self, address: LogAddress, client: Any) -> None:
        self._address = address
        self._client = client
        self._refreshing: asyncio.Task[Mapping[str, TopicMetadata]] | None = None
        self._controller = -1
        self.topics: Mapping[str, TopicMetadata] = {}
        """As they were at the last refresh."""

    @classmethod
    async def connect(cls, address: LogAddress) -> LogClient:
        """Connect and learn the topics. Raises UnreachableError, AuthenticationFailed."""
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
        settings = connection_settings(address, TIMEOUT_S)
        await try_out(address, settings)
        client = AIOKafkaClient(bootstrap_servers=address.bootstrap.split(","), metadata_max_age_ms=60_000, **settings)
        self = cls(address, client)
        try:
            with translated(self._address.bootstrap):
                await client.bootstrap()
            await self.refresh()
        except BaseException:
            await client.close()
            raise
        return self

    @property
    def bootstrap(self) -> str:
        """Where the log is, as it was given."""
        return self._address.bootstrap

    async def close(self) -> None:
        """End all connections."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        await self._client.close()

    async def refresh(self) -> Mapping[str, TopicMetadata]:
        """Ask for all topics and who leads them; whoever asks at the same time shares the answer."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
        return await asyncio.shield(self._refreshing)

    async def refresh_quietly(self) -> None:
        """Ask for all topics, if that is possible now."""
        try:
            await self.refresh()
        except WalstreamError:
            await asyncio.sleep(0)

    def leader(self, partition: TopicPartition) -> int:
        """Return the node that leads a partition. Raises LeaderNotAvailable, UnknownTopic."""
        topic = self.topics.get(partition.topic)
        if topic is None or partition.partition not in topic.leaders:
            raise errors.UnknownTopic(f"The log has no partition {partition}.")
        leader = topic.leaders[partition.partition]
        if leader < 0:
            raise errors.LeaderNotAvailable(f"No node leads {partition} at the moment.")
        return leader

    def by_leader(self, wanted: Mapping[TopicPartition, Any]) -> dict[int, dict[TopicPartition, Any]]:
        """Part partitions by who leads them; those that nobody leads are left out, and the leaders asked for anew."""
        found: dict[int, dict[TopicPartition, Any]] = {}
        for partition, value in wanted.items():
            try:
                found.setdefault(self.leader(partition), {})[partition] = value
            except WalstreamError:
                continue
        return found

    async def fetch(
        self,
        node: int,
        wanted: Mapping[TopicPartition, Wanted],
        *,
        bytes_max: int,
        wait_ms: int = 0,
        session: Session | None = None,
        promises_of: tuple[TopicPartition, ...] = (),
        line: str = "disk",
    ) -> FetchAnswer:
        """Read from a node. Raises UnreachableError; what concerns one partition is said by its code.

        With promises of partitions, if the node gives them.
        """
        for _ in range(2):
            call = fetch_call(wanted, wait_ms=wait_ms, bytes_max=bytes_max, session=session, promises_of=promises_of)
            try:
                answer: FetchAnswer = await self._send(node, call, line)
            except BaseException:
                if session is not None:
                    session.reset()
                raise
            if session is None or session.answered(answer.code, answer.session_id):
                break
        return answer

    async def fetch_one(self, partition: TopicPartition, offset: int, bytes_max: int, seconds: float) -> Fetched:
        """Read from one partition, at least a batch if there is one. Raises the error that stays."""
        patience = Patience(self, seconds)
        while True:
            try:
                wanted = {partition: Wanted(offset, bytes_max)}
                answers = await self.fetch(self.leader(partition), wanted, bytes_max=bytes_max, line="offsets")
                fetched = answers.fetched.get(partition)
                if fetched is None:
                    raise UnknownTopic(f"The log says nothing of {partition}.")
                if fetched.code:
                    raise error_of(fetched.code, str(partition))
                return fetched
            except WalstreamError as error:
                await patience.after(error)

    async def offsets(
        self, wanted: Mapping[TopicPartition, int], line: str = "offsets", *, with_unreadable: bool = False
    ) -> dict[TopicPartition, Found]:
        """Ask where times are, all leaders at once. Partitions that nobody answers for are left out."""
        nodes = self.by_leader(wanted)
        if sum(map(len, nodes.values())) < len(wanted):
            await self.refresh_quietly()
            nodes = self.by_leader(wanted)
        calls = [
            self._send(node, offsets_call(part, with_unreadable=with_unreadable), line) for node, part in nodes.items()
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: dict[TopicPartition, Found] = {}
        for answer in answers:
            if isinstance(answer, BaseException):
                if not isinstance(answer, UnreachableError):
                    raise answer
                continue
            found |= answer
        return found

    async def offsets_of_all(self, wanted: Mapping[TopicPartition, int], seconds: float) -> dict[TopicPartition, Found]:
        """Ask where times are until there is an answer for every partition. Raises the error that stays."""
        patience = Patience(self, seconds)
        found: dict[TopicPartition, Found] = {}
        while True:
            found |= await self.offsets({one: time_ms for one, time_ms in wanted.items() if one not in found})
            bad = {one: answer for one, answer in found.items() if answer.code}
            found = {one: answer for one, answer in found.items() if not answer.code}
            if len(found) == len(wanted):
                return found
            for partition, answer in bad.items():
                await patience.after(error_of(answer.code, str(partition)))
                break
            else:
                await patience.after(unanswered(self._address.bootstrap))

    async def append(self, partition: TopicPartition, records: Sequence[tuple[bytes | None, bytes]]) -> int:
        """Append (key, value) records as one batch, on all replicas in sync before it returns; return its offset.

        Not idempotent: after an error they may be there all the same. Raises what the log says.
        """
        now_ms = int(time.time() * 1000)
        batch = build_batch(
            [Record(at, now_ms, key, value) for at, (key, value) in enumerate(records)],
            compression=Compression.GZIP if len(records) > COMPRESSED_FROM else Compression.NONE,
        )
        body = {
            "acks": -1,
            "timeout": int(TIMEOUT_S * 500),
            "topic_data": [
                {"name": partition.topic, "partition_data": [{"index": partition.partition, "records": bytes(batch)}]}
            ],
        }
        answer = await self._send(self.leader(partition), message_call(_PRODUCE, range(3, 9), body), "offsets")
        (written,) = answer.responses[0].partition_responses
        if written.error_code:
            raise error_of(written.error_code, str(partition))
        return int(written.base_offset)

    async def have_topic(self, topic: str, settings: Mapping[str, str], seconds: float) -> TopicMetadata:
        """Create a topic with one partition unless it is there, and wait until it is known."""
        patience = Patience(self, seconds)
        while topic not in self.topics:
            try:
                await self.create_topic(topic, 1, settings)
                await self.refresh()
                if topic not in self.topics:
                    raise UnknownTopic(f"The topic {topic} was created, and the log does not know it.")
            except WalstreamError as error:
                await patience.after(error)
        return self.topics[topic]

    async def create_topic(self, topic: str, partitions: int, settings: Mapping[str, str]) -> None:
        """Create a topic, unless it is there. Raises what the log says."""
        body = {
            "topics": [
                {
                    "name": topic,
                    "num_partitions": partitions,
                    "replication_factor": -1,
                    "configs": [{"name": name, "value": value} for name, value in settings.items()],
                }
            ],
            "timeout": int(TIMEOUT_S * 500),
        }
        answer = await self._send(self._any_node(), message_call(_CREATE_TOPICS, range(4, 6), body), "offsets")
        (made,) = answer.topics
        if made.error_code and made.error_code != codes(errors.TopicExists).kafka:
            raise error_of(made.error_code, f"Creating the topic {topic}")

    async def settings(self, topics: Collection[str], name: str) -> Settings:
        """Return one setting of each topic; those of which the log says nothing are left out."""
        if not topics:
            return Settings({}, {})
        resources = [
            {"resource_type": _TOPIC_RESOURCE, "resource_name": topic, "configuration_keys": [name]} for topic in topics
        ]
        body = {"resources": resources}
        answer = await self._send(self._any_node(), message_call(_DESCRIBE_CONFIGS, range(1, 5), body), "offsets")
        found = Settings({}, {})
        for result in answer.results:
            topic, code = result.resource_name, result.error_code
            if code:
                found.errors[topic] = error_of(code, f"The settings of {topic}")
            else:
                found.values[topic] = next((one.value or "" for one in result.configs if one.name == name), "")
        return found

    def _any_node(self) -> int:
        """Return the controller where there is one: only it creates topics."""
        node = self._controller if self._controller >= 0 else self._client.get_random_node()
        if node is None:
            raise unreachable(self._address.bootstrap, "no node of it is known")
        return int(node)

    async def _refresh(self) -> Mapping[str, TopicMetadata]:
        body = {"topics": None, "allow_auto_topic_creation": False}
        # Whoever answers: the node that is asked may be the one that is gone.
        nodes = sorted(broker.nodeId for broker in self._client.cluster.brokers())
        failure: WalstreamError = unreachable(self._address.bootstrap, "no node of it is known")
        for node in nodes:
            try:
                answer = await self._send(node, message_call(_METADATA, range(10, 13), body), "offsets")
            except UnreachableError as error:
                failure = error
                continue
            self._controller = answer.controller_id
            self.topics = {
                topic.name: TopicMetadata(
                    topic.topic_id, {one.partition_index: one.leader_id for one in topic.partitions}
                )
                for topic in answer.topics
                if not topic.error_code
            }
            if {broker.node_id for broker in answer.brokers} - set(nodes):
                await self._client.force_metadata_update()
            return self.topics
        raise failure

    async def _send(self, node: int, call: Call, line: str) -> Any:
        with translated(self._address.bootstrap):
            return await self._client.send(node, call, group=line)
