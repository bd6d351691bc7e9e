"""The commands against a real node."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

import walstream
from walstream.cli import main
from walstream.node.process import NodeProcess

Run = Callable[..., str]


@pytest.fixture
def run(node: NodeProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command against the node and return its stdout; `code` is the exit code it must have."""
    monkeypatch.setenv("WALSTREAM_BOOTSTRAP", node.address)
    monkeypatch.setenv("WALSTREAM_HTTP", f"127.0.0.1:{node.http_port}")

    def invoke(*arguments: str, code: int = 0, stdin: bytes = b"", stderr: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        got = main.invoke(list(arguments))
        said = capsys.readouterr()
        assert got == code, said.err
        assert stderr in said.err
        return said.out

    return invoke


def as_json(run: Run, *arguments: str) -> Any:
    return json.loads(run(*arguments, "--output", "json"))


def read(run: Run, topic: str, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run("tail", topic, *arguments, "--output", "json").splitlines()]


def commit(node: NodeProcess, group: str, topic: str, offset: int) -> None:
    consumer = Consumer({"bootstrap.servers": node.address, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
    consumer.close()


class TestTopic:
    def test_create_describe_alter_delete(self, run: Run, topic: str) -> None:
        created = as_json(run, "topic", "create", topic, "-p", "3", "--set", "retention.ms=1000000")
        assert created == {
            "topic": topic, "created": True, "partitions": 3, "settings": {"retention.ms": "1000000"},
        }  # fmt: skip
        run("topic", "create", topic, code=1, stderr="error: ")
        run("topic", "create", topic, "--if-missing", stderr="exists already")

        found = as_json(run, "topic", "describe", topic)
        assert [row["partition"] for row in found["partitions"]] == [0, 1, 2]
        assert found["settings"] == [{"name": "retention.ms", "value": "1000000", "source": "topic"}]
        assert len(as_json(run, "topic", "describe", topic, "--all")["settings"]) > 5

        run("topic", "alter", topic, "--partitions", "5", "--set", "segment.bytes=65536", "--unset", "retention.ms")
        found = as_json(run, "topic", "describe", topic)
        assert len(found["partitions"]) == 5
        assert found["settings"] == [{"name": "segment.bytes", "value": "65536", "source": "topic"}]
        run("topic", "alter", topic, "--partitions", "2", code=1)
        run("topic", "alter", topic, code=2, stderr="nothing to change")

        run("topic", "delete", topic, "--confirm", "another", code=2, stderr="Nothing was done")
        assert as_json(run, "topic", "delete", topic, "--confirm", topic)["deleted"] is True
        run("topic", "describe", topic, code=1, stderr=f"There is no topic {topic}.")

    def test_list_counts_records(self, run: Run, topic: str) -> None:
        run("produce", topic, stdin=b"a\nb\nc\n")
        rows = {row["topic"]: row for row in as_json(run, "topic", "list")["topics"]}
        assert rows[topic] == {"topic": topic, "partitions": 1, "records": 3}
        assert topic in run("topic", "list")

    def test_what_cannot_be(self, run: Run, topic: str) -> None:
        run("topic", "create", "no spaces", code=1)
        run("topic", "create", topic, "--set", "no.such=1", code=1, stderr="no.such")
        run("topic", "create", topic, "--replication", "3", code=1)


class TestProduceAndTail:
    def test_lines_with_keys_and_headers(self, run: Run, topic: str) -> None:
        said = run("produce", topic, "-K", ":", "-H", "a=1", "-o", "json", stdin=b"k1:v1\nk2:v:2\n")
        result = json.loads(said)
        assert (result["records"], result["failed_records"]) == (2, 0)
        assert result["partitions"] == [{"partition": 0, "first_offset": 0, "last_offset": 1}]
        records = read(run, topic)
        assert [(record["key"], record["value"]) for record in records] == [("k1", "v1"), ("k2", "v:2")]
        assert records[0]["headers"] == [{"name": "a", "value": "1"}]
        assert abs(records[0]["timestamp_ms"] / 1000 - time.time()) < 60

    @pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
    def test_compression(self, run: Run, topic: str, compression: str) -> None:
        run("produce", topic, "-z", compression, stdin=b"x" * 1000 + b"\n" + b"y" * 1000)
        assert [record["value"][0] for record in read(run, topic)] == ["x", "y"]

    def test_files(self, run: Run, topic: str, tmp_path: Path) -> None:
        (tmp_path / "lines").write_bytes(b"one\r\ntwo\n")
        (tmp_path / "whole").write_bytes(b"\xff\x00\n")
        run("produce", topic, str(tmp_path / "lines"))
        run("produce", topic, str(tmp_path / "whole"), "--whole", "--key", "file")
        run("produce", topic, str(tmp_path / "none"), code=2, stderr="cannot be read: No such file")
        records = read(run, topic)
        assert [record["value"] for record in records] == ["one", "two", None]
        assert (records[2]["key"], records[2]["value_base64"]) == ("file", "/wAK")

    def test_tombstones(self, run: Run, topic: str) -> None:
        run("produce", topic, "-K", ":", "--empty-is-null", stdin=b"k:\n")
        assert read(run, topic)[0]["value"] is None
        assert "(null)" in run("tail", topic)

    def test_a_line_without_its_key(self, run: Run, topic: str) -> None:
        run("produce", topic, "-K", ":", stdin=b"k:v\nno key\n", code=2, stderr="Line 2 has no key")
        assert [record["value"] for record in read(run, topic)] == ["v"], "those before it are sent"

    def test_places(self, run: Run, topic: str) -> None:
        run("produce", topic, stdin=b"".join(b"%d\n" % number for number in range(25)))

        def values(*arguments: str) -> list[int]:
            return [int(record["value"]) for record in read(run, topic, *arguments)]

        assert values() == list(range(15, 25))
        assert values("--from", "beginning") == list(range(25))
        assert values("--from", "20") == list(range(20, 25))
        assert values("--from", "-3") == [22, 23, 24]
        assert values("--from", "end") == []
        assert values("--from", "1h") == list(range(25))
        assert values("--from", "2100-01-01T00:00:00Z") == []
        assert values("--from", "beginning", "--count", "2") == [0, 1]
        assert values("--from", "1000") == []

    def test_last_ones_of_several_partitions_are_in_order_of_time(self, run: Run, topic: str) -> None:
        run("topic", "create", topic, "-p", "3")
        for number, partition in enumerate([2, 0, 1, 0, 2]):
            run("produce", topic, "--partition", str(partition), stdin=b"%d" % number)
            time.sleep(0.002)
        assert [int(record["value"]) for record in read(run, topic, "--from", "-4")] == [1, 2, 3, 4]
        assert [int(record["value"]) for record in read(run, topic, "-p", "0")] == [1, 3]
        run("tail", topic, "-p", "7", code=2, stderr="has no partition 7")

    def test_template(self, run: Run, topic: str) -> None:
        run("produce", topic, "-K", ":", stdin=b"k:v\n")
        assert run("tail", topic, "--format", r"{partition}@{offset}\t{key}={value}") == "0@0\tk=v\n"

    def test_no_such_topic(self, run: Run) -> None:
        run("tail", "never-made", code=1, stderr="There is no topic never-made.")
        assert "never-made" not in run("topic", "list")

    def test_too_large(self, run: Run, topic: str) -> None:
        run("topic", "create", topic, "--set", "max.message.bytes=1024")
        run("produce", topic, stdin=b"x" * 5000, code=1, stderr="1 record not acknowledged")


class TestSignals:
    def start(
        self, node: NodeProcess, *arguments: str, stdin: int = PIPE, stdout: int = PIPE, stderr: int = PIPE
    ) -> subprocess.Popen[bytes]:
        source = str(Path(walstream.__file__).parents[1])
        environ = {**os.environ, "WALSTREAM_BOOTSTRAP": node.address, "PYTHONPATH": source}
        command = [sys.executable, "-m", "walstream.cli.main", *arguments]
        return subprocess.Popen(command, env=environ, stdin=stdin, stdout=stdout, stderr=stderr)

    def test_follow_prints_what_comes_and_ends_on_the_first_ctrl_c(
        self, run: Run, node: NodeProcess, topic: str
    ) -> None:
        run("topic", "create", topic)
        with self.start(node, "tail", topic, "-f", "--format", "{value}") as tail:
            assert tail.stdout is not None
            run("produce", topic, stdin=b"one\n")
            assert tail.stdout.readline() == b"one\n"
            run("produce", topic, stdin=b"two\n")
            assert tail.stdout.readline() == b"two\n"
            tail.send_signal(signal.SIGINT)
            code = tail.wait(10)
            assert code == 0, tail.stderr and tail.stderr.read()
            assert tail.stdout.read() == b""

    def test_produce_sends_what_it_has_on_the_first_ctrl_c(self, run: Run, node: NodeProcess, topic: str) -> None:
        run("topic", "create", topic)
        with self.start(node, "produce", topic, "--linger-ms", "60000") as produce:
            assert produce.stdin is not None
            assert produce.stderr is not None
            produce.stdin.write(b"one\ntwo\n")
            produce.stdin.flush()
            time.sleep(2)  # Nothing says that it waits for the third line.
            produce.send_signal(signal.SIGINT)
            code, said = produce.wait(10), produce.stderr.read()
            assert code == 0, said
            assert b"Produced 2 records" in said
        assert [record["value"] for record in read(run, topic)] == ["one", "two"]

    @pytest.mark.parametrize("is_typed", [False, True])
    def test_produce_sends_what_it_has_when_its_terminal_closes(
        self, run: Run, node: NodeProcess, topic: str, is_typed: bool
    ) -> None:
        """Neither can be said that it sends the rest, nor, where the records are typed, can the next one be read."""
        run("topic", "create", topic)
        ours, theirs = pty.openpty()
        read_end, write_end = os.pipe()
        options = ("produce", topic, "--linger-ms", "60000")
        with self.start(
            node, *options, stdin=theirs if is_typed else read_end, stdout=theirs, stderr=theirs
        ) as produce:
            os.close(theirs)
            os.close(read_end)
            os.write(ours if is_typed else write_end, b"one\ntwo\n")
            time.sleep(2)  # Nothing says that it waits for the third line.
            os.close(ours)
            for _ in range(2):
                produce.send_signal(signal.SIGHUP)
            assert produce.wait(10) == 0 or is_typed
            os.close(write_end)
        assert [record["value"] for record in read(run, topic)] == ["one", "two"]


class TestGroup:
    def test_list_describe_reset(self, run: Run, node: NodeProcess, topic: str) -> None:
        group = f"group-{topic}"
        run("produce", topic, stdin=b"1\n2\n3\n4\n")
        commit(node, group, topic, 3)
        rows = {row["group"]: row for row in as_json(run, "group", "list")["groups"]}
        assert rows[group] == {"group": group, "state": "empty", "members": 0, "topics": [topic], "lag_records": 1}
        assert group in run("group", "list")

        (row,) = as_json(run, "group", "describe", group)["partitions"]
        assert (row["committed_offset"], row["end_offset"], row["lag_records"], row["member"]) == (3, 4, 1, None)

        run("group", "reset", group, "--to", "beginning", "--confirm", "another", code=2, stderr="Nothing was done")
        (moved,) = as_json(run, "group", "reset", group, "--to", "beginning", "--confirm", group)["partitions"]
        assert (moved["before_offset"], moved["after_offset"]) == (3, 0)
        for place, offset in (("latest", 4), ("2", 2), ("-1", 3), ("1h", 0), ("2100-01-01T00:00:00Z", 4), ("99", 4)):
            run("group", "reset", group, "--to", place, "--confirm", group)
            (row,) = as_json(run, "group", "describe", group)["partitions"]
            assert row["committed_offset"] == offset, place

    def test_reset_of_a_group_that_is_new(self, run: Run, topic: str) -> None:
        group = f"group-{topic}"
        run("produce", topic, stdin=b"1\n2\n")
        run("group", "reset", group, "--to", "end", "--confirm", group, code=1, stderr=f"There is no group {group}.")
        run("group", "reset", group, "--to", "end", "--topic", topic, "--confirm", group)
        (row,) = as_json(run, "group", "describe", group)["partitions"]
        assert row["committed_offset"] == 2

    def test_members_keep_their_offsets(self, run: Run, node: NodeProcess, topic: str) -> None:
        group = f"group-{topic}"
        run("produce", topic, stdin=b"1\n2\n")
        consumer = Consumer({"bootstrap.servers": node.address, "group.id": group, "auto.offset.reset": "earliest"})
        consumer.subscribe([topic])
        while not consumer.consume(1, 1):
            pass
        consumer.commit(asynchronous=False)
        found = as_json(run, "group", "describe", group)
        assert (found["state"], found["members"]) == ("stable", 1)
        assert found["partitions"][0]["member"]
        run("group", "reset", group, "--to", "end", "--confirm", group, code=1, stderr="has members")
        consumer.close()


class TestStatus:
    def test_healthy(self, run: Run, node: NodeProcess) -> None:
        said = as_json(run, "status")
        assert (said["state"], said["address"]) == ("ok", node.address)
        assert said["health"]["partitions_offline"] == 0
        assert len(said["nodes"]) == 1
        assert "state" in run("status")

    def test_health_endpoint_elsewhere(self, run: Run) -> None:
        run("status", "--http", "127.0.0.1:1", code=3, stderr="its health endpoint 127.0.0.1:1 does not")

    def test_nobody_answers(self, run: Run) -> None:
        run("status", "--bootstrap", "127.0.0.1:1", code=3)
