"""The embedded writer's memory does not grow with a batch: one that is larger than the driver passes through it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable

import walstream

ROWS = 450_000
DRIVER_BYTES_MAX = 1_400 << 20
"""What Python and the JVM, whose heap is 512 MiB, may hold together."""


@pytest.mark.jvm
@pytest.mark.timeout(900)
def test_a_batch_larger_than_the_driver(tmp_path: Path) -> None:
    root = str(Path(walstream.__file__).parent.parent)
    script = str(Path(__file__).with_name("large_batch.py"))
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), str(ROWS)],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYSPARK_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    driver = found["python_bytes_max"] + found["jvm_bytes_max"]
    print(f"folded {found['folded_bytes'] >> 20} MiB, driver at most {driver >> 20} MiB: {found}")
    assert found["rows"] == ROWS
    assert found["folded_bytes"] > driver, "the batch does not fit into the driver"
    assert driver < DRIVER_BYTES_MAX
    assert found["python_bytes_max"] < 400 << 20, "no row passes through Python"
    assert DeltaTable(str(tmp_path / "docs")).count() == ROWS + 500
