"""One transaction under way: its rows so far, by subtransaction, in memory and in a file.

Owns what a subtransaction's abort takes back and what is left at the commit; refuses to know messages, except that some
of them are descriptions (Relation, Type). Invariants: the order of arrival is kept; what it holds in memory is charged
to the budget until it is released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, NamedTuple

from walstream.capture.source import Rows
from walstream.capture.spill import Budget, SpilledRows, SpillFile

ROW_COST_BYTES: Final = 48
"""What Python adds to the bytes of a row: the object's head, rounding, its place in a list."""

RUN_COST_BYTES: Final = 400
"""What a run of rows of one subtransaction takes besides the rows."""


class Description(NamedTuple):
    """A Relation or Type message and when it came, counted over all descriptions."""

    arrival: int
    data: bytes


# By kind and id: what it describes.
Descriptions = dict[bytes, Description]


class _Run:
    """Rows that came one after the other in the same subtransaction."""

    __slots__ = ("cost_bytes", "descriptions", "rows", "subxid")

    def __init__(self, subxid: int, rows: list[bytes]) -> None:
        self.subxid = subxid
        self.rows = rows
        self.descriptions = 0
        self.cost_bytes = 0


class Assembly:
    """A transaction that has not committed yet, or has not been received whole."""

    __slots__ = (
        "_aborted",
        "_budget",
        "_by_subxid",
        "_described",
        "_file",
        "_runs",
        "cost_bytes",
        "origin",
        "xid",
    )

    def __init__(self, xid: int, budget: Budget) -> None:
        self.xid = xid
        self.origin = ""
        self.cost_bytes = 0
        self._budget = budget
        self._runs: list[_Run] = []
        self._by_subxid: dict[int, list[_Run]] = {}
        self._described: dict[int, Descriptions] = {}
        self._aborted: set[int] = set()
        self._file: SpillFile | None = None

    def extend(self, subxid: int, rows: list[bytes], *, descriptions: int = 0) -> None:
        """Add messages of one subtransaction; the list becomes ours."""
        cost = sum(map(len, rows)) + ROW_COST_BYTES * len(rows)
        run = self._runs[-1] if self._runs else None
        if run is None or run.subxid != subxid:
            run = _Run(subxid, rows)
            self._runs.append(run)
            self._by_subxid.setdefault(subxid, []).append(run)
            self._charge(RUN_COST_BYTES)
        else:
            run.rows += rows
        run.descriptions += descriptions
        run.cost_bytes += cost
        self._charge(cost)

    def describe(self, subxid: int, description: Description) -> None:
        """Add a Relation or Type message."""
        self.extend(subxid, [description.data], descriptions=1)
        self._described.setdefault(subxid, {})[_subject(description.data)] = description

    def abort(self, subxid: int) -> None:
        """Take back what a subtransaction did."""
        for run in self._by_subxid.pop(subxid, ()):
            self._charge(-run.cost_bytes)
            run.rows, run.descriptions, run.cost_bytes = [], 0, 0
        self._described.pop(subxid, None)
        if self._file is not None:
            self._aborted.add(subxid)

    def spill(self, open_file: Callable[[], SpillFile]) -> None:
        """Move everything to the transaction's file."""
        self._file = self._file or open_file()
        for run in self._runs:
            if run.rows:
                self._file.append(run.subxid, run.rows, run.descriptions)
        self._runs.clear()
        self._by_subxid.clear()
        self._charge(-self.cost_bytes)

    def described(self) -> Descriptions:
        """Return what survives of the descriptions, the latest of each subject."""
        latest: Descriptions = {}
        for descriptions in self._described.values():
            for subject, description in descriptions.items():
                if subject not in latest or latest[subject].arrival < description.arrival:
                    latest[subject] = description
        return latest

    def finish(self, head: Sequence[bytes], tail: Sequence[bytes]) -> tuple[Rows, int]:
        """Return the surviving messages between a head and a tail of descriptions, and how many are changes."""
        if len(self._runs) == 1 and self._file is None and not head and not tail:
            only = self._runs[0]
            return only.rows, len(only.rows) - only.descriptions
        changes = sum(len(run.rows) - run.descriptions for run in self._runs)
        if self._file is not None:
            self._file.flush()
            count, descriptions = self._file.count(self._aborted)
            rest = [*chain.from_iterable(run.rows for run in self._runs), *tail]
            return SpilledRows(self._file, self._aborted, count, head, rest), changes + count - descriptions
        return [*head, *chain.from_iterable(run.rows for run in self._runs), *tail], changes

    def release(self) -> None:
        """Give back memory and file. May come from any thread, once."""
        self._budget.give_back(self.cost_bytes)
        if self._file is not None:
            self._file.close()

    def _charge(self, cost: int) -> None:
        self.cost_bytes += cost
        self._budget.take(cost)


def _subject(data: bytes) -> bytes:
    """Return what a description is about: its kind and the id after it."""
    return data[:5]
