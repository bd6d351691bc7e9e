"""The files of a table: where they are written, how they become part of it, and what their footers say of them.

Owns paths and footers; refuses to know the table's log. Executors write into a folder of the batch's own; what is in it
belongs to nobody until a commit names it. On a local disk files are then moved beside the others and made durable
before the commit that names them, so that a table never needs what a power cut can take; in an object store, where
moving is copying, they stay where they are and are as durable as it says.

Statistics are written where they are exact and every reader takes them to mean the same: whole numbers, dates, times
and text, and how many nulls. Without them a reader looks into the file, with wrong ones it would not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyspark.sql import types as t

STAGING: Final = "_walstream_staging"
"""Hidden to readers of the table, and to whoever cleans up after it."""

TEXT_LENGTH_MAX: Final = 32
"""Characters of a text that statistics have, as Delta's own writer does it."""
COLUMNS_MAX: Final = 64
"""Columns that statistics are written of: the log is read whole, so it must not grow with the width of a table."""

_OF_VERSION: Final = re.compile(r"\.?(\d{20})\.")
_HIGHEST: Final = "\U0010ffff"
_EPOCH: Final = datetime(1970, 1, 1)
_INTEGERS: Final = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that was written, as the table's log has to name it."""

    path: str
    """Relative to the table."""
    size: int
    modified_ms: int
    rows: int
    stats: str


class TableFiles:
    """The folder of one table."""

    def __init__(self, path: str) -> None:
        """Take a path on this machine, or the address of a folder that pyarrow knows how to reach."""
        scheme, _, rest = path.partition("://")
        self.is_local = not rest or scheme == "file"
        if self.is_local:
            self._fs: Any = pafs.LocalFileSystem()
            self.root = os.path.abspath(rest if scheme == "file" else path)  # noqa: PTH100 - a path as others write it
            self.uri = f"file://{self.root}"
        else:
            self._fs, self.root = pafs.FileSystem.from_uri(path)
            self.uri = path.rstrip("/")

    @property
    def delta(self) -> str:
        """The folder as deltalake names it."""
        return self.root if self.is_local else self.uri

    def new_folder(self) -> str:
        """Return the name of a folder, within the table's, for the files of one commit."""
        name = uuid.uuid4().hex
        return f"{STAGING}/{name}" if self.is_local else f"data-{name}"

    def spark_path(self, relative: str) -> str:
        """Return the path that Spark writes to or reads from."""
        return f"{self.uri}/{relative}"

    def take(self, folder: str, schema: t.StructType, names: Container[str] | None = None) -> list[DataFile]:
        """Return the files with rows that Spark has written to a folder; afterwards they lie where they stay.

        With `names`, no others: what a task that ran twice has left is removed.
        """
        selector = pafs.FileSelector(f"{self.root}/{folder}", recursive=False, allow_not_found=names == set())
        written = [
            info
            for info in self._fs.get_file_info(selector)
            if info.base_name.endswith(".parquet") and (names is None or info.base_name in names)
        ]
        taken = [file for info in written if (file := self._take(folder, info, schema)) is not None]
        if self.is_local:
            self.drop(folder)
            self._sync_folder(self.root)
        return taken

    def drop(self, folder: str) -> None:
        """Remove a folder, on a local disk, with what is left in it."""
        shutil.rmtree(f"{self.root}/{folder}", ignore_errors=True)

    def _take(self, folder: str, info: Any, schema: t.StructType) -> DataFile | None:
        with self._fs.open_input_file(info.path) as file:
            footer = pq.read_metadata(file)
        if footer.num_rows == 0:
            return None
        relative = f"{folder}/{info.base_name}"
        if self.is_local:
            relative = info.base_name
            _sync(info.path)
            Path(info.path).rename(f"{self.root}/{relative}")
        return DataFile(relative, info.size, info.mtime_ns // 1_000_000, footer.num_rows, statistics(footer, schema))

    def discard(self, files: Iterable[DataFile]) -> None:
        """Delete files that no commit names."""
        for file in files:
            self._fs.delete_file(f"{self.root}/{file.path}")

    def read_commit(self, version: int) -> str | None:
        """Return what the table's log says of a version; None: nothing, it is not there."""
        try:
            with self._fs.open_input_stream(f"{self.root}/_delta_log/{version:020}.json") as file:
                return str(file.read().decode())
        except FileNotFoundError:
            return None

    def sync_commit(self, version: int) -> None:
        """Make a commit durable, on a local disk."""
        self.sync_log(f"{version:020}.json")

    def sync_log(self, name: str) -> None:
        """Make a file of the table's log durable, on a local disk."""
        if self.is_local:
            log = f"{self.root}/_delta_log"
            _sync(f"{log}/{name}")
            self._sync_folder(log)

    def log_files(self) -> list[tuple[int, str]]:
        """Return the files of the table's log that are of one version, with that version."""
        infos = self._fs.get_file_info(pafs.FileSelector(f"{self.root}/_delta_log", recursive=False))
        named = ((_OF_VERSION.match(info.base_name), info) for info in infos if info.type == pafs.FileType.File)
        return [(int(found[1]), info.base_name) for found, info in named if found is not None]

    def remove_log_files(self, names: Iterable[str]) -> None:
        """Remove files of the table's log, in this order."""
        for name in names:
            self._fs.delete_file(f"{self.root}/_delta_log/{name}")

    def clean(self) -> None:
        """Remove the folders of batches that were never committed."""
        if self.is_local:
            shutil.rmtree(f"{self.root}/{STAGING}", ignore_errors=True)

    def _sync_folder(self, path: str) -> None:
        _sync(path)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def statistics(footer: Any, schema: t.StructType) -> str:
    """Return what the log says of a file's rows, from its footer."""
    fields = {field.name: field.dataType for field in schema.fields[:COLUMNS_MAX]}
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for number in range(footer.num_columns):
        name = footer.schema.column(number).path
        # The parts of an array have longer paths.
        if name not in fields:
            continue
        chunks = [footer.row_group(group).column(number).statistics for group in range(footer.num_row_groups)]
        if any(chunk is None or not chunk.has_null_count for chunk in chunks):
            continue
        nulls[name] = sum(chunk.null_count for chunk in chunks)
        told = [chunk for chunk in chunks if chunk.num_values > 0]
        if not told or any(not chunk.has_min_max for chunk in told):
            continue
        low, high = _bounds(told, fields[name])
        if low is not None and high is not None:
            lows[name], highs[name] = low, high
    written = {"numRecords": footer.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}
    return json.dumps(written, ensure_ascii=False, separators=(",", ":"))


def _bounds(chunks: Sequence[Any], kind: t.DataType) -> tuple[Any, Any]:
    """Return the least and the greatest value of a column as the log writes them; None where it does not."""
    if isinstance(kind, t.StringType):
        # Texts are compared by their bytes, as readers do; Python compares characters, which is the same order.
        return min(chunk.min for chunk in chunks)[:TEXT_LENGTH_MAX], _shortened(max(chunk.max for chunk in chunks))
    low, high = min(chunk.min_raw for chunk in chunks), max(chunk.max_raw for chunk in chunks)
    if isinstance(kind, _INTEGERS):
        return low, high
    if isinstance(kind, t.DateType):
        return _moment(timedelta(days=low), "%Y-%m-%d"), _moment(timedelta(days=high), "%Y-%m-%d")
    if isinstance(kind, t.TimestampType | t.TimestampNTZType):
        form = "%Y-%m-%dT%H:%M:%S.%fZ" if isinstance(kind, t.TimestampType) else "%Y-%m-%dT%H:%M:%S.%f"
        return _moment(timedelta(microseconds=low), form), _moment(timedelta(microseconds=high), form)
    return None, None


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_LENGTH_MAX else text[:TEXT_LENGTH_MAX] + _HIGHEST


def _moment(since: timedelta, form: str) -> str | None:
    try:
        moment = _EPOCH + since
    except OverflowError:
        return None
    # Python writes years before 1000 with fewer digits.
    return moment.strftime(form) if moment.year >= 1000 else None


def checkpoint_name(version: int) -> str:
    """Return the name of a checkpoint, of the kind that is one file, in a table's log."""
    return f"{version:020}.checkpoint.parquet"


def now_ms() -> int:
    """Return the time as the log has it."""
    return int(datetime.now(UTC).timestamp() * 1000)
