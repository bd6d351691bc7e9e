"""What a process has cost so far, as /proc tells it."""

from __future__ import annotations

import os
from pathlib import Path

MB = 1e6


def memory_of(pid: int) -> dict[str, float]:
    """Return the node's memory in MB: resident now, the most it ever was, and what of it is not file cache."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM", "RssAnon"):
            found[name] = int(value.split()[0]) * 1024 / MB
    return found


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
