"""Ctrl-C: the first drains, the second stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from walstream.cli.interrupt import ForcedExit, Interrupt


def interrupt_ourselves() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_first_only_sets_the_flag_and_second_stops() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        interrupt_ourselves()
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            interrupt_ourselves()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_closed_terminal_asks_once_however_often_it_says_so() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with Interrupt() as interrupt:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            interrupt_ourselves()
    assert signal.getsignal(signal.SIGHUP) is before


def test_under_nohup_a_closed_terminal_means_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.requested
            interrupt_ourselves()
            assert interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_first_ends_a_wait_for_the_next_item() -> None:
    read, write = os.pipe()
    os.write(write, b"one\n")

    def lines() -> Iterator[bytes]:
        with os.fdopen(read, "rb", buffering=0) as stream:
            yield stream.readline()
            interrupt_ourselves()
            yield stream.readline()

    with Interrupt() as interrupt:
        assert list(interrupt.until(lines())) == [b"one\n"]
        assert interrupt.requested
    os.close(write)


def test_items_end_by_themselves() -> None:
    with Interrupt() as interrupt:
        assert list(interrupt.until(iter([1, 2]))) == [1, 2]
        assert not interrupt.requested


DEAF = """
import hashlib
from walstream.cli.interrupt import ForcedExit, Interrupt

with ForcedExit(7, lambda: print("last words", flush=True), 0.2), Interrupt():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)  # hears of no signal for many minutes
"""


def test_second_ends_a_call_that_hears_of_no_signal() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    with process, process.stdout as stdout:
        assert stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 7
        assert stdout.read() == b"last words\n"


def test_a_closed_terminal_forces_nothing_and_a_signal_after_it_does() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    with process, process.stdout as stdout:
        assert stdout.readline() == b"ready\n"
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            time.sleep(0.4)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7
        assert stdout.read() == b"last words\n"


def test_a_heeded_signal_forces_nothing() -> None:
    with ForcedExit(7, lambda: None, 60), Interrupt() as interrupt:
        interrupt_ourselves()
        with pytest.raises(KeyboardInterrupt):
            interrupt_ourselves()
        assert interrupt.requested
    assert signal.set_wakeup_fd(-1) == -1
