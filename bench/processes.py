"""What a process has cost so far, as the kernel tells it."""

from __future__ import annotations

import time
from pathlib import Path

MB = 1e6
_PROCESS_CLOCK = 2
"""CPUCLOCK_SCHED of linux/posix-timers.h: clock_getcpuclockid() makes the same number of a process id."""


def memory_of(pid: int) -> dict[str, float]:
    """Return the node's memory in MB: resident now, the most it ever was, and what of it is not file cache."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM", "RssAnon"):
            found[name] = int(value.split()[0]) * 1024 / MB
    return found


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads that a process has had, to the nanosecond.

    Its clock is asked, by the number that the kernel gives to a process's: /proc counts in steps of 10 ms, which is
    half a microsecond for each of 20,000 requests.
    """
    return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
