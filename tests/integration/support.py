"""What several tests need: waiting for things to become true, the length of rounds, seeds, a node's memory."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from waiting import wait_until
from walstream.node.process import NodeProcess

T = TypeVar("T")

MakeNode = Callable[..., NodeProcess]
"""The fixture `make_node`: settings as `section__key=value` in, a running node out."""


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = 20.0, interval_s: float = 0.02) -> T:
    """Wait as `wait_until` does, for what takes seconds."""
    return wait_until(condition, what, timeout_s, interval_s)


def topic_folders(data: Path, topic: str) -> list[Path]:
    """Return the folders of a topic in a data folder: one for each topic of the name, none if nothing was written."""
    return sorted((data / "topics").glob(f"{topic}@*"))


def segments_of(data: Path, topic: str, partition: int = 0, suffix: str = ".log") -> list[Path]:
    """Return the files of a partition's segments, oldest first."""
    return sorted(
        file for folder in topic_folders(data, topic) for file in (folder / str(partition)).glob(f"*{suffix}")
    )


def rounds(full: int, part: int) -> int:
    """How many rounds to run: WALSTREAM_TEST_ROUNDS is `full` or a number, and without it a fixed part is run."""
    wanted = os.environ.get("WALSTREAM_TEST_ROUNDS", "")
    return full if wanted == "full" else int(wanted) if wanted else part


def seeded(default: int | None = None) -> tuple[int, random.Random]:
    """Return a seed and its generator: WALSTREAM_TEST_SEED, the default, or a new one. pytest shows it on failure."""
    wanted = os.environ.get("WALSTREAM_TEST_SEED")
    seed = int(wanted) if wanted else random.SystemRandom().randrange(2**32) if default is None else default
    print(f"seed: WALSTREAM_TEST_SEED={seed}")
    return seed, random.Random(seed)


def memory_mb(pid: int, kind: str = "VmHWM") -> float:
    """The memory of a process: the most it ever had resident, or `VmRSS`, what it has now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"the kernel tells no {kind}")
