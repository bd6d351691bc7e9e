"""The demonstration keeps its word: its last line and its exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
def test_the_demo_proves_what_it_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "walstream.cli.main", "demo", "--seconds", "15"],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("OK: ")
    assert "in 3 tables compared, 0 differences, 0 transactions torn at" in last
