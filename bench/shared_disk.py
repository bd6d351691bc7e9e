"""What one disk costs several who sync at the same time: the limit of nodes that share one.

On machines of their own a leader and its followers sync at the same time and each takes what it takes alone. On one
machine they share the disk, the file system's locks and the cores. How much longer a sync takes then is measured
without any node: processes that do nothing but overwrite a file of their own, as a node's warm journal is, and sync
it, at the pace and in the phase of a cluster that is sent one record at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

from report import quantile

RECORD_BYTES = 400
FILE_BYTES = 4 * 1024 * 1024
START_S = 1.0
"""Time for the processes to start and to write their files once, before the first record is due."""


@dataclass(frozen=True, slots=True)
class SharedDisk:
    """Times in milliseconds at p50: of one alone, of each among all, and of the slowest of all."""

    alone_ms: float
    each_ms: float
    slowest_ms: float


def measure_shared_disk(folder: Path, processes: int, rate_per_s: int, slices: int) -> SharedDisk:
    """Time write + fdatasync of one process and of several in phase, in turns of a second."""
    alone: list[float] = []
    each: list[float] = []
    slowest: list[float] = []
    for _ in range(slices):
        alone += _in_phase(folder, 1, rate_per_s)[0]
        together = _in_phase(folder, processes, rate_per_s)
        each += [sample for samples in together for sample in samples]
        slowest += [max(samples) for samples in zip(*together, strict=True)]
    return SharedDisk(quantile(alone, 0.5), quantile(each, 0.5), quantile(slowest, 0.5))


def _in_phase(folder: Path, processes: int, rate_per_s: int) -> list[list[float]]:
    start = time.monotonic() + START_S
    paths = [folder / f"shared-{number}.log" for number in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pending = [pool.apply_async(_sync_at_pace, (path, start, rate_per_s)) for path in paths]
        samples = [one.get(60) for one in pending]
    for path in paths:
        path.unlink()
    return samples


def _sync_at_pace(path: Path, start: float, rate_per_s: int) -> list[float]:
    """Overwrite the file for a second, one record at a time, and return how many milliseconds each took."""
    record, samples = os.urandom(RECORD_BYTES), []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(descriptor, bytes(FILE_BYTES), 0)
    os.fsync(descriptor)
    for number in range(rate_per_s):
        time.sleep(max(0.0, start + number / rate_per_s - time.monotonic()))
        begun = time.perf_counter()
        os.pwrite(descriptor, record, number * RECORD_BYTES)
        os.fdatasync(descriptor)
        samples.append((time.perf_counter() - begun) * 1000)
    os.close(descriptor)
    return samples
