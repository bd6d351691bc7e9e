"""The demonstration keeps its word: its last line and its exit code."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.jvm
@pytest.mark.timeout(1200)
def test_the_demo_proves_what_it_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "walstream.cli.main", "demo", "--seconds", "15"],
        capture_output=True,
        text=True,
        timeout=1180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *story, last = done.stdout.strip().splitlines()
    for told in ("The snapshot is in the tables", "SIGKILL for capture and node", "A column was added", "rolled back"):
        assert any(told in line for line in story), f"{told}: {done.stdout}"
    assert re.fullmatch(
        r"OK: [\d,]+ rows in 3 tables compared, 0 differences, 0 transactions torn at [\d,]+ cuts, "
        r"commit-to-table freshness p50 [\d.]+ s, p99 [\d.]+ s\.",
        last,
    ), last
