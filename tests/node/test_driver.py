"""The driver of a partition's core, the turns of the loop and the lines between nodes, each by itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from log.rig import Rig
from walstream.config import load
from walstream.errors import ConfigError
from walstream.log.disk import OsDisk
from walstream.node.driver import DOING, Replica
from walstream.node.lines import FileRange, PlainLine
from walstream.node.peers import Peers
from walstream.node.turns import Turns
from walstream.replication.context import NEVER
from walstream.replication.effects import Effect


def test_every_effect_is_done() -> None:
    assert set(DOING) == set(get_args(Effect))


class Called:
    """Marks and is called."""

    def __init__(self) -> None:
        self.calls = 0
        self.wake_ms = NEVER
        self.ticks: list[int] = []
        self.turns: Turns | None = None

    is_awaited = False

    def look(self) -> None:
        self.calls += 1

    serve = look

    def looked(self) -> None:
        """Nothing is kept here."""

    served = looked

    def tick(self) -> None:
        assert self.turns is not None
        self.ticks.append(self.turns.clock_ms())


async def test_many_marks_make_one_call_in_a_turn() -> None:
    turns, link, partition = Turns(), Called(), Called()
    for _ in range(100):
        turns.mark_link(link)
    turns.mark(partition)
    assert (link.calls, partition.calls) == (0, 0), "not before the turn ends"
    await asyncio.sleep(0.01)
    assert (link.calls, partition.calls) == (1, 1)


async def test_what_a_thread_has_finished_is_a_turn_of_its_own() -> None:
    """Nobody who waited for the disk waits for the requests of others, too."""
    turns, partition, story = Turns(), Called(), []

    def finished() -> None:
        turns.mark(partition)
        asyncio.get_running_loop().call_soon(lambda: story.append(partition.calls))
        story.append(partition.calls)

    await asyncio.to_thread(turns.post, finished)
    await asyncio.sleep(0.01)
    assert story == [0, 1], "called before whatever else the loop has to do"


async def test_a_failure_of_one_does_not_keep_the_others_waiting() -> None:
    class Failing(Called):
        def look(self) -> None:
            raise RuntimeError("planted")

    turns, sound = Turns(), Called()
    turns.mark(Failing())
    turns.mark(sound)
    await asyncio.sleep(0.01)
    assert sound.calls == 1


async def test_a_turn_is_over_when_the_links_have_sent_what_came_of_it() -> None:
    turns, link = Turns(), Called()
    story: list[str] = []

    class Telling(Called):
        def look(self) -> None:
            story.append("look")
            turns.mark_link(link)

        def looked(self) -> None:
            story.append(f"looked, {link.calls} served")

    turns.mark(Telling())
    await asyncio.sleep(0.01)
    assert story == ["look", "looked, 1 served"]


class Marked:
    """The host of a replica, as far as marks go."""

    node_id = 1

    def __init__(self) -> None:
        self.marks = 0

    def mark(self, _: Replica) -> None:
        self.marks += 1


def test_followers_are_told_at_once_of_what_waits_for_them_and_of_the_rest_when_it_is_durable(tmp_path: Path) -> None:
    rig, host = Rig(tmp_path), Marked()
    partition = rig.topic()
    replica = Replica(host, partition, manager=None)  # type: ignore[arg-type]  # The core is not reached here.
    appended = rig.append(partition, "for this disk alone")
    partition.when_durable(appended.last_offset, lambda _: None)
    assert host.marks == 0
    for _ in range(3):
        partition.when_visible(rig.append(partition, "for all").last_offset, lambda _: None)
    assert host.marks == 1, "once a turn"
    rig.driver.flush()
    assert host.marks == 2
    replica.when_followers_durable(appended.last_offset, lambda _: None)
    assert host.marks == 2, "a turn is coming"


async def test_nobody_is_woken_late_or_twice() -> None:
    turns = Turns()
    sleepers = [Called() for _ in range(3)]
    now_ms = turns.clock_ms()
    for sleeper, delay_ms in zip(sleepers, (60, 20, 40), strict=True):
        sleeper.turns = turns
        turns.wake_at(sleeper, now_ms + delay_ms)
    turns.wake_at(sleepers[0], now_ms + 5)
    await asyncio.sleep(0.15)
    assert [len(sleeper.ticks) for sleeper in sleepers] == [1, 1, 1]
    for sleeper, delay_ms in zip(sleepers, (5, 20, 40), strict=True):
        assert sleeper.ticks[0] >= now_ms + delay_ms
        assert sleeper.wake_ms == NEVER
    turns.stop()


class Gathering:
    """The owner of a line, who keeps what comes."""

    def __init__(self) -> None:
        self._buffer = bytearray(10_000)
        self.data = bytearray()
        self.rooms = 0
        self.reason = ""

    def buffer(self) -> memoryview:
        return memoryview(self._buffer)

    def received(self, count: int) -> None:
        self.data += self._buffer[:count]

    def writable(self) -> None:
        self.rooms += 1

    def lost(self, reason: str) -> None:
        self.reason = reason


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(what)


async def test_buffers_and_files_arrive_in_order(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(range(256)) * 20_000)
    file = OsDisk().open(path)
    loop = asyncio.get_running_loop()
    ends = tcp_pair()
    owners = Gathering(), Gathering()
    lines = [PlainLine(end, owner, loop) for end, owner in zip(ends, owners, strict=True)]
    expected = bytearray()
    for number in range(50):
        head = f"frame {number} ".encode() * 300
        lines[0].write([head, memoryview(head)])
        lines[0].send_file(FileRange(file.descriptor, number * 1000, 100_000 - number, file))
        expected += head * 2 + path.read_bytes()[number * 1000 : number * 1000 + 100_000 - number]
    assert lines[0].unsent_bytes > 0, "more than a socket takes at once"
    await until(lambda: len(owners[1].data) >= len(expected), "everything arrives")
    assert owners[1].data == expected
    assert lines[0].unsent_bytes == 0
    assert owners[0].rooms > 0, "whoever has more to send was told"
    lines[0].close()
    await until(lambda: owners[1].reason, "the other end hears of it")
    assert not owners[0].reason, "who closes a line hears nothing more"


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        second, _ = listener.accept()
    return first, second


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", ":0", "example.org:1"])
async def test_listening_for_leaders_beyond_loopback_needs_a_secret_or_certificates(address: str) -> None:
    def peers(**settings: object) -> Peers:
        given = {f"replication.{name}": value for name, value in {"listen": address, **settings}.items()}
        return Peers(None, load(overrides=given).config.replication, 1, 1, "c")  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="would let strangers write"):
        peers()
    with pytest.raises(ConfigError, match="no such environment variable"):
        peers(secret_env="NO_SUCH_SECRET")
    peers(allow_insecure=True)
    peers(listen="127.0.0.1:0")
