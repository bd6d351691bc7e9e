"""`walstream pipeline` as a supervisor and an operator meet it: processes, signals, exit codes, what is said where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pyspark
import pytest

import walstream
from integration.capturing import settings as capture_settings
from integration.capturing import wait_until, working
from spark.conftest import Captured, MakeCaptured
from spark.pipeline_process import PipelineProcess
from walstream.capture.kafka import LogAddress
from walstream.capture.ladder import read_ladder
from walstream.processes import free_port
from walstream.spark.cuts import Cuts
from walstream.spark.rung import read_rung

pytestmark = pytest.mark.timeout(900)

TABLES = """
create table orders (id int primary key, item text);
create table notes (body text);
insert into orders select n, 'tea' from generate_series(1, 50) n;
insert into notes values ('keyless');
"""


def made(captured: Captured, folder: Path, **more: Any) -> PipelineProcess:
    settings = capture_settings(captured.database, captured.node, pipeline__warehouse=str(folder / "warehouse"), **more)
    return PipelineProcess(folder, settings)


def write(captured: Captured, number: int) -> None:
    captured.execute("insert into orders select %s * 10 + n, 'busy' from generate_series(1, 5) n", [number])
    time.sleep(0.05)


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def test_it_runs_until_its_terminal_closes_and_says_how_far_it_is(make_captured: MakeCaptured, tmp_path: Path) -> None:
    captured = make_captured(TABLES)
    captured.wait_for_snapshots("public.orders", "public.notes")
    port = free_port()
    process = made(captured, tmp_path, pipeline__http_listen=f"127.0.0.1:{port}", pipeline__trigger_interval_ms=200)
    cuts = Cuts(str(tmp_path / "warehouse"))
    with process.shown():
        process.start()
        wait_until(lambda: process.check() or cuts.last(), "the first cut", timeout_s=240)
        captured.execute("insert into orders values (100, 'coffee')")
        first = cuts.last()
        assert first is not None
        wait_until(lambda: (last := cuts.last()) and last.end_lsn > first.end_lsn, "another cut", timeout_s=180)
        # What it says of itself: over HTTP, in the log's status topic, to who asks on the command line.
        health = json.loads(get(port, "/health"))
        assert health["status"] == "degraded"
        assert list(health["stopped"]) == ["public.notes"]
        assert 'walstream_pipeline_table_stopped{table="public.notes"} 1.0' in get(port, "/metrics")
        address = LogAddress(captured.node.address)
        rung = wait_until(lambda: read_rung(address, captured.prefix), "the rung")
        assert (rung.stage, rung.tables, rung.tables_stopped) == ("pipeline", 2, 1)
        assert read_ladder(address, captured.prefix) is not None, "capture's own rung is still there"
        status = process.ask("status", "-o", "json")
        assert status.returncode == 4, status.stderr
        found = json.loads(status.stdout)
        assert found["state"] == "running"
        assert {table["table"]: table["state"] for table in found["tables"]} == {
            "public.notes": "stopped",
            "public.orders": "current",
        }
        # While the source is busy: a batch is under way, and another one would begin right after it.
        with working(lambda number: write(captured, 1_000 + number)):
            wait_until(lambda: (last := cuts.last()) and last.rows > 1, "a busy source", timeout_s=180)
            process.hang_up()
            assert process.wait() == 4, "a table has stopped, and needs somebody"
    said = process.log_text()
    assert "Traceback" not in said, process.log_tail()
    assert "spark says" not in said, process.log_tail()
    assert "could not follow" in said
    assert "stopping" in said
    shown = process.ask("status")
    assert "public.orders" in shown.stdout
    assert 'mode = "append"' in shown.stdout


def test_once_ends_by_itself_and_maintenance_can_be_asked_for(make_captured: MakeCaptured, tmp_path: Path) -> None:
    captured = make_captured("create table orders (id int primary key); insert into orders values (1)")
    captured.wait_for_snapshots("public.orders")
    captured.wait()
    process = made(captured, tmp_path)
    with process.shown():
        assert process.once() == 0, process.log_tail()
        last = Cuts(str(tmp_path / "warehouse")).last()
        assert last is not None
        assert last.versions == {"public.orders": 0}
        done = process.ask("maintain", "-o", "json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tables"] == 1
    assert "Traceback" not in process.log_text()


def test_the_program_that_spark_submit_runs(make_captured: MakeCaptured, tmp_path: Path) -> None:
    captured = make_captured("create table orders (id int primary key); insert into orders values (1), (2)")
    captured.wait_for_snapshots("public.orders")
    captured.wait()
    process = made(captured, tmp_path)
    program = tmp_path / "pipeline.py"
    arguments = ["pipeline", "run", "--config", str(process.file), "--once"]
    program.write_text(f"from walstream.cli.main import run\n\nrun({arguments})\n")
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    done = subprocess.run(
        [str(submit), "--master", "local[1]", "--conf", "spark.ui.enabled=false", str(program)],
        env={**os.environ, "PYTHONPATH": str(Path(walstream.__file__).parent.parent), "PYSPARK_PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    last = Cuts(str(tmp_path / "warehouse")).last()
    assert last is not None
    assert last.versions == {"public.orders": 0}


@pytest.mark.jvm
def test_a_log_that_nobody_writes_to_is_said_so(tmp_path: Path) -> None:
    process = PipelineProcess(
        tmp_path,
        {"capture.bootstrap": "127.0.0.1:1", "pipeline.warehouse": str(tmp_path / "warehouse")},
    )
    with process.shown():
        assert process.once() == 3, process.log_tail()
    assert "cannot be reached" in process.log_text()
    assert "Traceback" not in process.log_text()
