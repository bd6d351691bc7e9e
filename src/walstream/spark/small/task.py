"""What an executor does with a small batch of a table, from the log to files that belong to nobody yet.

Owns the three modes; refuses to know the table's log: what it finds is given in the task, what it made is told in the
answer, and the driver commits it or does not. An attempt that is repeated writes into a folder of its own.

    mirror     the last state of each row; the files with rows that it replaces or removes are written anew
    history    every state; the files with rows that are true no more are written anew
    append     every change
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from walstream.spark.belonging import Belonging
from walstream.spark.columns import POSITION, Mode
from walstream.spark.small.folding import Folded, Key, Row, composed, fold, in_order, keys_of
from walstream.spark.small.merging import DataFolder, Found, Hit, changed, joined, ordered
from walstream.spark.writers.files import STAGING
from walstream.spark.writers.pruning import FileFacts, near

LOOKED_ROWS_MAX: Final = 2_000_000
"""Rows of files that may hold a key of the batch: a task looks through so many keys in about a second."""
TOUCHED_BYTES_MAX: Final = 64 << 20
"""Bytes of files that are written anew by one task; of more, Spark makes many tasks."""

LITTER_FILES: Final = 32
LITTER_FILES_MAX: Final = 64
LITTER_BYTES: Final = 1 << 20
"""A mirror that is written every second has thousands of files before maintenance comes: many small ones become one."""

_MIRROR: Final = ("_source_epoch", *POSITION)
_HISTORY: Final = ("_source_epoch", "_valid_from_lsn", "_valid_from_seq")
_OPEN: Final = "_valid_to_lsn"


class SmallChanges(Protocol):
    """Where an executor has the changes from. Pickled with the task."""

    def __call__(self) -> Iterable[pa.RecordBatch]:
        """Yield them."""


@dataclass(frozen=True, slots=True)
class SmallTask:
    """Everything that an executor needs."""

    root: str
    """The table's folder."""
    mode: Mode
    key: tuple[str, ...]
    columns: tuple[str, ...]
    """The source's."""
    schema: pa.Schema
    """The table's."""
    changes: SmallChanges
    belonging: Belonging
    source_epoch: int
    applied: int | None
    """Changes that committed before are in the table."""
    files: tuple[FileFacts, ...]
    """Of the table, with what is known of their keys."""
    has_rows: bool
    """Whether the rows that the table has count: not if it is new or replaced."""


@dataclass(frozen=True, slots=True)
class SmallDone:
    """What came of it."""

    rows: int
    """Changes that were read."""
    foreign: int
    """Of another source epoch, among those that belong."""
    folded: int = 0
    """Rows that they came to."""
    folder: str = ""
    """Where the new files are, within the table's folder; empty: there are none."""
    removed: tuple[str, ...] = ()
    """Files that the new ones stand for."""
    is_emptied: bool = False
    """Whether nothing is left of what was there."""
    is_too_much: bool = False
    """Whether nothing was done, because it takes more than one task."""


def run(task: SmallTask) -> SmallDone:
    """Do a small batch."""
    read = list(task.changes())
    if not read:
        return SmallDone(0, 0, is_emptied=not task.has_rows)
    changes = pa.Table.from_batches(read)
    mask = task.belonging.mask(changes)
    rows = changes.num_rows
    changes = changes.filter(mask)
    foreign = pc.sum(pc.not_equal(changes.column("_source_epoch"), task.source_epoch)).as_py() or 0
    if foreign:
        return SmallDone(rows, foreign)
    if task.applied is not None:
        changes = changes.filter(pc.greater_equal(changes.column("_commit_lsn"), task.applied))
    doing = _Doing(task, rows, in_order(changes))
    try:
        return doing.done()
    except BaseException:
        doing.discard()
        raise


class _Doing:
    """A task under way."""

    def __init__(self, task: SmallTask, rows: int, changes: pa.Table) -> None:
        self._task = task
        self._rows = rows
        self._changes = changes
        self._data = DataFolder(task.root, task.schema)
        self._folder = f"{STAGING}/{uuid.uuid4().hex}"
        self._path = Path(task.root) / self._folder

    def done(self) -> SmallDone:
        if self._task.mode == "append":
            return self._append()
        return self._mirror() if self._task.mode == "mirror" else self._history()

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._path, ignore_errors=True)

    def _append(self) -> SmallDone:
        self._data.write(self._path, self._table({}, range(self._changes.num_rows)))
        return self._answer(self._rows, (), is_emptied=not self._task.has_rows)

    # --- mirror

    def _mirror(self) -> SmallDone:
        folded = fold(self._changes, self._keys())
        count = len(folded.rows)
        if not self._task.has_rows or folded.is_emptied:
            live = [row for row in folded.rows.values() if row.is_there]
            self._data.write(self._path, self._mirrored(live, Found()))
            return self._answer(count, (), is_emptied=True)
        found = self._find(folded, _MIRROR)
        if found is None:
            return self._too_much()
        epochs, lsns, seqs = (self._changes.column(name).to_pylist() for name in _MIRROR)
        matched: set[Key] = set()
        removed: dict[str, list[Hit]] = {}
        for path, hits in found.hits.items():
            matched |= {hit.key for hit in hits}
            for hit in hits:
                number = folded.rows[hit.key].number
                if (epochs[number], lsns[number], seqs[number]) > hit.position:
                    removed.setdefault(path, []).append(hit)
        if self._is_much(removed):
            return self._too_much()
        for path, hits in removed.items():
            self._data.rewrite(self._path, path, hits, lambda _, gone: self._become(folded, found, gone))
        new = [row for key, row in folded.rows.items() if row.is_there and key not in matched]
        litter = self._litter(removed)
        rows = [self._mirrored(new, found), *map(self._data.read, litter)]
        self._data.write(self._path, ordered(pa.concat_tables(rows), self._task.key) if litter else rows[0])
        return self._answer(count, (*removed, *litter))

    def _litter(self, touched: Mapping[str, object]) -> list[str]:
        """Return small files that the batch does not touch, when there are many: they are put together with it."""
        files = self._task.files
        small = [file.path for file in files if file.size <= LITTER_BYTES and file.path not in touched]
        return small[:LITTER_FILES_MAX] if len(small) >= LITTER_FILES else []

    def _become(self, folded: Folded, found: Found, hits: Sequence[Hit]) -> pa.Table:
        rows = [folded.rows[hit.key] for hit in hits]
        return self._mirrored([row for row in rows if row.is_there], found)

    def _mirrored(self, rows: Sequence[Row], found: Found) -> pa.Table:
        numbers = [row.number for row in rows]
        return self._table(self._composed(rows, found), numbers)

    # --- history

    def _history(self) -> SmallDone:
        folded = fold(self._changes, self._keys(), has_versions=True)
        found: Found | None = Found()
        if self._task.has_rows:
            # A truncate ends every row that is true now, wherever it is.
            found = None if folded.is_emptied else self._find(folded, _HISTORY)
        if found is None:
            return self._too_much()
        epochs, lsns, seqs = (self._changes.column(name).to_pylist() for name in _MIRROR)
        ended: dict[str, list[Hit]] = {}
        for path, hits in found.hits.items():
            for hit in hits:
                number = folded.firsts[hit.key]
                if (epochs[number], lsns[number], seqs[number]) > hit.position:
                    ended.setdefault(path, []).append(hit)
        if self._is_much(ended):
            return self._too_much()
        for path, hits in ended.items():
            self._data.rewrite(self._path, path, hits, lambda rows, gone: self._ended(folded, rows, gone))
        rows = [version.row for version in folded.versions]
        self._data.write(self._path, self._versions(folded, rows, found))
        return self._answer(len(rows), tuple(ended), is_emptied=not self._task.has_rows)

    def _ended(self, folded: Folded, rows: pa.Table, hits: Sequence[Hit]) -> pa.Table:
        return changed(rows, self._ends([folded.firsts[hit.key] for hit in hits]))

    def _versions(self, folded: Folded, rows: Sequence[Row], found: Found) -> pa.Table:
        numbers = [row.number for row in rows]
        taken = self._changes.take(pa.array(numbers, pa.int64()))
        begins = {
            "_valid_from_lsn": taken.column("_commit_lsn"),
            "_valid_from_seq": taken.column("_seq"),
            "_valid_from": taken.column("_ts"),
        }
        ends = self._ends([version.until for version in folded.versions])
        return self._table({**self._composed(rows, found), **begins, **ends}, numbers)

    def _ends(self, numbers: Sequence[int | None]) -> dict[str, Any]:
        at = pa.array(numbers, pa.int64())
        return {
            "_valid_to_lsn": self._changes.column("_commit_lsn").take(at),
            "_valid_to_seq": self._changes.column("_seq").take(at),
            "_valid_to": self._changes.column("_ts").take(at),
        }

    # --- both

    def _keys(self) -> list[Key]:
        return keys_of(self._changes, self._task.key)

    def _composed(self, rows: Sequence[Row], found: Found) -> dict[str, Any]:
        there = joined(found.there, self._task.schema)
        return composed(self._changes, rows, self._task.columns, there, found.at)

    def _find(self, folded: Folded, position: Sequence[str]) -> Found | None:
        """Return where the table has the rows of the batch; None: that is not for one task to look through."""
        task = self._task
        values = {name: {key[number] for key in folded.rows} for number, name in enumerate(task.key)}
        if any(None in among for among in values.values()):
            return None
        files = near(task.files, values)
        if task.mode == "history":
            files = [file for file in files if file.nulls.get(_OPEN) != 0]
        if sum(file.rows for file in files) > LOOKED_ROWS_MAX:
            return None
        names = sorted(folded.homes)
        return self._data.find(files, task.key, folded.rows, position, names, _OPEN if task.mode == "history" else "")

    def _is_much(self, touched: Iterable[str]) -> bool:
        sizes = {file.path: file.size for file in self._task.files}
        return sum(sizes[path] for path in touched) > TOUCHED_BYTES_MAX

    def _table(self, columns: Mapping[str, Any], numbers: Iterable[int]) -> pa.Table:
        """Return rows of the table: columns that are given, and the others as the changes have them."""
        schema = self._task.schema
        taken = self._changes.take(pa.array(numbers, pa.int64()))
        values = [columns[name] if name in columns else taken.column(name) for name in schema.names]
        return pa.table(values, names=schema.names).cast(schema)

    def _answer(self, folded: int, removed: tuple[str, ...], *, is_emptied: bool = False) -> SmallDone:
        folder = self._folder if self._path.exists() else ""
        return SmallDone(self._rows, 0, folded, folder, removed, is_emptied)

    def _too_much(self) -> SmallDone:
        return SmallDone(self._rows, 0, is_too_much=True)


def run_all(tasks: Iterable[SmallTask]) -> Iterator[SmallDone]:
    """Do the tasks of a partition."""
    return map(run, tasks)
