"""The snapshot: the rows that were there before the stream began, as `op: r` records, table by table.

Owns reading them at a consistent point and saying, per table, when they are all in the log; refuses to know how rows
are rendered and delivered. It is pumped by the thread that also serves the stream, so both go on side by side and no
lock is needed: a pump takes what has arrived on the worker connections, never waits, and takes nothing while the sink
is full. What may wait (a consistent point, connections) is done by the thread of snapshot_watch.py.

    published, no snapshot finished ──▶ begin ──▶ rows, in parallel ranges of blocks ──▶ finished

A table's progress is in the log alone: `finished` is a record of `<prefix>.commits`. A capture that is killed leaves
whole tables finished and the others to be read again, under a new consistent point and a new id, by the next one; what
it wrote of those belongs to nobody. The stream goes on meanwhile: what commits before the snapshot's LSN is in the
snapshot already, what commits later comes after it in the order of positions (epoch, LSN, seq).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from walstream.capture.commit_points import TableSnapshot
from walstream.capture.sink import Sink
from walstream.capture.snapshot_progress import Display, LogDisplay
from walstream.capture.snapshot_run import CopyRenderer, Describe, Run
from walstream.capture.snapshot_watch import LOOK_INTERVAL_S, Watch
from walstream.postgres.session import CreatedSlot


class Snapshot:
    """All snapshots of one generation, one consistent point after the other. All methods belong to one thread."""

    def __init__(
        self,
        dsn: str,
        publication: str,
        *,
        gen: int,
        finished: Mapping[tuple[str, str], TableSnapshot],
        sink: Sink,
        renderer: CopyRenderer,
        describe: Describe,
        workers: int = 2,
        look_interval_s: float = LOOK_INTERVAL_S,
        display: Callable[[], Display] = LogDisplay,
    ) -> None:
        """Take what earlier generations finished in this source epoch; `describe` is the runner's, for each table."""
        self._gen = gen
        self._sink = sink
        self._renderer = renderer
        self._describe = describe
        self._display = display
        self._identities = {name: snapshot.identity for name, snapshot in finished.items()}
        self._watch = Watch(
            dsn,
            publication,
            self._identities,
            workers=workers,
            look_interval_s=look_interval_s,
            on_proved=sink.points.identify,
        )
        self._run: Run | None = None
        self._numbers = itertools.count(1)

    def hold(self, slot: CreatedSlot) -> None:
        """Keep the moment at which a slot that was just created begins, for the first snapshot.

        To be called before `start`, and before the next command of the session that created the slot.
        """
        self._watch.hold(slot)

    def start(self) -> None:
        """Begin to look for tables that lack a snapshot."""
        self._watch.start()

    @property
    def is_active(self) -> bool:
        """Whether rows are being read: then the stream should be waited for only briefly."""
        return self._run is not None

    @property
    def is_complete(self) -> bool:
        """Whether every table that was published at the last look has its snapshot, durable."""
        return self._run is None and self._watch.has_found_nothing

    def look_now(self) -> None:
        """Look for new tables at once; the stream has described a table that it had not before, perhaps."""
        self._watch.look_now()

    def pump(self) -> int:
        """Move rows that have arrived into the sink, without waiting; return how many. Raises what has failed."""
        self._sink.run_callbacks()
        if self._run is None:
            prepared = self._watch.take()
            if prepared is None:
                return 0
            self._run = Run(
                prepared,
                new_id=lambda lsn: f"{lsn}-{self._gen}-{next(self._numbers)}",
                sink=self._sink,
                renderer=self._renderer,
                describe=self._describe,
                display=self._display(),
                on_finished=self._finished,
            )
        moved = self._run.pump()
        if self._run.is_over:
            self._run.close()
            self._run = None
            self._watch.over()
        return moved

    def close(self) -> None:
        """Give up what is not finished."""
        if self._run is not None:
            self._run.close()
            self._run = None
        self._watch.close()

    def _finished(self, snapshot: TableSnapshot) -> None:
        self._identities[snapshot.schema, snapshot.table] = snapshot.identity
