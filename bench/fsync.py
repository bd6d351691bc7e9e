"""What durability costs: one flush that touches n files, made durable in five ways.

The node's group commit collects what many clients sent and makes it durable at once. How it should lay those bytes
out depends on one curve: the time of a flush against the number of partitions it touches. Each round here appends
the same payload to n files and then waits until all of it is on the disk:

    serial           fdatasync of each file, one after the other
    threads          fdatasync of each file from eight threads
    syncfs           one syncfs of the whole file system
    journal          all payloads in one write to the end of one shared file, one fdatasync
    journal_reused   the same, over blocks that were written before, so that no file grows and no metadata changes

Files are new for each cell and appended to, as segments are. Times are of write and sync together, in milliseconds.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from report import alone, finish, quantile, table

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SIZES = (4 * 1024, 64 * 1024)
METHODS = ("serial", "threads", "syncfs", "journal", "journal_reused")
THREADS = 8
ROUNDS_MIN = 8
REUSED_BYTES = 64 * 1024 * 1024

libc = ctypes.CDLL(None, use_errno=True)


def syncfs(descriptor: int) -> None:
    if libc.syncfs(descriptor) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def write_all(descriptor: int, payload: bytes) -> None:
    """Write until everything is written: a signal or a nearly full disk may cut a write short."""
    view = memoryview(payload)
    while view:
        view = view[os.write(descriptor, view) :]


def flusher(method: str, folder: Path, count: int, size_bytes: int, pool: ThreadPoolExecutor) -> Callable[[], None]:
    """Return a function that does one flush of `count` payloads by `method`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    payload = os.urandom(size_bytes)
    if method in ("serial", "threads", "syncfs"):
        files = [os.open(folder / f"{number:04}.log", flags, 0o600) for number in range(count)]

        def write_files() -> None:
            for descriptor in files:
                write_all(descriptor, payload)

        def serial() -> None:
            write_files()
            for descriptor in files:
                os.fdatasync(descriptor)

        def threads() -> None:
            write_files()
            if list(pool.map(os.fdatasync, files)) != [None] * count:
                raise AssertionError("a sync went missing")

        def whole() -> None:
            write_files()
            syncfs(files[0])

        return {"serial": serial, "threads": threads, "syncfs": whole}[method]

    everything = payload * count
    if method == "journal":
        journal = os.open(folder / "journal", flags, 0o600)

        def append() -> None:
            write_all(journal, everything)
            os.fdatasync(journal)

        return append

    reused = os.open(folder / "journal", os.O_WRONLY | os.O_CREAT, 0o600)
    filler = bytes(1024 * 1024)
    for _ in range(REUSED_BYTES // len(filler)):
        write_all(reused, filler)
    os.fsync(reused)
    position = 0

    def overwrite() -> None:
        nonlocal position
        if position + len(everything) > REUSED_BYTES:
            position = 0
        os.lseek(reused, position, os.SEEK_SET)
        write_all(reused, everything)
        os.fdatasync(reused)
        position += len(everything)

    return overwrite


def close_everything_below(folder: Path) -> None:
    """Close the descriptors of files in the folder and delete the files."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = link.readlink()
        except OSError:
            continue
        if target.parent == folder:
            os.close(int(link.name))
    for file in folder.iterdir():
        file.unlink()


def measure(method: str, folder: Path, count: int, size_bytes: int, seconds: float) -> list[float]:
    """Return the milliseconds of each flush of one cell."""
    samples = []
    with ThreadPoolExecutor(THREADS) as pool:
        flush = flusher(method, folder, count, size_bytes, pool)
        flush()
        deadline = time.perf_counter() + seconds
        while len(samples) < ROUNDS_MIN or time.perf_counter() < deadline:
            started = time.perf_counter()
            flush()
            samples.append((time.perf_counter() - started) * 1000)
    close_everything_below(folder)
    os.sync()  # The next cell must not pay for the deletion of this one.
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of one durable flush over 1 to 512 files.")
    parser.add_argument("--data-dir", type=Path, default=Path(), help="a folder on the disk to measure (default: here)")
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each cell (default: 1.5)")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="files per flush")
    arguments = parser.parse_args()

    figures: dict[str, float] = {}
    with alone(), tempfile.TemporaryDirectory(prefix="walstream-bench-", dir=arguments.data_dir) as name:
        folder = Path(name).resolve()
        for size_bytes in SIZES:
            rows = []
            for count in arguments.counts:
                row = [f"{count}"]
                for method in METHODS:
                    samples = measure(method, folder, count, size_bytes, arguments.seconds)
                    p50, p99 = quantile(samples, 0.5), quantile(samples, 0.99)
                    key = f"{method}_{size_bytes // 1024}kib_{count}"
                    figures[f"{key}_p50_ms"], figures[f"{key}_p99_ms"] = p50, p99
                    row.append(f"{p50:.2f} / {p99:.2f}")
                rows.append(row)
            print(f"\none flush, {size_bytes // 1024} KiB in each file: p50 / p99 in ms")
            print(table(("files", *METHODS), rows), flush=True)
        finish("fsync", figures, folder=folder)


if __name__ == "__main__":
    main()
