"""How every benchmark ends: a table for people, one line of JSON for machines, one more line in results.jsonl.

The line is `{"bench": name, "figures": {…}, "targets": {name: {"value": v, "target": t, "met": bool}}}`. The copy in
`results.jsonl` also carries the date, the commit and the machine (cores, memory, kernel, disk; never a host name or a
path), because a figure without them cannot be compared with anything. A benchmark reports, it does not judge: nothing
here changes the exit code when a target is missed.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.jsonl")
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Target:
    """A figure with the bound it should reach: at least or at most."""

    value: float
    target: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least `share` of all samples do not exceed."""
    ordered = sorted(samples)
    rank = max(0, min(len(ordered) - 1, -(-int(share * len(ordered) * 1_000_000) // 1_000_000) - 1))
    return ordered[rank]


def rounded(value: float) -> float:
    """Keep four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out rows in columns: the first to the left, the others to the right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    out = []
    for number, line in enumerate(lines):
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        out.append("  ".join(cells).rstrip())
        if number == 0:
            out.append("  ".join("─" * width for width in widths))
    return "\n".join(out)


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other benchmark of this repository runs: two at once measure each other."""
    descriptor = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another benchmark to end", file=sys.stderr, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def stolen_s() -> float:
    """Return the processor time that the machine's host has kept from it since it started, over all cores."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def disk_of(folder: Path) -> dict[str, Any]:
    """Say what kind of disk holds the folder: file system, device kind, spinning or not."""
    device = folder.stat().st_dev
    found: dict[str, Any] = {"filesystem": "unknown", "device": "unknown"}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == f"{os.major(device)}:{os.minor(device)}":
            separator = fields.index("-")
            found["filesystem"] = fields[separator + 1]
            source = Path(fields[separator + 2]).name
            found["device"] = source.rstrip("0123456789") if source else "none"
            break
    rotational = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/rotational")
    if rotational.exists():
        found["rotational"] = rotational.read_text().strip() == "1"
    return found


def machine(folder: Path) -> dict[str, Any]:
    """Describe the machine enough to compare figures, and no more than that."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    processor = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {
        "cores": os.cpu_count(),
        "processor": processor or platform.machine(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "disk": disk_of(folder),
    }


def commit() -> str:
    """Return the commit of the working tree, marked when the sources differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", "src", "bench", ":!bench/results.jsonl")
    return (head or "unknown") + ("+changes" if changed else "")


def finish(
    bench: str,
    figures: Mapping[str, Any],
    targets: Mapping[str, Target] | None = None,
    *,
    folder: Path,
    is_recorded: bool = True,
) -> None:
    """Print the targets and the line of JSON, and append the line with commit, date and machine to the results.

    A run of a part, or of a smaller size, is not recorded: it cannot be compared with the others.
    """
    targets = targets or {}
    if targets:
        rows = [
            (
                name,
                f"{target.value:,.4g}",
                f"{'≥' if target.at_least else '≤'} {target.target:,.4g}",
                "met" if target.met else "missed",
            )
            for name, target in targets.items()
        ]
        print("\n" + table(("target", "value", "bound", "verdict"), rows))
    line = {
        "bench": bench,
        "figures": {name: rounded(v) if isinstance(v, float) else v for name, v in figures.items()},
        "targets": {
            name: {"value": rounded(target.value), "target": target.target, "met": target.met}
            for name, target in targets.items()
        },
    }
    stamped = {
        **line,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(folder),
    }
    if is_recorded:
        with RESULTS.open("a", encoding="utf-8") as results:
            results.write(json.dumps(stamped, ensure_ascii=False) + "\n")
    print("\n" + json.dumps(line, ensure_ascii=False), flush=True)
