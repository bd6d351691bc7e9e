"""`walstream demo` leaves no process behind, however it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from waiting import wait_until

END_S_MAX = 60


def commands_with(text: str) -> dict[int, str]:
    """Return the command lines of the running processes that name a text."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # It has ended.
        if text in line:
            found[int(file.parent.name)] = line
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that PostgreSQL can reach when it runs as another user."""
    with tempfile.TemporaryDirectory(prefix="walstream-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        yield folder


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_nothing_outlives_the_demo(folder: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)}
    log = folder / "demo.log"
    with log.open("wb") as output:
        demo = subprocess.Popen(
            [sys.executable, "-m", "walstream.cli.main", "demo"],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        wait_until(
            lambda: (
                any("capture run" in line for line in commands_with(str(folder)).values()) or demo.poll() is not None
            ),
            "a capture",
            END_S_MAX,
        )
        assert demo.poll() is None, log.read_text()
        demo.send_signal(number)
        if number is signal.SIGHUP:
            demo.send_signal(number)
        demo.wait(END_S_MAX)
    finally:
        demo.kill()
        demo.wait()
    left = commands_with(str(folder))
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == {}
