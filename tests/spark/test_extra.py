"""Without the extra: one line that says what to install, and no other data source is broken by it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import walstream

HINT = "walstream.errors.UsageError: walstream.spark needs pyarrow. Install it: pip install 'walstream[spark]'"


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['pyarrow'] = None\n{program}"],
        env={"PYTHONPATH": str(Path(walstream.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_hint() -> None:
    done = run("import walstream.spark.source")
    assert done.stderr.strip().splitlines()[-1] == HINT


def test_the_module_that_spark_looks_into_can_always_be_imported() -> None:
    done = run(
        "from pyspark_walstream import DefaultSource\nprint(DefaultSource.name())\nDefaultSource(options={}).schema()"
    )
    assert done.stdout == "walstream\n"
    assert done.stderr.strip().splitlines()[-1] == HINT
