"""Subscribers of the feed, a few processes of many: how they are started, told to begin, and asked what came."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from walstream.feed.process import FeedProcess
from walstream.feed.wal_pb2 import SubscribeRequest

PROCESSES_MAX = 2
TIMEOUT_S = 180.0
MB = 1_000_000

SUBSCRIBERS = Path(__file__).with_name("subscribers.py")


@dataclass(frozen=True)
class Came:
    """What some subscribers got together, and when."""

    begun: float
    ended: float
    entries: int
    batches: int
    size_bytes: int
    busy_s: float
    places: list[str]

    @property
    def entries_per_s(self) -> float:
        return self.entries / (self.ended - self.begun)

    @property
    def mb_per_s(self) -> float:
        return self.size_bytes / (self.ended - self.begun) / MB


class Subscribers:
    """Processes of subscribers, which begin with the context and are gone after it."""

    def __init__(self, feed: FeedProcess, tasks: Sequence[dict[str, Any]]) -> None:
        self.feed = feed
        self.processes = []
        token = feed.token("bench", "admin")
        for task in tasks:
            process = subprocess.Popen(
                [sys.executable, str(SUBSCRIBERS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self.processes.append(process)
            self._write(process, json.dumps({**task, "address": feed.address, "token": token}))
        self.watch = threading.Timer(TIMEOUT_S, self._kill)
        self.watch.daemon = True
        self.watch.start()

    def __enter__(self) -> Subscribers:
        """Let them begin once all of them are connected."""
        self._lines()
        for process in self.processes:
            self._write(process, "go")
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.cancel()
        for process in self.processes:
            process.kill()
            process.wait()

    def begun(self) -> None:
        """Wait until every stream has brought something."""
        self._lines()

    def came(self) -> Came:
        """Wait until every stream has brought everything."""
        lines = self._lines()
        return Came(
            begun=min(line["begun"] for line in lines),
            ended=max(line["ended"] for line in lines),
            entries=sum(line["entries"] for line in lines),
            batches=sum(line["batches"] for line in lines),
            size_bytes=sum(line["size_bytes"] for line in lines),
            busy_s=sum(line["busy_s"] for line in lines),
            places=lines[0]["places"],
        )

    def _write(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None, "a pipe was asked for"
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def _lines(self) -> list[dict[str, Any]]:
        lines = []
        for process in self.processes:
            assert process.stdout is not None, "a pipe was asked for"
            line = process.stdout.readline()
            if not line:
                raise AssertionError(f"subscribers failed; the feed says: {self.feed.log_tail()}")
            lines.append(json.loads(line))
        return lines

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()


def requests(topics: Sequence[str], count: int, starts: Sequence[str] = ("oldest",)) -> list[list[str]]:
    """Return what so many subscribers ask for, dealt out to a few processes."""
    wanted = [
        base64.b64encode(SubscribeRequest(start_lsn=start, topics=topics).SerializeToString()).decode()
        for start in itertools.islice(itertools.cycle(starts), count)
    ]
    processes = min(count, PROCESSES_MAX)
    return [wanted[number::processes] for number in range(processes)]
