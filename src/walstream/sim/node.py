"""One simulated node: the real log store, the real cores and the shell around them, on a simulated machine.

Is the `Host` of `node.driver.Replica`, so that what does the core's effects here is what does them in a real node.
Everything that happens on the node goes through `run`: it is skipped when the process is dead, waits while it is
paused, and is followed by what an event loop does between two turns, and by the checkers.

A life begins with `start` and ends with `stop` (cleanly), `crash` or a blown fuse; the disk outlives it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from walstream.cluster.local import Catalogue
from walstream.cluster.metadata import Member, MetadataService, PartitionKey, PartitionState
from walstream.cluster.static import Opening, StaticCluster
from walstream.errors import DirectoryUnusable, WalstreamError
from walstream.log import checkpoint as checkpoints
from walstream.log.checkpoint import key_text
from walstream.log.settings import TopicSettings
from walstream.log.store import LogStore
from walstream.node.driver import Replica
from walstream.node.marks import Marks
from walstream.replication.context import NEVER
from walstream.replication.effects import Report
from walstream.replication.events import MetadataChanged
from walstream.replication.manager import Manager
from walstream.sim.api import SimApi
from walstream.sim.clock import MS, SECOND, Timer
from walstream.sim.copies import Copy
from walstream.sim.disk import PowerLost, SimDisk
from walstream.sim.driver import Pace, SimDriver
from walstream.sim.links import SimLinks
from walstream.sim.metadata import MetadataClient
from walstream.sim.serving import Serving

if TYPE_CHECKING:
    from walstream.log.partition_log import PartitionLog
    from walstream.sim.cluster import Cluster

T = TypeVar("T")

FOLDER = Path("/data")
CLUSTER_ID = "simulated"
TICK_US = 1 * SECOND
JOURNAL_BYTES = 4_096
WHOLE = 1 << 62
LEAD_AGAIN_US = 5 * SECOND
"""As in a node: an epoch that could not be saved, or was resigned from, is tried again after so long."""


class SimNode(Serving):
    """A machine, and the process on it while there is one."""

    def __init__(self, cluster: Cluster, node_id: int) -> None:
        self.id = self.node_id = node_id
        self.metadata: MetadataService
        self.cluster = cluster
        self.clock = cluster.clock
        self.disk = SimDisk(cluster.clock.random)
        self.pace = Pace()
        self.is_up: bool = False
        self.is_paused = False
        self.life = 0
        self.copies: dict[PartitionKey, Copy] = {}
        self.api: SimApi | None = None
        """The request handlers of this life, in a run whose clients use them."""
        self._in_loop: Callable[[], AbstractContextManager[None]] = nullcontext
        self._waiting: list[Callable[[], None]] = []
        self.marks = Marks(_call)
        self._wakes: dict[PartitionKey, Timer] = {}
        self._is_running = False

    # ── lives ────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Begin a life, unless the power goes again meanwhile or the disk is full."""
        assert not self.is_up
        cluster = self.cluster
        self.is_paused = False
        self._waiting.clear()
        try:
            self._open()
        except PowerLost:
            self._lose_power("during its start")
            return
        except (WalstreamError, OSError) as error:
            self.driver.crash()
            cluster.trace(f"n{self.id}", f"does not start: {error}")
            return
        self.is_up = True
        cluster.trace(f"n{self.id}", f"up, life {self.life}")
        for copy in self.copies.values():
            cluster.checkers.opened(copy)
        self.run(self._begin)

    def _open(self) -> None:
        clock, cluster = self.clock, self.cluster
        self.driver = SimDriver(clock, self.disk, self.pace, self.run)
        defaults = TopicSettings(segment_bytes=cluster.scenario.segment_bytes)
        catalogue = Catalogue(self.disk, FOLDER, node_id=self.id, defaults=defaults, founds_cluster=False)
        if not catalogue.cluster_id:
            # The first disk was there before the topics were.
            catalogue.apply(catalogue.join(CLUSTER_ID, cluster.catalogue_version if self.life else 0))
        if catalogue.version < cluster.catalogue_version:
            catalogue.apply(catalogue.take_over(cluster.catalogue_version, cluster.topics))
        static = None
        if cluster.scenario.is_static:
            static = StaticCluster(self.disk, FOLDER, self.id, clock.now_ms, self._run_job)
            self.life, self.metadata = static.incarnation, static
        else:
            self.life = self._next_life()
        self.store = LogStore(
            self.disk, FOLDER, catalogue, self.driver, lambda: clock.now_ms, lambda: clock.now_ms, replicated=True,
            journal_bytes_max=JOURNAL_BYTES, journal_prepared_bytes=JOURNAL_BYTES // 2,
            checkpoint_interval_ms=3_000, new_id=cluster.new_id, scrub_bytes_per_s=cluster.scenario.scrub_bytes_per_s,
        )  # fmt: skip
        if cluster.clients:
            self.api = SimApi(self)
            self._in_loop = self.api.loop.running
        self.marks, self._wakes, self.copies = Marks(_call), {}, {}
        mine = self._logs_without_core()
        if static is not None:
            static.open(self._opening(log) for log in mine)
        for log in mine:
            self._make_copy(log)
        self.links = SimLinks(self, CLUSTER_ID)

    def _logs_without_core(self) -> list[PartitionLog]:
        placement = self.cluster.placement
        return [
            log
            for log in self.store.partitions.values()
            if log.key not in self.copies and self.id in placement.get(log.key, ())
        ]

    def _make_copy(self, log: PartitionLog) -> Copy:
        manager = Manager(log.key, Member(self.id, self.life), log, self.cluster.core_settings)
        self.copies[log.key] = copy = Copy(self.id, self.life, Replica(self, log, manager))
        copy.tried_us = self.clock.now_us
        return copy

    def take_catalogue(self) -> None:
        """Learn of the topics there are now: new ones get their cores, those that are gone lose them."""
        cluster = self.cluster
        if self.store.catalogue.version >= cluster.catalogue_version:
            return
        before = list(self.store.partitions.values())
        try:
            self.store.take_over(cluster.catalogue_version, cluster.topics)
        except DirectoryUnusable as error:
            cluster.trace(f"n{self.id}", f"cannot take the catalogue over: {error}")
            self.clock.after(TICK_US, partial(self.run, self.take_catalogue))
            return
        kept = {log.key for log in self.store.partitions.values()}
        for log in before:
            if log.key not in kept and log.key in self.copies:
                self.copies.pop(log.key).replica.close()
        self._open_cores()

    def _open_cores(self) -> None:
        """Begin with partitions that are new here; where their epochs cannot be saved, try again, as a node does."""
        cluster, fresh = self.cluster, self._logs_without_core()

        def begin(error: Exception | None) -> None:
            if error is not None:
                self.clock.after(LEAD_AGAIN_US, partial(self.run, self._open_cores))
                return
            for log in fresh:
                if log.key not in self.copies and self.store.partitions.get((log.topic, log.index)) is log:
                    copy = self._make_copy(log)
                    cluster.checkers.opened(copy)
                    self.links.introduce(copy.replica)
                    self._begin_copy(copy)

        if isinstance(self.metadata, StaticCluster):
            self.metadata.open([self._opening(log) for log in fresh], begin)
        else:
            begin(None)

    def _opening(self, log: PartitionLog) -> Opening:
        replicas = self.cluster.placement[log.key]
        return Opening(
            log.key, replicas, replicas[0], self.cluster.scenario.min_isr, log.leader_epoch, log.is_unclean
        )  # fmt: skip

    def _next_life(self) -> int:
        """Count lives on the disk. The clock is the floor, so that a wiped disk does not repeat one."""
        path = FOLDER / "life.json"
        saved = self.disk.read(path)
        life = max(msgspec.json.decode(saved, type=int) + 1 if saved else 1, self.clock.now_us // MS)
        self.disk.write(path, msgspec.json.encode(life), durable=True)
        return life

    def _begin(self) -> None:
        """Tell the cores that they live, join the cluster and listen."""
        service = self.cluster.metadata
        if service is not None:
            self.metadata = MetadataClient(service, self.clock, self.cluster.network, self.id, self.run)
        unclean = [copy.key for copy in self.copies.values() if copy.log.is_unclean]
        for copy in list(self.copies.values()):
            self._begin_copy(copy)
        self.metadata.register(self.id, self.life, is_unclean=unclean)
        self.links.start()
        self._tick_later(self.driver)

    def _begin_copy(self, copy: Copy) -> None:
        copy.replica.start(None)
        self.metadata.watch(copy.key, partial(_tell_metadata, copy.replica))

    def stop(self) -> None:
        """End the process as SIGTERM does: everything is flushed, and the next start reads nothing again."""
        self.resume()  # A process that stands still hears no signal.
        if not self.is_up:
            return  # It did not live to hear it.
        self.cluster.trace(f"n{self.id}", "stops")
        try:
            if self.api is not None:
                self.api.stop()
            self._end()
            for copy in self.copies.values():
                copy.replica.close()
            self.store.close()
            for copy in self.copies.values():
                self.cluster.checkers.observe(copy)
            self.store.mark_clean()
        except PowerLost:
            self._lose_power("while it stopped")
        except OSError as error:
            self.cluster.trace(f"n{self.id}", f"does not stop cleanly: {error}")
        self.cluster.checkers.closed(self.id)

    def crash(self, *, is_power_lost: bool) -> None:
        """End the process at once; with the power, what was not synced is lost or torn."""
        self.cluster.trace(f"n{self.id}", "loses power" if is_power_lost else "is killed")
        self._end()
        self.driver.crash()
        if is_power_lost:
            self.disk.crash()
        self.cluster.checkers.closed(self.id)

    def _lose_power(self, when: str) -> None:
        self.cluster.trace(f"n{self.id}", f"loses power {when}")
        self._end()
        self.driver.crash()
        self.disk.crash()
        self.cluster.checkers.closed(self.id)

    def _end(self) -> None:
        if self.is_up:
            self.is_up = False
            self.links.stop()
            if self.api is not None:
                self.api.loop.close()
            for timer in self._wakes.values():
                timer.cancel()
            if isinstance(self.metadata, MetadataClient):
                self.metadata.crash()

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, callback: Callable[[], None]) -> None:
        """Let something happen on the node: one turn of its event loop."""
        if not self.is_up:
            return
        if self.is_paused:
            self._waiting.append(callback)
            return
        if self._is_running:
            callback()  # Within a turn: the turn's end will see to the rest.
            return
        self._is_running = True
        try:
            with self._in_loop():
                callback()
                self._end_turn()
        except PowerLost:
            self._lose_power("in the middle of something")
        finally:
            self._is_running = False
        if self.is_up:
            for copy in self.copies.values():
                self.observe(copy)

    def observe(self, copy: Copy) -> None:
        """Let the checkers look at a copy: first at its record, by which its leader commits."""
        static = self.metadata
        if isinstance(static, StaticCluster) and copy.leading_epoch is not None:
            state = static.state(copy.key)
            if state is not None and state is not copy.record:
                copy.record = state
                self.cluster.checkers.recorded(copy.key, state)
        self.cluster.checkers.observe(copy)

    def _end_turn(self) -> None:
        while self.marks:
            self.marks.run()
        self.driver.pump()

    def pause(self) -> None:
        """Let the process stand still."""
        self.cluster.trace(f"n{self.id}", "stands still")
        self.is_paused = True

    def resume(self) -> None:
        """Let it go on, with everything that has come meanwhile."""
        if self.is_paused:
            self.cluster.trace(f"n{self.id}", "goes on")
            self.is_paused = False
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                self.run(callback)

    def _tick_later(self, driver: SimDriver) -> None:
        """Call the store's tick every second of this life."""

        def tick() -> None:
            if self.driver is driver:
                self.store.tick()
                self._lead_again()
                self._tick_later(driver)

        self.clock.after(TICK_US, lambda: self.run(tick))

    def _lead_again(self) -> None:
        """In a static cluster nobody else can lead: who has resigned tries again, as `node.replicas` does."""
        static = self.metadata
        if not isinstance(static, StaticCluster):
            return
        for copy in self.copies.values():
            state = static.state(copy.key)
            is_due = self.clock.now_us - copy.tried_us >= LEAD_AGAIN_US
            if state is not None and self.id in (state.leader, state.last_leader) and not copy.log.is_leader and is_due:
                copy.tried_us = self.clock.now_us
                if copy.log.write_error is None:
                    static.lead_again(copy.key, copy.log.leader_epoch)

    # ── what a replica needs of its host ─────────────────────────────────────────────────────────────────────────

    def clock_ms(self) -> int:
        """Return the time that the core goes by."""
        return self.clock.now_us // MS

    def mark(self, replica: Replica) -> None:
        """See to it that the replica's `look` is called in this turn, once."""
        self.marks.mark(replica)

    def wake_at(self, replica: Replica, deadline_ms: int) -> None:
        """See to it that the replica hears a tick at that time."""
        timer, due_us = self._wakes.get(replica.key), deadline_ms * MS
        if timer is not None and timer.callback is not None:
            if timer.due_us <= due_us:
                return  # The tick comes early, and the replica says again when the next one is due.
            timer.cancel()
        if deadline_ms < NEVER:
            tick = partial(self.run, replica.tick)
            self._wakes[replica.key] = self.clock.after(due_us - self.clock.now_us, tick)

    def run_blocking(self, job: Callable[[], T], done: Callable[[T | None, Exception | None], None]) -> None:
        """Run what waits for the disk beside the loop."""
        self.driver.run_long(job, done)

    def _run_job(self, job: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        self.driver.run(job, lambda _, error: done(error))

    def post(self, callback: Callable[[], None]) -> None:
        """Call back on the loop."""
        self.driver.post(callback)

    def refresh(self, replica: Replica, epoch: int) -> None:
        """Somebody knows a newer epoch: read the record again, or, in a static cluster, lead above it."""
        state = self.metadata.state(replica.key) if isinstance(self.metadata, StaticCluster) else None
        if isinstance(self.metadata, StaticCluster) and state is not None and state.leader == self.id:
            self.metadata.lead_again(replica.key, epoch)
        else:
            self.metadata.read(replica.key, lambda read: _tell_metadata(replica, read) if read else None)

    def came_back(self, replica: Replica) -> None:
        """Hear that a log takes writes again: a static leader begins anew."""
        if isinstance(self.metadata, StaticCluster):
            self.metadata.lead_again(replica.key, replica.partition.leader_epoch)

    def role_changed(self, replica: Replica) -> None:
        """Let the group coordinator follow the leader of the offsets topic."""
        if self.api is not None and self.is_up:
            self.api.role_changed(replica)

    def replica_failed(self, replica: Replica, error: Exception) -> None:  # noqa: ARG002 - the protocol's signature
        """End the run: here a failure is a finding."""
        raise error

    def reported(self, replica: Replica, report: Report) -> None:
        """Hear what the core reports."""
        trace = self.cluster.trace
        if trace.is_on:
            fields = " ".join(f"{name}={value}" for name, value in report.fields)
            trace(f"n{self.id}", f"p{replica.key[1]} {report.phrase} {fields}")

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────

    def has_offline_partition(self) -> bool:
        """Whether a log takes no more writes."""
        return any(copy.log.write_error is not None for copy in self.copies.values())

    def disk_moves(self) -> None:
        """The disk no longer hangs."""
        if self.is_up:
            self.driver.resume()

    def rot(self) -> str | None:
        """Flip a bit in one of the logs.

        In what a checkpoint covers: behind it recovery takes all that fails its checksum for a write that was torn, as
        it must, and could not tell a disk that has lost what it had promised a moment ago.
        """
        saved = checkpoints.load(self.disk, FOLDER / "checkpoint.json")
        known = saved.partitions if saved is not None else {}
        partitions = self.store.partitions.values()
        folders = {str(log.folder.relative_to(FOLDER)): known.get(key_text(log.key)) for log in partitions}

        def limit(path: str) -> int:
            folder, _, name = path.removeprefix("data/").rpartition("/")
            covered = folders.get(folder)
            if covered is None or not name.endswith(".log"):
                return 0
            base = int(name.removesuffix(".log"))
            return covered.position if base == covered.segment else WHOLE if base < covered.segment else 0

        where = self.disk.rot(limit)
        if where is not None:
            self.cluster.checkers.rotten(self.id)
        return where

    def wipe(self) -> None:
        """Put a new disk into the machine, whose process is dead."""
        assert not self.is_up
        self.cluster.trace(f"n{self.id}", "gets a new disk")
        self.disk.wipe()
        self.cluster.checkers.wiped(self.id)


def _call(call: Callable[[], None]) -> None:
    """Call one who was marked; what goes wrong is a finding."""
    call()


def _tell_metadata(replica: Replica, state: PartitionState) -> None:
    replica.feed(MetadataChanged(state))
