"""Without the extra: one line that says what to install, from the library and from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import walstream

HINT = "Install it: pip install 'walstream[feed]'"


def run(missing: str, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{missing!r}] = None\n{program}"],
        env={"PYTHONPATH": str(Path(walstream.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "package"), [("jwt", "PyJWT"), ("grpc", "grpcio"), ("cryptography", "cryptography")]
)
def test_the_hint(module: str, package: str) -> None:
    done = run(module, "import walstream.feed.auth.auth")
    assert (
        done.stderr.strip().splitlines()[-1] == f"walstream.errors.UsageError: walstream.feed needs {package}. {HINT}"
    )


def test_the_command_line_works_without_and_says_what_is_missing() -> None:
    done = run("jwt", "from walstream.cli import main\nprint(main.invoke(['token', 'show', 'a.b.c']))")
    assert done.stdout == "2\n"
    assert done.stderr == f"error: walstream.feed needs PyJWT.\nhint:  {HINT}\n"
    assert run("jwt", "from walstream.cli import main\nprint(main.invoke(['--version']))").stdout.endswith("0\n")
