"""Ctrl-C: the first drains, the second stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from walstream.cli.interrupt import Interrupt


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
