"""A stop signal never leaves a process behind that was just started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from walstream.demo.parts import Command
from walstream.node.process import NodeProcess
from walstream.postgres.embedded import EmbeddedPostgres
from walstream.stopping import interrupt, uninterrupted


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGTERM, interrupt)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)  # The handler runs between two steps of Python.


def test_a_signal_interrupts_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        send()


def test_a_signal_waits_for_the_end_of_the_outermost_block() -> None:
    done = []

    def run() -> None:
        with uninterrupted():
            with uninterrupted():
                send()
            done.append("inner")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["inner"]
    with uninterrupted():
        pass  # It is not raised again.


def test_a_block_that_fails_is_interrupted_all_the_same() -> None:
    def run() -> None:
        with uninterrupted():
            send()
            raise ValueError

    with pytest.raises(KeyboardInterrupt):
        run()


def command(folder: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    made = Command("config", "node", "start", "--data", str(folder / "data"), folder=folder)
    return made.start, made.kill


def node(folder: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    made = NodeProcess(folder / "data")
    return made.start, made.kill


def postgres(folder: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    made = EmbeddedPostgres(folder / "postgres")
    return made.start, made.remove


@pytest.mark.parametrize("make", [command, node, postgres])
def test_a_signal_between_the_start_of_a_process_and_its_being_known(
    make: Callable[[Path], tuple[Callable[[], object], Callable[[], object]]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []

    class Signalled(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if "initdb" not in str(arguments[0]):
                started.append(self.pid)
                send()

    monkeypatch.setattr(subprocess, "Popen", Signalled)
    start, kill = make(tmp_path_factory.mktemp("stopping"))
    with pytest.raises(KeyboardInterrupt):
        start()
    kill()
    assert started
    with pytest.raises(ProcessLookupError):
        os.kill(started[-1], 0)
