"""Which topics are in the feed, when the log does not tell their settings."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from walstream.capture.kafka import LogAddress
from walstream.errors import NotAuthorized, RequestTimedOut, UnknownTopic
from walstream.feed.reading import topics as module
from walstream.feed.reading.calls import FetchAnswer, Fetched, TopicMetadata
from walstream.feed.reading.log_client import LogClient
from walstream.feed.reading.metrics import ReadingMetrics
from walstream.feed.reading.region_topic import REGIONS, Regions
from walstream.feed.reading.topics import APPEND_TIME, TIMESTAMP_TYPE, Topics


class Client(LogClient):
    """A log that tells each topic's setting, or answers with an error code."""

    def __init__(self, **answers: str | int) -> None:
        super().__init__(LogAddress("127.0.0.1:1"), None)
        self.answers = answers
        self.topics = {name: TopicMetadata(uuid.uuid4(), {0: 1}) for name in answers}

    def _any_node(self) -> int:
        return 1

    async def _send(self, node: int, call: Any, line: str) -> Any:
        def result(topic: str, answer: str | int) -> Any:
            configs = [SimpleNamespace(name=TIMESTAMP_TYPE, value=answer)] if isinstance(answer, str) else []
            code = answer if isinstance(answer, int) else 0
            return SimpleNamespace(resource_name=topic, error_code=code, configs=configs)

        return SimpleNamespace(results=[result(*one) for one in self.answers.items()])


async def wanted(topics: Topics) -> set[str]:
    return {partition.topic for partition in await topics._wanted()}


async def test_an_error_is_no_answer() -> None:
    client = Client(stamped=APPEND_TIME, created="CreateTime", hidden=29, gone=3, slow=7, bare="")
    told = await client.settings(client.topics, TIMESTAMP_TYPE)
    assert told.values == {"stamped": APPEND_TIME, "created": "CreateTime", "bare": ""}
    assert {name: type(error) for name, error in told.errors.items()} == {
        "hidden": NotAuthorized, "gone": UnknownTopic, "slow": RequestTimedOut,
    }  # fmt: skip


@pytest.mark.parametrize("code", [7, 29])
async def test_a_topic_does_not_leave_because_a_question_failed(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECHECK_S", -1.0)
    client = Client(orders=APPEND_TIME, users=APPEND_TIME)
    topics = Topics(client, None, ReadingMetrics(), "c", ("*",), ())  # type: ignore[arg-type]
    assert await wanted(topics) == {"orders", "users"}
    client.answers["orders"] = code
    assert await wanted(topics) == {"orders", "users"}
    client.answers["orders"] = "CreateTime"
    assert await wanted(topics) == {"users"}, "that is an answer"


async def test_a_topic_of_which_nothing_is_known_joins_when_it_is_told() -> None:
    client = Client(orders=29, users=APPEND_TIME)
    topics = Topics(client, None, ReadingMetrics(), "c", ("*",), ())  # type: ignore[arg-type]
    assert await wanted(topics) == {"users"}
    assert topics.unfit(("orders",)) == "", "nobody knows whether it is"
    client.answers["orders"] = APPEND_TIME
    assert await wanted(topics) == {"orders", "users"}


async def test_regions_wait_for_who_is_to_lead_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that was made just now is one that not every node of a cluster knows."""
    client = Client(**{REGIONS.topic: ""})
    codes = iter([6, 5, 0])

    async def fetch(node: int, wanted: Any, **_: Any) -> FetchAnswer:
        return FetchAnswer(0, 0, {REGIONS: Fetched(next(codes), 0, 0, (), b"")}, {})

    async def refresh() -> None: ...

    monkeypatch.setattr(client, "fetch", fetch)
    monkeypatch.setattr(client, "refresh_quietly", refresh)
    assert (await Regions.open(client)).table.next_offset == 0
    assert not list(codes)
