"""Running a capture: from a configuration to a generation that streams until it is told to stop or something fails.

Owns the loop and the order in which things begin and end; everything it does is done elsewhere. Invariants: feedback
comes from durable, valid points only (the sink calls the source); a batch is one group, so a transaction is never
divided between points; the first failure ends the generation.

    receive a batch ─▶ render ─▶ hand over to the producer ─▶ close the group        this thread, never waiting for acks
    last rows durable ─▶ point ─▶ point durable ─▶ feedback                          the sink's threads
    status to the server twice a second                                              the source's thread

So the server decodes, we render, the log syncs, all at once. What bounds it is the producer's queue: when that is full
this thread waits, and the server hears from us all the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from walstream import logs
from walstream.capture.engines import ResumableSource, ensure_slot, open_source
from walstream.capture.envelope import Renderer, Stamp
from walstream.capture.generations import Log, instance_name
from walstream.capture.kafka import LogAddress
from walstream.capture.ladder import LadderWriter, OnLook
from walstream.capture.ledger import Ledger
from walstream.capture.provenance import Output
from walstream.capture.schemas import Schemas, read_schemas
from walstream.capture.sink import Sink
from walstream.capture.snapshot import Snapshot
from walstream.capture.snapshot_progress import Display, LogDisplay
from walstream.capture.source import Batch, Transaction
from walstream.capture.streams import Streams
from walstream.capture.topics import Topics
from walstream.config import Config
from walstream.errors import DecodeError, UnreachableError, WalstreamError
from walstream.positions import Lsn
from walstream.postgres import address as postgres_address
from walstream.postgres.session import connect, named

RECEIVE_S: Final = 0.2
RECEIVE_BESIDE_SNAPSHOT_S: Final = 0.002
IDLE_POINT_INTERVAL_S: Final = 1.0
"""An idle server's WAL moves by itself; so often at most a point is written for nothing but that."""
STOP_S_MAX: Final = 10.0
FAILED_DRAIN_S: Final = 5.0
BACKOFF_S: Final = (0.5, 10.0)
"""The first pause between tries and the longest."""
STEADY_S: Final = 60.0
"""A generation that lasted so long was a success: the next pause is the first one again."""

log = logs.get(__name__)

Stop = Callable[[], bool]
"""Whether the capture is to end."""


def run(
    config: Config,
    stop: Stop,
    *,
    retry: bool = False,
    new_epoch: bool = False,
    on_look: OnLook | None = None,
    display: Callable[[], Display] = LogDisplay,
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
    display: Callable[[], Display] = LogDisplay,
) -> None:
    """Open one generation and stream until `stop` says so. Raises what ends it."""
    capture, postgres = config.capture, config.source.postgres
    address, dsn = LogAddress.of(capture), postgres_address.dsn(postgres)
    topics = Topics(address, capture.prefix, capture.partitions)
    topics.prepare()
    with ExitStack() as stack:
        before = Log(address, topics)
        stack.callback(before.close)
        maker = ensure_slot(dsn, postgres, may_create=before.last is None or new_epoch)
        if maker is not None:
            stack.callback(maker.close)
        source, state = open_source(dsn, config, _spill_folder(config, stack))
        stack.callback(source.close)
        sink = Sink(address, topics, on_durable=source.send_feedback, tend=Patience(stop).tend)
        stack.callback(sink.close)
        instance = instance_name()
        ledger = before.open(state, instance, sink.points.write_now, new_epoch=new_epoch)
        source.skip_before(ledger.end_lsn)
        connection = stack.enter_context(connect(dsn))
        schemas = Schemas(topics.names.schema, ledger.gen, read_schemas(address, topics), connection, sink.write_now)
        renderer = Renderer(
            database=postgres.database,
            source_epoch=ledger.source_epoch,
            generation=ledger.gen,
            streams=Streams(capture.prefix, config.streams, capture.tenant),
            types=schemas.types,
            describe=schemas.describe,
        )
        sink.begin(ledger)
        snapshot: Snapshot | None = None
        if capture.snapshot == "initial":
            snapshot = Snapshot(
                dsn,
                postgres.publication_name,
                gen=ledger.gen,
                finished=dict(ledger.snapshots),
                sink=sink,
                renderer=renderer,
                describe=schemas.describe,
                workers=capture.snapshot_workers,
                display=display,
            )
            stack.callback(snapshot.close)
            if maker is not None:
                snapshot.hold(maker.slot)
            snapshot.start()
        if maker is not None:
            maker.close()
        ladder = LadderWriter(
            dsn,
            instance,
            source.ladder,
            lambda: sink.durable,
            lambda key, value: sink.points.write_later(topics.names.status, key, value),
            on_look,
        )
        stack.callback(ladder.close)
        ladder.start()

        def beat() -> None:
            with named("writing a heartbeat"):
                connection.execute("select pg_logical_emit_message(false, 'walstream.heartbeat', '')")

        heartbeat = Heartbeat(capture.heartbeat_interval_ms / 1000, beat)
        loop = Loop(config, topics, source, sink, renderer, ledger, snapshot, heartbeat)
        try:
            loop.run(stop)
        except WalstreamError as error:
            _settle(sink, error)
            if isinstance(error, DecodeError) and error.data:
                raise _with_saved_bytes(error, _evidence_folder(config)) from error
            raise
        log.info("generation ended", gen=ledger.gen, durable_lsn=str(ledger.end_lsn), rows_total=ledger.rows_total)


class Patience:
    """How long a stop waits for a log that takes no rows."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._since_s: float | None = None

    def tend(self) -> None:
        """Raise when a stop has been wanted for too long."""
        if not self._stop():
            return
        self._since_s = self._since_s or time.monotonic()
        if time.monotonic() - self._since_s > STOP_S_MAX:
            raise UnreachableError("The log takes no rows, so that what was received cannot be made durable.")


class Heartbeat:
    """Something to be done once in a while."""

    def __init__(self, interval_s: float, beat: Callable[[], None]) -> None:
        """Take the interval; 0 means never."""
        self._interval_s = interval_s
        self._beat = beat
        self._next_s = time.monotonic() + interval_s

    def tend(self, now_s: float) -> None:
        """Do it if it is time."""
        if self._interval_s and now_s >= self._next_s:
            self._beat()
            self._next_s = now_s + self._interval_s


class Loop:
    """The loop of one generation."""

    def __init__(
        self,
        config: Config,
        topics: Topics,
        source: ResumableSource,
        sink: Sink,
        renderer: Renderer,
        ledger: Ledger,
        snapshot: Snapshot | None,
        heartbeat: Heartbeat,
    ) -> None:
        self._limit = config.source.postgres.batch_limit
        self._dead_letter = topics.names.dead_letter if config.capture.on_decode_error == "dead_letter" else ""
        self._source = source
        self._sink = sink
        self._renderer = renderer
        self._gen = ledger.gen
        self._source_epoch = ledger.source_epoch
        self._ended_lsn = ledger.end_lsn
        self._snapshot = snapshot
        self._heartbeat = heartbeat
        self._idle_point_s = 0.0

    def run(self, stop: Stop) -> None:
        """Stream until `stop` says so; then make everything durable that has been received whole."""
        snapshot, receive_s = self._snapshot, RECEIVE_S
        while not stop():
            self._sink.check()
            with self._source.receive_batch(self._limit, receive_s) as batch:
                self._take(batch)
            if snapshot is not None:
                moved = snapshot.pump()
                receive_s = 0.0 if moved else RECEIVE_BESIDE_SNAPSHOT_S if snapshot.is_active else RECEIVE_S
            self._heartbeat.tend(time.monotonic())
        self._sink.drain()

    def _take(self, batch: Batch) -> None:
        if batch.transactions:
            for transaction in batch.transactions:
                self._write(transaction)
            last = batch.transactions[-1]
            self._end_group(batch.last_lsn, last.xid, last.commit_time_us)
        elif batch.last_lsn > self._ended_lsn and time.monotonic() >= self._idle_point_s:
            self._idle_point_s = time.monotonic() + IDLE_POINT_INTERVAL_S
            self._end_group(batch.last_lsn)

    def _end_group(self, end_lsn: Lsn, xid: int = 0, commit_time_us: int = 0) -> None:
        self._sink.end_group(end_lsn, xid, commit_time_us)
        self._ended_lsn = end_lsn

    def _write(self, transaction: Transaction) -> None:
        assert transaction.commit_lsn >= self._ended_lsn, "the source skips what is durable"
        stamp = Stamp.of(transaction, time.time_ns() // 1_000_000)
        timestamp_ms = transaction.commit_time_us // 1000
        if not self._dead_letter:
            self._sink.write(self._renderer.render(transaction.rows, stamp), timestamp_ms)
        else:
            dead: list[Output] = []
            outputs = self._renderer.render(
                transaction.rows, stamp, lambda error, seq: dead.append(self._dead(transaction, error, seq))
            )
            self._sink.write(outputs, timestamp_ms)
            self._sink.write(dead, timestamp_ms)
        transaction.close()

    def _dead(self, transaction: Transaction, error: DecodeError, seq: int) -> Output:
        """Return the record for a change that cannot be understood: its bytes, and in headers all that is known."""
        log.error("change not understood", error=error.message, xid=transaction.xid, seq=seq)
        headers = {
            "gen": self._gen,
            "source_epoch": self._source_epoch,
            "commit_lsn": int(transaction.commit_lsn),
            "txid": transaction.xid,
            "seq": seq,
        }
        described = [(name, b"%d" % value) for name, value in headers.items()]
        return self._dead_letter, error.data, None, [*described, ("error", error.message.encode())]


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
