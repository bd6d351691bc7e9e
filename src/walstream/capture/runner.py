"""Running a capture: from a configuration to a generation that streams until it is told to stop or something fails.

Owns the order in which the parts of a generation begin and end, and what becomes of a failure; everything else is done
by the parts. Invariants: the slot is held before the generation is opened; feedback comes from durable, valid points
only, because nobody but the sink calls `send_feedback`; the first failure ends the generation.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg

from walstream import logs
from walstream.capture.engines import Questions, ResumableSource, SlotMaker, ensure_slot, open_source
from walstream.capture.envelope import HEARTBEAT_PREFIX, Renderer
from walstream.capture.generations import Log, instance_name
from walstream.capture.kafka import LogAddress
from walstream.capture.ladder import LadderWriter, OnLook
from walstream.capture.ledger import Ledger
from walstream.capture.loop import Heartbeat, Loop, Patience, Stop
from walstream.capture.schemas import Schemas, read_schemas
from walstream.capture.sink import Sink
from walstream.capture.snapshot import Snapshot
from walstream.capture.snapshot_plan import TableName, quoted_table
from walstream.capture.snapshot_progress import Display, LogDisplay
from walstream.capture.snapshot_run import Describe
from walstream.capture.snapshot_watch import Watch
from walstream.capture.streams import Streams
from walstream.capture.topics import Topics
from walstream.config import Config
from walstream.errors import DecodeError, LockTimeout, WalstreamError
from walstream.positions import Lsn
from walstream.postgres import address as postgres_address
from walstream.postgres import catalogue
from walstream.postgres.messages import Relation
from walstream.postgres.relations import RelationInfo
from walstream.postgres.session import named

FAILED_DRAIN_S: Final = 5.0
BACKOFF_S: Final = (0.5, 10.0)
"""The first pause between tries and the longest."""
STEADY_S: Final = 60.0
"""A generation that lasted so long was a success: the next pause is the first one again."""

HEARTBEAT_HINT: Final = (
    "An idle slot keeps its WAL meanwhile. On a standby set capture.heartbeat_interval_ms = 0 and write at the primary."
)

MakeDisplay = Callable[[], Display]

log = logs.get(__name__)


def run(
    config: Config,
    stop: Stop,
    *,
    retry: bool = False,
    new_epoch: bool = False,
    on_look: OnLook | None = None,
    display: MakeDisplay = LogDisplay,
) -> None:
    """Capture until `stop` says so; what fails is raised, or with `retry` tried again when that can help.

    `on_look` is told of the ladder once a second, by another thread; `display` makes what shows a snapshot.
    """
    pause_s = BACKOFF_S[0]
    while True:
        started_s = time.monotonic()
        try:
            run_generation(config, stop, new_epoch=new_epoch, on_look=on_look, display=display)
            return
        except WalstreamError as error:
            if not (retry and error.retryable) or stop():
                raise
            if time.monotonic() - started_s > STEADY_S:
                pause_s = BACKOFF_S[0]
            log.warning("generation failed", error=str(error), again_after_s=pause_s)
        deadline = time.monotonic() + pause_s
        while time.monotonic() < deadline and not stop():
            time.sleep(0.05)
        if stop():
            return
        pause_s = min(pause_s * 2, BACKOFF_S[1])


def run_generation(
    config: Config,
    stop: Stop,
    *,
    new_epoch: bool = False,
    on_look: OnLook | None = None,
    display: MakeDisplay = LogDisplay,
) -> None:
    """Open one generation and stream until `stop` says so. Raises what ends it."""
    with ExitStack() as stack:
        try:
            generation = Generation(config, stop, stack, new_epoch=new_epoch)
        except _Stopped:
            log.info("stopped while waiting for running transactions", slot=config.source.postgres.slot_name)
            return
        loop = generation.begin(display, on_look)
        # What is there now stays: collections, which rows set off all the time, need not look at it again.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        try:
            loop.run(stop)
        except WalstreamError as error:
            _settle(generation.sink, error)
            if isinstance(error, DecodeError) and error.data:
                raise _with_saved_bytes(error, _evidence_folder(config)) from error
            raise
        ledger = generation.ledger
        log.info("generation ended", gen=ledger.gen, durable_lsn=str(ledger.end_lsn), rows_total=ledger.rows_total)


class Generation:
    """The parts of one generation. They end with the stack, in the reverse order of their beginning."""

    def __init__(self, config: Config, stop: Stop, stack: ExitStack, *, new_epoch: bool) -> None:
        """Take hold of the slot and open the generation. Raises what forbids it."""
        self._config = config
        self._stack = stack
        self._dsn = postgres_address.dsn(config.source.postgres)
        self._address = LogAddress.of(config.capture)
        self._topics = Topics(self._address, config.capture.prefix, config.capture.partitions)
        self._topics.prepare()
        self._instance = instance_name()
        before = Log(self._address, self._topics)
        stack.callback(before.close)
        self._maker: SlotMaker | None = ensure_slot(
            self._dsn,
            config.source.postgres,
            may_create=before.last is None or new_epoch,
            tend=partial(_check_stop, stop),
        )
        if self._maker is not None:
            stack.callback(self._maker.close)
        self.source, state = open_source(self._dsn, config, _spill_folder(config, stack))
        stack.callback(self.source.close)
        self.sink = Sink(self._address, self._topics, on_durable=_confirming(self.source), tend=Patience(stop).tend)
        stack.callback(self.sink.close)
        self.ledger: Ledger = before.open(state, self._instance, self.sink.points.write_now, new_epoch=new_epoch)
        self.source.skip_before(self.ledger.end_lsn)

    def begin(self, display: MakeDisplay, on_look: OnLook | None) -> Loop:
        """Write the first point and begin everything that goes on beside the loop; return the loop."""
        capture, postgres = self._config.capture, self._config.source.postgres
        questions = Questions(self._dsn)
        self._stack.callback(questions.close)
        schemas = Schemas(
            self._topics.names.schema,
            self.ledger.gen,
            read_schemas(self._address, self._topics),
            questions,
            self.sink.write_now,
        )
        snapshot: Snapshot | None = None
        streams = Streams(capture.prefix, self._config.streams, capture.tenant)
        untold: set[tuple[int, int]] = set()

        def described(message: Relation) -> RelationInfo:
            info = schemas.describe(message)
            if (tenant := streams.untold_tenant(info)) is not None and (info.id, info.version) not in untold:
                untold.add((info.id, info.version))
                _report_untold(info, tenant)
            return info

        def describe(message: Relation) -> RelationInfo:
            info = described(message)
            if snapshot is not None and (info.schema, info.table) not in self.ledger.snapshots:
                snapshot.look_now()
            return info

        streams = Streams(capture.prefix, self._config.streams, capture.tenant)
        # A table that another session has locked is met when it is described.
        with contextlib.suppress(LockTimeout):
            published = questions.ask(lambda session: catalogue.publication_facts(session, postgres.publication_name))
            streams.meet((table.schema, table.table) for table in (published.tables if published else ()))
        renderer = Renderer(
            database=postgres.database,
            source_epoch=self.ledger.source_epoch,
            generation=self.ledger.gen,
            streams=streams,
            types=schemas.types,
            describe=describe,
        )
        self.sink.begin(self.ledger)
        if capture.snapshot == "initial":
            snapshot = self._snapshot(renderer, described, display)
        else:
            self._begin_watch()
        if self._maker is not None:
            self._maker.close()
        self._begin_ladder(on_look)
        return Loop(
            self.source,
            self.sink,
            renderer,
            self.ledger,
            limit=postgres.batch_limit,
            snapshot=snapshot,
            heartbeat=Heartbeat(capture.heartbeat_interval_ms / 1000, _beating(questions)),
            dead_letter=self._topics.names.dead_letter if capture.on_decode_error == "dead_letter" else "",
        )

    def _snapshot(self, renderer: Renderer, describe: Describe, display: MakeDisplay) -> Snapshot:
        snapshot = Snapshot(
            self._dsn,
            self._config.source.postgres.publication_name,
            gen=self.ledger.gen,
            finished=dict(self.ledger.snapshots),
            sink=self.sink,
            renderer=renderer,
            describe=describe,
            workers=self._config.capture.snapshot_workers,
            display=display,
        )
        self._stack.callback(snapshot.close)
        if self._maker is not None:
            snapshot.hold(self._maker.slot)
        snapshot.start()
        return snapshot

    def _begin_watch(self) -> None:
        """Watch for tables that leave the stream and come back, where none may be read again."""
        watch = Watch(
            self._dsn,
            self._config.source.postgres.publication_name,
            {name: snapshot.identity for name, snapshot in self.ledger.snapshots.items()},
            workers=0,
            may_read=False,
            on_disproved=self.sink.points.disprove,
        )
        self._stack.callback(watch.close)
        watch.start()

    def _begin_ladder(self, on_look: OnLook | None) -> None:
        ladder = LadderWriter(
            self._dsn,
            self._instance,
            self.source.ladder,
            lambda: self.sink.durable,
            lambda key, value: self.sink.points.write_later(self._topics.names.status, key, value),
            on_look,
        )
        self._stack.callback(ladder.close)
        ladder.start()


class _Stopped(Exception):
    """A stop was wanted before the slot was there."""


def _check_stop(stop: Stop) -> None:
    if stop():
        raise _Stopped


def _confirming(source: ResumableSource) -> Callable[[Lsn], None]:
    """Return what confirms to the source; one that has failed says so to who receives from it."""

    def confirm(lsn: Lsn) -> None:
        with contextlib.suppress(WalstreamError):
            source.send_feedback(lsn)

    return confirm


def _beating(questions: Questions) -> Callable[[], None]:
    def emit(session: psycopg.Connection[Any]) -> None:
        with named("writing a heartbeat"):
            session.execute("select pg_catalog.pg_logical_emit_message(false, %s, '')", [HEARTBEAT_PREFIX])

    def beat() -> None:
        # The stream is healthy without it: a standby takes no message, a role may not write one.
        try:
            questions.ask(emit)
        except WalstreamError as error:
            log.warning("heartbeat not written", error=error.message, hint=HEARTBEAT_HINT)

    return beat


def _report_untold(info: RelationInfo, tenant: str) -> None:
    log.error(
        "tenant column not in the replica identity: the table's rows have no tenant",
        table=f"{info.schema}.{info.table}",
        column=tenant,
        hint=f"Run: ALTER TABLE {quoted_table(TableName(info.schema, info.table))} REPLICA IDENTITY FULL; or take"
        ' operations = ["insert", "snapshot"] only, in [[streams]].',
    )


def _settle(sink: Sink, error: WalstreamError) -> None:
    """Before a failure is told, let what is on its way become durable: the next generation then begins after it."""
    if sink.failure.error is not None:
        return
    try:
        sink.drain(FAILED_DRAIN_S)
    except WalstreamError as later:
        log.warning("last rows not durable", error=str(later), because=str(error))


def _spill_folder(config: Config, stack: ExitStack) -> Path:
    if config.capture.spill_directory:
        folder = Path(config.capture.spill_directory)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="walstream-spill-")))


def _evidence_folder(config: Config) -> Path:
    return Path(config.capture.spill_directory or tempfile.gettempdir())


def _with_saved_bytes(error: DecodeError, folder: Path) -> DecodeError:
    """Save what could not be understood, and say where."""
    file = folder / f"walstream-decode-error-{time.time_ns() // 1_000_000}.bin"
    try:
        file.write_bytes(error.data)
    except OSError as failure:
        return DecodeError(error.message, f"The bytes could not be saved ({failure.strerror}).", error.data)
    return DecodeError(
        error.message,
        f"The bytes are in {file}; please report them. capture.on_decode_error = 'dead_letter' would go on without.",
        error.data,
    )
