"""A real file system that is small enough to be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1024 * 1024


@contextmanager
def small_disk(folder: Path, size_mib: int = 24) -> Iterator[Path]:
    """Mount a tmpfs of so many MiB; skip the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a tmpfs")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill_up(folder: Path) -> Path:
    """Take all space that is left on a disk, as another process would; return the file that has it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for block in (MIB, 4096):
            try:
                while file.write(bytes(block)) == block:
                    pass
            except OSError:
                continue
    return ballast


def free_bytes(folder: Path) -> int:
    """Return how much may still be written."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
