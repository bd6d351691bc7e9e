"""A capture to be run, stopped and killed by tests, and the tables that reading its log by the rule gives.

`InThread` runs a generation in a thread of the test, `InProcess` in a process of its own that can be killed. `tables`
reads everything that is in the log, by the rule and with all counts checked, and folds it: the newest finished snapshot
of each table, then the changes that committed at or after its LSN, in the order of their positions.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from confluent_kafka import Consumer, KafkaException, TopicPartition

import walstream
from postgres.servers import Database
from waiting import TIMEOUT_S, wait_until
from walstream.capture.commit_points import Point, TableSnapshot
from walstream.capture.reading import LogReader
from walstream.capture.runner import run_generation
from walstream.config import Config, load
from walstream.errors import WalstreamError
from walstream.node.process import NodeProcess
from walstream.positions import Lsn

_RUN = """
import signal, sys
from pathlib import Path
from walstream import logs
from walstream.capture.runner import run_generation
from walstream.config import load
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
logs.set_up(style="json")
run_generation(load(Path(sys.argv[1])).config, lambda: bool(stopped))
"""


def settings(database: Database, node: NodeProcess, **more: object) -> dict[str, Any]:
    """What a capture of this database into this node needs; more as `section__key=value`."""
    return {
        "source.postgres.host": "127.0.0.1",
        "source.postgres.port": database.server.port,
        "source.postgres.database": database.name,
        "source.postgres.slot_name": f"slot_{database.name}",
        "capture.bootstrap": node.address,
        "capture.prefix": database.name,
        **{name.replace("__", "."): value for name, value in more.items()},
    }


def configured(database: Database, node: NodeProcess, **more: object) -> Config:
    return load(None, {}, settings(database, node, **more)).config


class InThread:
    """A generation in a thread. A context manager: leaving it stops it, and raises what it failed with."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stop = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            run_generation(self._config, self._stop.is_set)
        except BaseException as error:
            self.failure = error

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the capture does not stop"
        if kind is None:
            self.check()


class InProcess:
    """A generation in a process of its own, to be killed."""

    def __init__(self, given: dict[str, Any], folder: Path) -> None:
        self._file = folder / "walstream.toml"
        self._file.write_text("\n".join(_toml(given)), encoding="utf-8")
        self._log = folder / "capture.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        root = str(Path(walstream.__file__).parent.parent)
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _RUN, str(self._file)],
                env={**os.environ, "PYTHONPATH": root},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def check(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, self.log()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(TIMEOUT_S) == 0, self.log()

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-8_000:]


def _toml(given: dict[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        yield f"{name} = {json.dumps(value)}"


class Log:
    """The log of one capture, as a reader sees it."""

    def __init__(self, node: NodeProcess, database: Database, capture: InThread | InProcess | None = None) -> None:
        self._node = node
        self._database = database
        self.capture = capture

    def last(self) -> Point | None:
        if self.capture is not None:
            self.capture.check()
        try:
            with LogReader(self._node.address, self._database.name) as log:
                return log.last_point()
        except WalstreamError:
            return None  # The topics are not there yet.

    def snapshots(self) -> dict[str, TableSnapshot]:
        point = self.last()
        return {} if point is None else {f"{one.schema}.{one.table}": one for one in point.snapshots.values()}

    def wait_for_snapshots(self, *tables: str) -> dict[str, TableSnapshot]:
        found: dict[str, TableSnapshot] = {}

        def are_there() -> bool:
            found.update(self.snapshots())
            return set(tables) <= set(found)

        wait_until(are_there, f"snapshots of {tables}")
        return found

    def end(self, topic: str) -> int:
        """The end of the first partition of a topic, 0 while it is not there."""
        consumer = Consumer({"bootstrap.servers": self._node.address, "group.id": "end"})
        try:
            return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=TIMEOUT_S)[1])
        except KafkaException:
            return 0
        finally:
            consumer.close()

    def wait(self) -> None:
        """Wait until everything that has committed by now is durable in the log."""
        end = Lsn.parse(self._database.execute("select pg_current_wal_flush_lsn()::text")[0][0])

        def is_there() -> bool:
            point = self.last()
            return point is not None and point.end_lsn >= end

        wait_until(is_there, f"the log to reach {end}")

    def tables(self) -> dict[str, Folded]:
        return tables(self._node, self._database.name)


class Folded:
    """A table as the log tells it: rows by key, or for a table without key as often as they are there."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, dict[str, Any]] = {}
        self.without_key: Counter[str] = Counter()
        self.snapshot_rows = 0

    @property
    def rows(self) -> Counter[str]:
        return self.without_key + Counter(canonical(row) for row in self.by_key.values())


def canonical(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, ensure_ascii=False)


def tables(node: NodeProcess, prefix: str) -> dict[str, Folded]:
    """Read the whole log by the rule and fold it."""
    with LogReader(node.address, prefix) as log:
        points = list(log.points())
        newest: dict[str, TableSnapshot] = {}
        for point in points:
            if point.snapshot is not None:
                newest[f"{point.snapshot.schema}.{point.snapshot.table}"] = point.snapshot
        found: dict[str, Folded] = {name: Folded() for name in newest}
        changes: list[tuple[tuple[int, int, int], str, bytes | None, dict[str, Any]]] = []
        seen: set[tuple[str, tuple[int, int, int]]] = set()
        for row in log.rows(points):
            assert row.value is not None
            event = json.loads(row.value)
            source = event["source"]
            name = f"{source['schema']}.{source['table']}"
            snapshot = newest.get(name)
            if event["op"] == "r":
                assert row.headers["op"] == b"r"
                assert snapshot is not None
                if source["snapshot"] != snapshot.id:
                    continue
                assert (source["commit_lsn"], source["seq"]) == (Lsn.parse(snapshot.lsn), 0)
                found[name].snapshot_rows += 1
                _put(found[name], row.key, event["after"])
                continue
            position = (source["source_epoch"], source["commit_lsn"], source["seq"])
            assert (name, position) not in seen, "a change is in the log twice"
            seen.add((name, position))
            if snapshot is not None and source["commit_lsn"] >= Lsn.parse(snapshot.lsn):
                changes.append((position, name, row.key, event))
    for _, name, key, event in sorted(changes, key=lambda change: change[0]):
        _apply(found[name], key, event)
    for name, snapshot in newest.items():
        assert found[name].snapshot_rows == snapshot.rows
    return found


def _put(table: Folded, key: bytes | None, row: dict[str, Any]) -> None:
    if key is None:
        table.without_key[canonical(row)] += 1
    else:
        table.by_key[key] = row


def _apply(table: Folded, key: bytes | None, event: dict[str, Any]) -> None:
    match event["op"]:
        case "c":
            assert key is None or key not in table.by_key, f"{key!r} is inserted twice"
            _put(table, key, event["after"])
        case "u":
            assert key is not None
            assert key in table.by_key, f"{key!r} is updated and was never there"
            table.by_key[key] = {**table.by_key[key], **event["after"]}
        case "d":
            assert key is not None
            assert table.by_key.pop(key, None) is not None, f"{key!r} is deleted and was never there"
        case "t":
            table.by_key.clear()
            table.without_key.clear()


def source_rows(database: Database, query: str) -> Counter[str]:
    """What the source says; the query gives one JSON object per row."""
    return Counter(canonical(row) for (row,) in database.execute(query))


@contextmanager
def working(work: Callable[[int], None]) -> Iterator[None]:
    """Do something again and again in a thread while the block runs, with a number that counts from 0."""
    stopped = threading.Event()
    failures: list[BaseException] = []

    def repeat() -> None:
        number = 0
        try:
            while not stopped.is_set():
                work(number)
                number += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
    if failures:
        raise failures[0]
