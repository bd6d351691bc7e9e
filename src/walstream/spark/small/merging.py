"""Rows of a table's files: found by their keys, and written anew without them or with others in their place.

Owns reading and writing of data files by one task; refuses to know what changes mean (folding.py) and what is committed
(the driver). A file is read a row group at a time, so memory depends on what walstream's writers make of a row group,
not on the file; of files that may hold a key only the columns of the key are read.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from walstream.spark.small.folding import Key, comparable, keys_of
from walstream.spark.writers.pruning import FileFacts


class Hit(NamedTuple):
    """A row of the table that the batch has a key of."""

    key: Key
    group: int
    row: int
    position: tuple[int, ...]
    """As the table has it."""


@dataclass(slots=True)
class Found:
    """What the files of a table hold of some keys."""

    hits: dict[str, list[Hit]] = field(default_factory=dict)
    """By file."""
    there: list[pa.Table] = field(default_factory=list)
    """The columns that were asked for, of all hits."""
    at: dict[Key, int] = field(default_factory=dict)
    """Where in them a key is."""


class DataFolder:
    """The data files of one table, as a task reads and writes them."""

    def __init__(self, root: str, schema: pa.Schema) -> None:
        """Take the table's folder and its schema; columns that a file does not have are null."""
        self._root = Path(root)
        self._schema = schema

    def find(
        self,
        files: Iterable[FileFacts],
        key: Sequence[str],
        keys: Iterable[Key],
        position: Sequence[str],
        names: Sequence[str],
        open_column: str = "",
    ) -> Found:
        """Return the rows with these keys, their positions, and some columns; of histories those that are true now."""
        wanted = set(keys)
        found = Found()
        values = [
            pa.array(
                sorted({one[number] for one in wanted}), comparable(pa.nulls(0, self._schema.field(name).type)).type
            )
            for number, name in enumerate(key)
        ]
        needed = [*key, *position, *([open_column] if open_column else [])]
        for file in files:
            with self._opened(file.path) as parquet:
                for group in range(parquet.num_row_groups):
                    rows = self._read(parquet, group, needed)
                    numbers = _among(rows, key, values, open_column)
                    if not numbers:
                        continue
                    chosen = rows.take(numbers)
                    places = chosen.select(list(position)).to_pylist()
                    hits = [
                        Hit(one, group, row, tuple(place[name] for name in position))
                        for row, one, place in zip(numbers, keys_of(chosen, key), places, strict=True)
                        if one in wanted
                    ]
                    if hits:
                        found.hits.setdefault(file.path, []).extend(hits)
                        self._take(parquet, group, hits, names, found)
        return found

    def _take(self, parquet: Any, group: int, hits: Sequence[Hit], names: Sequence[str], found: Found) -> None:
        first = sum(table.num_rows for table in found.there)
        found.at |= {hit.key: first + number for number, hit in enumerate(hits)}
        if names:
            found.there.append(self._read(parquet, group, names).take([hit.row for hit in hits]))

    def rewrite(
        self, folder: Path, path: str, hits: Sequence[Hit], become: Callable[[pa.Table, Sequence[Hit]], pa.Table]
    ) -> None:
        """Write a file anew, in which some rows are gone, and what they become stands at its end."""
        by_group: dict[int, list[Hit]] = {}
        for hit in hits:
            by_group.setdefault(hit.group, []).append(hit)
        with self._opened(path) as parquet, _Writing(folder, self._schema) as writing:
            for group in range(parquet.num_row_groups):
                rows = self._read(parquet, group, self._schema.names)
                gone = by_group.get(group, [])
                if gone:
                    numbers = [hit.row for hit in gone]
                    writing.late.append(become(rows.take(numbers), gone))
                    stays = pc.invert(
                        pc.is_in(pa.array(range(rows.num_rows), pa.int64()), pa.array(numbers, pa.int64()))
                    )
                    rows = rows.filter(stays)
                writing.write(rows)

    def read(self, path: str) -> pa.Table:
        """Return the rows of a small file."""
        with self._opened(path) as parquet:
            groups = [self._read(parquet, group, self._schema.names) for group in range(parquet.num_row_groups)]
        return joined(groups, self._schema)

    def write(self, folder: Path, rows: pa.Table) -> None:
        """Write rows as a file of their own, if there are any."""
        with _Writing(folder, self._schema) as writing:
            writing.write(rows)

    def _read(self, parquet: Any, group: int, names: Sequence[str]) -> pa.Table:
        """Return columns of a row group as the table has them today."""
        known = set(parquet.schema_arrow.names)
        rows = parquet.read_row_group(group, columns=[name for name in names if name in known])
        columns = [
            rows.column(name).cast(self._schema.field(name).type)
            if name in known
            else pa.nulls(parquet.metadata.row_group(group).num_rows, self._schema.field(name).type)
            for name in names
        ]
        return pa.table(columns, schema=pa.schema([self._schema.field(name) for name in names]))

    @contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        with pq.ParquetFile(self._root / path) as parquet:
            yield parquet


class _Writing:
    """A file that is there from its first row on; a context manager."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._path = folder / f"part-{uuid.uuid4()}.snappy.parquet"
        self._schema = schema
        self._writer: pq.ParquetWriter | None = None
        self.late: list[pa.Table] = []
        """What is written at the end."""

    def write(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._path, self._schema, compression="snappy")
        self._writer.write_table(rows.select(self._schema.names).cast(self._schema))

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            for rows in self.late:
                self.write(rows)
        if self._writer is not None:
            self._writer.close()


def _among(rows: pa.Table, key: Sequence[str], values: Sequence[Any], open_column: str) -> list[int]:
    """Return the numbers of rows whose key may be one of the wanted: each of its columns is one of theirs."""
    mask = pc.is_null(rows.column(open_column)) if open_column else None
    for name, among in zip(key, values, strict=True):
        column = comparable(rows.column(name))
        one = pc.is_in(column, value_set=among.cast(column.type))
        mask = one if mask is None else pc.and_(mask, one)
    assert mask is not None, "a key has columns"
    numbers: list[int] = pc.indices_nonzero(mask).to_pylist()
    return numbers


def joined(tables: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """Return tables as one."""
    return pa.concat_tables(tables) if tables else schema.empty_table()


def ordered(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return rows in the order of their keys, by which a reader finds some of them without the others."""
    return rows.take(pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in key]))


def changed(rows: pa.Table, values: Mapping[str, Any]) -> pa.Table:
    """Return rows with some columns replaced."""
    for name, column in values.items():
        number = rows.schema.get_field_index(name)
        rows = rows.set_column(number, rows.schema.field(number), column)
    return rows
