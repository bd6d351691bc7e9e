"""The demonstration keeps its word: its last line and its exit code."""

from __future__ import annotations

import subprocess
import sys


def test_the_demo_proves_what_it_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "walstream.cli.main", "demo"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("OK: 100,000 records acknowledged")
    assert "none missing, none twice, all in order" in last
