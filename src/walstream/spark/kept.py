"""DataFrames that are kept while they are needed more than once, and given back together."""

from __future__ import annotations

from pyspark import StorageLevel
from pyspark.sql import DataFrame


class Kept:
    """Keeps DataFrames in memory, and on disk where that does not suffice, until `release`."""

    def __init__(self) -> None:
        self._frames: list[DataFrame] = []

    def __call__(self, frame: DataFrame, level: StorageLevel = StorageLevel.MEMORY_AND_DISK_DESER) -> DataFrame:
        """Keep a DataFrame from its first use on."""
        self._frames.append(frame.persist(level))
        return frame

    def take(self, other: Kept) -> None:
        """Keep what another one keeps, in its place."""
        self._frames += other._frames
        other._frames = []

    def release(self) -> None:
        """Give everything back."""
        while self._frames:
            self._frames.pop().unpersist()
