"""Jars for tests, from Maven Central, kept in a cache outside of the repository.

`Jars` are an artifact and what it needs to run: `files()` when they can be had, `required()` to skip a test with the
reason when they cannot. They are asked for once: `mvn` runs when the cache is empty, and a failure is remembered for
the run.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TIMEOUT_S = 240

_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
_POM = """<project><modelVersion>4.0.0</modelVersion>
<groupId>walstream</groupId><artifactId>jars</artifactId><version>1</version>
<dependencies>{}</dependencies></project>
"""


@dataclass(frozen=True)
class Jars:
    """An artifact with everything that it needs to run."""

    artifact: str
    """As `group:name:version`."""
    beside: tuple[str, ...] = ()
    """Artifacts that it does not ask for and that it is of little use without."""
    groups: str = ""
    """The only groups that are taken, with commas between; empty: all."""

    @property
    def folder(self) -> str:
        return "-".join(self.artifact.split(":")[1:])

    def files(self) -> list[str]:
        """The files; nothing when they cannot be had."""
        return _found(self)[0]

    def required(self) -> list[str]:
        """The files; the test is skipped when they cannot be had."""
        files, reason = _found(self)
        if not files:
            pytest.skip(reason)
        return files


@cache
def _found(jars: Jars) -> tuple[list[str], str]:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "walstream-tests"
    folder = root / jars.folder
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        # Several test processes may begin at once.
        fcntl.flock(lock, fcntl.LOCK_EX)
        reason = "" if folder.exists() else _fetch(jars, folder)
    return sorted(map(str, folder.glob("*.jar"))), reason


def _fetch(jars: Jars, folder: Path) -> str:
    """Copy the jars to a folder; return why that cannot be, or nothing."""
    if shutil.which("mvn") is None:
        return f"{jars.artifact} comes from Maven Central, and there is no mvn here"
    # Not with_suffix, which would take the end of the version for one.
    work = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    dependencies = (_DEPENDENCY.format(*one.split(":")) for one in (jars.artifact, *jars.beside))
    (work / "pom.xml").write_text(_POM.format("".join(dependencies)))
    command = ["mvn", "-q", "-B", "-f", str(work / "pom.xml"), "dependency:copy-dependencies"]
    options = [f"-DincludeGroupIds={jars.groups}", "-DincludeScope=runtime", f"-DoutputDirectory={work}"]
    try:
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"Maven Central did not give {jars.artifact} in {TIMEOUT_S} seconds"
    if done.returncode or not list(work.glob("*.jar")):
        said = re.sub(r"\x1b\[\d*m", "", done.stdout + done.stderr).strip().splitlines()  # without its colours
        return f"Maven Central does not give {jars.artifact}: {said[0] if said else done.returncode}"
    work.rename(folder)
    return ""
