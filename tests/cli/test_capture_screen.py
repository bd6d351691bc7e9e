"""What `capture run` shows: the arithmetic and the words, without a terminal."""

from __future__ import annotations

import io
import json

import pytest

from walstream import logs
from walstream.capture.ladder import LadderRecord
from walstream.capture.snapshot_plan import Progress
from walstream.cli.capture_screen import LOG_INTERVAL_S, LiveScreen, LogScreen, Rate, bar, look_in_words, make


def record(rows: int = 0, at_ms: int = 0, durable: int = 100, received: int = 100, lag_ms: int = 0) -> LadderRecord:
    end = max(durable, received)
    return LadderRecord(
        instance="i", gen=1, source_epoch=1, at_ms=at_ms, server_end=end, sent=end, received=received, durable=durable,
        lag_bytes=end - durable, lag_ms=lag_ms, last_commit_time_us=0, rows_total=rows, bytes_total=0,
    )  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rate() -> None:
    rate = Rate()
    assert rate.of(1_000, 0) == 0
    assert rate.of(3_000, 500) == 4_000
    assert rate.of(3_000, 500) == 0  # the same moment
    assert rate.of(10, 1_500) == 0  # another log
    assert rate.of(20, 2_500) == 10


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (record(rows=1), "    1,234 rows/s   1 row captured   durable to 0/64   up to date"),
        (record(rows=2_000, durable=50), "    1,234 rows/s   2,000 rows captured   durable to 0/32   50 B behind"),
        (record(durable=0, received=2048, lag_ms=1500), "durable to 0/0   2.0 KiB and 1.5 s behind"),
    ],
)
def test_look_in_words(given: LadderRecord, words: str) -> None:
    assert look_in_words(given, 1234).endswith(words)


def test_bar() -> None:
    assert bar(Progress(0, 1, 0, 100, 0)) == "╌" * 24 + "   0%"
    assert bar(Progress(0, 1, 50, 100, 0)) == "━" * 12 + "╌" * 12 + "  50%"
    assert bar(Progress(1, 1, 0, 0, 0)) == "━" * 24 + " 100%"


def test_log_lines_come_every_ten_seconds_and_when_something_moved() -> None:
    said, now_s = io.StringIO(), 0.0
    logs.set_up("info", "json", said)
    screen = LogScreen(lambda: now_s)
    for second in range(35):
        now_s = float(second)
        # Nothing moves from second 12 on.
        screen.look(record(rows=min(second, 12) * 100, at_ms=second * 1000, durable=min(second, 12)))
    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    assert [line["rows_total"] for line in lines] == [1_000, 1_200]
    assert lines[0]["rows_per_s"] == 100
    assert LOG_INTERVAL_S == 10


def test_the_log_appears_above_the_line() -> None:
    terminal = Terminal()
    screen = LiveScreen(terminal)
    with screen:
        logs.set_up("info", "console", screen.stream)
        screen.look(record(rows=5))
        logs.get("walstream.test").info("something happened", count=1)
        display = screen.snapshot()
        display.show(Progress(0, 2, 5, 10, 7), 7)
        screen.look(record(rows=6))  # the bar has the place
        display.close()
        display.close()
        screen.look(record(rows=7))
    shown = terminal.getvalue()
    assert shown.index("5 rows captured") < shown.index("something happened") < shown.index("snapshot ━")
    assert "6 rows captured" not in shown
    assert "7 rows captured" in shown
    assert "0 of 2 tables, 7 rows" in shown


def test_which_screen() -> None:
    assert isinstance(make(Terminal(), "auto"), LiveScreen)
    assert isinstance(make(Terminal(), "json"), LogScreen)
    assert isinstance(make(io.StringIO(), "auto"), LogScreen)
