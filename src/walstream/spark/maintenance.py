"""Maintenance: small files into large ones, files that nobody may read any more away, old cuts and logs too.

Owns the order of these acts and their schedule; refuses to know how files are put together (writers/). The order is the
law: expired cuts go first, then files that only they needed. It works on one table at a time and holds the lock that
batches hold too, so a batch waits for one table's act at most and no file under way is taken for litter.

Which files stay: those of every version that a cut lists. Such a file is in the table still, or was removed after the
oldest listed cut was written, because at that moment the version was the newest one. So it is enough to keep what was
removed in the last `cuts_kept_hours`; the listed versions are named besides: clocks may disagree, and a pipeline beside
which this runs in another process lists the version that it knows, also after that one was compacted.

Delta itself trims the log of a table by the age of its files, which says nothing about what is listed: the version of a
table that nothing happened to is as old as its last change, and is listed by every cut. So that is switched off, and
the log is trimmed here, up to the oldest version that is listed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from walstream import logs
from walstream.spark.cuts import Cuts
from walstream.spark.failures import meaning
from walstream.spark.progress import Progress
from walstream.spark.warehouse import CUTS, table_path
from walstream.spark.writers import Writer
from walstream.spark.writers.delta_log import DeltaLog
from walstream.spark.writers.files import TableFiles

NAMED_MAX: Final = 50
"""Versions that are named to a vacuum, which reads each of them: the oldest ones, if there are more."""

MARGIN_HOURS: Final = 24
"""So much longer than cuts does the log of a table remember which files were removed from it, and when."""

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """What was done."""

    cuts_removed: int = 0
    tables: int = 0
    files_compacted: int = 0
    files_removed: int = 0
    seconds: float = 0.0
    failures: int = 0


class Maintenance:
    """Of one warehouse."""

    def __init__(
        self,
        cuts: Cuts,
        writer: Writer,
        *,
        kept_hours: float,
        interval_s: float = 0,
        lock: threading.Lock | None = None,
        key_of: Callable[[str], tuple[str, ...]] = lambda _: (),
        moved: Callable[[str, int], None] = lambda _table, _version: None,
        progress: Progress | None = None,
    ) -> None:
        """Take the lock that batches hold, and who wants to know that a table has a new version; 0: no schedule."""
        self._cuts = cuts
        self._writer = writer
        self._kept_hours = kept_hours
        self._interval_s = interval_s
        self._lock = lock or threading.Lock()
        self._key_of = key_of
        self._moved = moved
        self._progress = progress or Progress()
        self._next_s = time.monotonic() + interval_s

    @property
    def is_due(self) -> bool:
        """Whether the schedule asks for it now."""
        return self._interval_s > 0 and time.monotonic() >= self._next_s

    def run(self, stop: Callable[[], bool] = lambda: False, now: Callable[[], float] = time.time) -> Report:
        """Do everything once; what fails is left for the next time. `stop` is asked between tables."""
        began_s = time.monotonic()
        self._next_s = began_s + self._interval_s
        done, expired, compacted, removed, failures = 0, 0, 0, 0, 0
        listed: dict[str, list[int]] = {}
        try:
            with self._lock:
                expired = self._cuts.expire(round((now() - self._kept_hours * 3600) * 1_000_000))
                self._cuts.tidy()
                listed = self._cuts.versions()
        except Exception as error:
            # Who does not know what cuts list may touch no table; the pipeline can do without all this for a while.
            failures += 1
            log.warning("maintenance failed", table=CUTS, error=str(meaning(error)))
        try:
            for name, versions in listed.items():
                if stop():
                    break
                try:
                    more_compacted, more_removed = self._table(name, versions)
                except Exception as error:
                    failures += 1
                    log.warning("maintenance failed", table=name, error=str(meaning(error)))
                    continue
                done += 1
                compacted += more_compacted
                removed += more_removed
        finally:
            self._progress.maintaining("")
        report = Report(expired, done, compacted, removed, round(time.monotonic() - began_s, 3), failures)
        log.info(
            "maintenance done",
            cuts_removed=report.cuts_removed,
            tables=report.tables,
            files_compacted=report.files_compacted,
            files_removed=report.files_removed,
            seconds=report.seconds,
        )
        return report

    def _table(self, name: str, versions: list[int]) -> tuple[int, int]:
        path = table_path(self._cuts.warehouse, name)
        self._progress.maintaining(f"compacting {name}")
        with self._lock:
            compacted = self._writer.compact(path, self._key_of(name))
            self._note(name, path)
        self._progress.maintaining(f"vacuuming {name}")
        with self._lock:
            kept = sorted({*versions[:NAMED_MAX], versions[-1]})
            removed = self._writer.vacuum(path, kept, self._kept_hours)
            log_of = DeltaLog(TableFiles(path))
            log_of.remember(round(self._kept_hours) + MARGIN_HOURS)
            log_of.trim(versions[0])
            self._note(name, path)
        return compacted, removed

    def _note(self, name: str, path: str) -> None:
        version = self._writer.version(path)
        if version is not None:
            self._moved(name, version)
