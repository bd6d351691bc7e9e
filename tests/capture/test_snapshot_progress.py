"""What a running snapshot says of itself."""

from __future__ import annotations

from structlog.testing import capture_logs

from walstream.capture.snapshot_plan import Progress
from walstream.capture.snapshot_progress import LogDisplay, duration_in_words, estimate, in_words


def progress(blocks_read: int, block_count: int = 1_000) -> Progress:
    return Progress(tables_complete=1, table_count=3, blocks_read=blocks_read, block_count=block_count, row_count=0)


def test_time_left_follows_blocks_and_not_rows() -> None:
    assert estimate(progress(250), 50_000, 10.0) == (5_000.0, 30.0)
    assert estimate(progress(1_000), 50_000, 10.0) == (5_000.0, 0.0)
    assert estimate(progress(0), 10, 1.0) == (10.0, None)
    assert estimate(progress(0), 0, 0.0) == (0.0, None)


def test_words() -> None:
    found = estimate(progress(250), 50_000, 10.0)
    assert in_words(progress(250), 50_000, found) == "1 of 3 tables, 50,000 rows, 5,000 rows/s, 0:30 left"
    assert in_words(progress(0), 1, estimate(progress(0), 1, 1.0)) == "1 of 3 tables, 1 row, 1 rows/s"
    assert duration_in_words(3_723) == "1:02:03"


def test_log_lines_come_now_and_then() -> None:
    now = [0.0]
    with capture_logs() as lines:
        display = LogDisplay(clock=lambda: now[0], interval_s=10)
        for second in range(25):
            now[0] = float(second)
            display.show(progress(40 * second), 1_000 * second)
        display.close()
    assert [line["rows"] for line in lines] == [10_000, 20_000]
    assert lines[0]["event"] == "snapshot progress"
    assert (lines[0]["tables"], lines[0]["rows_per_s"], lines[0]["seconds_left"]) == ("1/3", 1_000, 15)
