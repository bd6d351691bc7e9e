"""What the pipeline says of itself: the arithmetic, the words, the samples."""

from __future__ import annotations

import io
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from walstream import logs
from walstream.cli.pipeline_screen import (
    LOG_INTERVAL_S,
    TABLES_MAX,
    LiveScreen,
    LogScreen,
    chosen,
    drawn,
    duration_in_words,
    head_in_words,
    make,
)
from walstream.ops.metrics import PipelineExporter
from walstream.positions import Lsn
from walstream.spark.progress import RATE_WINDOW_S, Progress, TableView, View
from walstream.spark.rung import record


class Clocks:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return 1_000_000.0 + self.now_s

    def us(self) -> int:
        return round(self.wall() * 1_000_000)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def progress(clocks: Clocks) -> Progress:
    return Progress(clocks.monotonic, clocks.wall)


def one_batch(progress: Progress, clocks: Clocks, rows: int = 1_000, seconds: float = 2.0) -> None:
    committed_us, began_s = clocks.us() - 500_000, progress.begin()
    progress.writing("public.a", "mirror")
    clocks.now_s += seconds
    progress.wrote("public.a", began_s=began_s, rows=rows, commit_time_us=committed_us, version=3)
    progress.listed({"public.a": 3}, {"public.b": "append"})
    progress.ended(0, began_s=began_s, source_epoch=1, end_lsn=Lsn(4096), point=9, rows=rows, time_us=committed_us)


def test_a_batch(progress: Progress, clocks: Clocks) -> None:
    assert progress.look() == View()
    one_batch(progress, clocks)
    view = progress.look()
    first, second = view.tables
    assert (first.name, first.mode, first.state, first.version) == ("public.a", "mirror", "current", 3)
    assert (first.rows_total, first.batch_ms, first.freshness_ms) == (1_000, 2_000, 2_500)
    assert (second.name, second.mode, second.state, second.freshness_ms) == ("public.b", "append", "waiting", None)
    assert (view.end_lsn, view.point, view.batches, view.batch_ms, view.freshness_ms) == (4096, 9, 1, 2_000, 2_500)
    assert view.rows_per_s == first.rows_per_s == 500


def test_a_rate_fades(progress: Progress, clocks: Clocks) -> None:
    one_batch(progress, clocks)
    clocks.now_s += 2
    assert progress.look().rows_per_s == 250
    clocks.now_s += RATE_WINDOW_S
    assert progress.look().rows_per_s == 0
    assert progress.look().tables[0].rows_per_s == 0


def test_a_table_that_has_stopped_is_told_with_its_reason(progress: Progress, clocks: Clocks) -> None:
    one_batch(progress, clocks)
    progress.stopped("public.a", "It has no key.")
    (table, _) = progress.look().tables
    assert (table.state, table.reason, table.rows_total) == ("stopped", "It has no key.", 1_000)


def test_an_idle_batch_says_nothing_of_freshness(progress: Progress, clocks: Clocks) -> None:
    progress.ended(1, began_s=99, source_epoch=1, end_lsn=Lsn(1), point=1, rows=0, time_us=clocks.us() - 10**9)
    assert progress.look().freshness_ms is None


def test_the_samples(progress: Progress, clocks: Clocks) -> None:
    one_batch(progress, clocks)
    progress.stopped("public.b", "no")
    progress.lag(12)
    text = PipelineExporter(progress).render().decode()
    samples = {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["walstream_pipeline_batches_total"] == 1
    assert samples["walstream_pipeline_rows_total"] == 1_000
    assert samples["walstream_pipeline_applied_lsn"] == 4096
    assert samples["walstream_pipeline_lag_rows"] == 12
    assert samples["walstream_pipeline_tables{current}"] == samples["walstream_pipeline_tables{stopped}"] == 1
    assert samples["walstream_pipeline_table_stopped{public.b}"] == 1
    assert samples["walstream_pipeline_freshness_seconds_bucket{2.5}"] == 1
    assert samples["walstream_pipeline_table_freshness_seconds{public.a}"] == 2.5


def test_the_rung(progress: Progress, clocks: Clocks) -> None:
    one_batch(progress, clocks)
    found = record(progress.look(), "me", 5)
    assert (found.applied, found.point, found.tables, found.tables_waiting, found.tables_stopped) == (4096, 9, 2, 1, 0)
    assert (found.stage, found.at_ms, found.freshness_ms) == ("pipeline", 5, 2_500)


@pytest.mark.parametrize(
    ("ms", "words"), [(None, "-"), (0, "0 ms"), (999, "999 ms"), (2_140, "2.1 s"), (180_000, "3 min")]
)
def test_durations(ms: int | None, words: str) -> None:
    assert duration_in_words(ms) == words


def test_the_head() -> None:
    assert head_in_words(View()) == "waiting for the first batch"
    view = View(
        end_lsn=Lsn(4096), batches=2, batch_ms=340, rows_total=1, rows_per_s=12.6, freshness_ms=1_500, lag_rows=0,
    )  # fmt: skip
    assert head_in_words(view) == (
        "13 rows/s   1 row in 2 batches   tables at 0/1000   last batch 340 ms   freshness 1.5 s   up to date"
    )


def test_of_many_tables_those_that_matter_are_drawn() -> None:
    tables = tuple(TableView(f"t{number:03}", rows_per_s=float(number)) for number in range(100))
    stopped = TableView("s", state="stopped")
    shown = chosen((stopped, *tables))
    assert len(shown) == TABLES_MAX
    assert shown[0] == stopped
    assert shown[1:] == tables[-TABLES_MAX + 1 :]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_log_appears_above_the_table(progress: Progress, clocks: Clocks) -> None:
    one_batch(progress, clocks)
    terminal = Terminal()
    screen = make(terminal, "auto")
    assert isinstance(screen, LiveScreen)
    with screen:
        logs.set_up("info", "console", screen.stream)
        screen.look(progress.look())
        logs.get("walstream.test").info("something happened", count=1)
    shown = terminal.getvalue()
    assert shown.index("public.a") < shown.index("something happened")
    assert "tables at 0/1000" in shown


def test_the_table_shows_rate_time_and_freshness_of_each_table(progress: Progress, clocks: Clocks) -> None:
    one_batch(progress, clocks)
    progress.stopped("public.b", "no")
    shown = io.StringIO()
    Console(file=shown, width=120).print(drawn(progress.look()))
    _, head, first, second = (line.split() for line in shown.getvalue().splitlines())
    assert head == ["table", "mode", "state", "rows/s", "rows", "batch", "freshness", "version"]
    assert first == ["public.a", "mirror", "current", "500", "1,000", "2.0", "s", "2.5", "s", "3"]
    assert second == ["public.b", "append", "stopped", "0", "0", "-", "-", "-"]


def test_log_lines_come_every_ten_seconds_and_when_something_moved() -> None:
    said, now_s = io.StringIO(), 0.0
    logs.set_up("info", "json", said)
    screen = LogScreen(lambda: now_s)
    for second in range(35):
        now_s = float(second)
        screen.look(View(batches=min(second, 12), rows_total=min(second, 12) * 100, end_lsn=Lsn(1)))
    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    assert [line["rows_total"] for line in lines] == [1_000, 1_200]
    assert LOG_INTERVAL_S == 10
    assert isinstance(make(io.StringIO(), "auto"), LogScreen)
