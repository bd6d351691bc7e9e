"""A simulated storage world: the real store of a leader and of a replica, everything a log can go through, all faults.

The cluster simulator checks replication; here the world itself decides on roles and on the high watermark, and the
subject is what happens to files: compaction, retention, DeleteRecords, topics that are deleted and created again,
truncation, restarts on used journal files, a full disk, failed operations, clocks that jump, files that vanish.

The steps of a run are drawn from the seed. What each log must hold is kept in `storage_model`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from walstream.cluster.local import Change, Topic
from walstream.errors import (
    DiskFull,
    OutOfFiles,
    OutOfOrderSequence,
    WalstreamError,
)
from walstream.log.batch import parse_header
from walstream.sim.checkers import Violation
from walstream.sim.clock import EPOCH_MS, MS, SECOND, Clock
from walstream.sim.disk import ERRORS
from walstream.sim.storage_end import recover
from walstream.sim.storage_model import NOTHING_FOREIGN, Account, Client, Held, Record, Sent, encode
from walstream.sim.storage_node import StorageNode
from walstream.sim.storage_replication import Replication
from walstream.sim.storage_scenario import FREE_BYTES, StorageScenario, draw_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from walstream.log.partition_log import PartitionLog

STEPS = 180
SALT = 7_919_000_000_000
"""Makes the chance of a seed's storage world another one than that of its cluster."""

HOUR_US = 3_600 * SECOND
IDLE_US = (1 * MS, 40 * MS)
SAFE_SILENCE_MS = 23 * 3_600 * 1_000
"""Producers that were silent for longer may be forgotten."""


class StorageWorld:
    """One run."""

    def __init__(
        self, clock: Clock, scenario: StorageScenario | None = None, write: Callable[[str], None] | None = None
    ) -> None:
        self.clock = clock
        self.scenario = scenario or draw_storage(clock)
        self._write = write
        self.version = 0
        self.topics: dict[str, Topic] = {}
        self.accounts: dict[tuple[UUID, int], Account] = {}
        self.created: dict[tuple[UUID, int], int] = {}
        """The version of the catalogue with which each partition came."""
        self._wall_offset_ms = 0
        self.ahead_ms = 0
        """How far the wall clock has gone ahead in all, whatever it was set back in between."""
        self.nodes = [StorageNode(self, number) for number in range(1 if self.scenario.is_alone else 2)]
        self.replication = Replication(self)
        self._seen: list[set[tuple[UUID, int]]] = [set(), set()]
        """Partitions that each disk has had."""
        self._values = 0
        self._topic_count = 0
        self.is_copying = True
        self.is_committing = True
        self.are_faults_over = False
        self._silent_ms = 0
        self._steps: dict[str, Callable[[], None]] = {
            "produce": self._produce_somewhere, "retry": self._retry_somewhere, "tick": self.tick,
            "replicate": self.pulse, "commit": self._toggle_commits, "pause copying": self._toggle_copying,
            "delete records": self._delete_records, "configure": self._configure,
            "recreate topic": self._recreate_topic, "grow topic": self._grow_topic, "checkpoint": self._checkpoint,
            "compact": self._compact, "restart": self._restart, "kill": self._kill, "lose power": self._lose_power,
            "fuse": self._arm_fuse, "fail": self._fail, "jump": self._jump, "slow jobs": self._slow_jobs,
            "promote": self._promote, "wipe": self._wipe, "harm": self._harm, "wait": self._wait, "free": self._free,
            "brief full disk": self._meet_full_disk,
        }  # fmt: skip

    # ── the frame ────────────────────────────────────────────────────────────────────────────────────────────────

    def trace(self, actor: str, text: str) -> None:
        """Write a line of the trace."""
        if self._write is not None:
            self._write(f"{self.clock.now_us / 1_000_000:12.6f} {actor:>5} {text}")

    def wall_ms(self) -> int:
        """Return the wall clock, which jumps."""
        return EPOCH_MS + self.clock.now_us // 1_000 + self._wall_offset_ms

    def new_id(self) -> UUID:
        """Return an id that no other run has."""
        return UUID(int=self.clock.random.getrandbits(128))

    def run(self, steps: int = STEPS) -> None:
        """Run so many steps, then let everything recover, and check that it has."""
        clock, scenario = self.clock, self.scenario
        self.trace("world", str(scenario))
        for _ in range(scenario.topics):
            self._create_topic(f"t{self._topic_count}")
        for node in self.nodes:
            node.start()
            self._open_all(node)
        if scenario.capacity:
            for node in self.nodes:
                node.disk.ballast = max(node.disk.free() - FREE_BYTES, 0)
        self.pass_time(10 * MS)
        self.settle_roles()
        names, weights = list(scenario.weights), list(scenario.weights.values())
        for number in range(scenario.history):
            self._step("tick" if number % 10 == 9 else "produce")
        if scenario.history:
            self.settle_roles()
            for node in self.nodes:
                self.stop_node(node)
                self.start_node(node)
        for _ in range(steps):
            self._step(clock.random.choices(names, weights)[0])
        recover(self)

    def _step(self, name: str) -> None:
        clock = self.clock
        self._steps[name]()
        self.pass_time(clock.between(*IDLE_US))
        self.pulse()
        if clock.chance(0.06):
            self._check_one()
        for node in self.nodes:
            if not node.is_up:
                if clock.chance(0.3):
                    self.start_node(node)
            else:
                node.check_open_files()
                if clock.chance(0.08) and self.needs_restart(node):
                    (self.stop_node if clock.chance(0.5) else StorageNode.kill)(node)

    def pass_time(self, duration_us: int) -> None:
        """Let time pass, and happen what is due."""
        clock, is_over = self.clock, []
        clock.after(duration_us, lambda: is_over.append(True))
        before_ms = clock.now_us // 1_000
        while not is_over:
            clock.step()
        self._note_time(clock.now_us // 1_000 - before_ms)

    def _note_time(self, ahead_ms: int) -> None:
        self.ahead_ms += ahead_ms
        for account in self.accounts.values():
            account.ahead_ms = self.ahead_ms

    def write_before_the_end(self) -> None:
        """Give retention something to do, at times with a clock that was set back."""
        clock = self.clock
        if self.scenario.weights["jump"] and clock.chance(0.4):
            self.trace("world", "the clock jumps by -1 hours")
            self._wall_offset_ms -= 3_600_000
        for _ in range(4):
            for account in list(self.accounts.values()):
                self.produce(account)
            self.pass_time(clock.between(*IDLE_US))
            self.pulse()

    # ── lives of the nodes ───────────────────────────────────────────────────────────────────────────────────────

    def start_node(self, node: StorageNode) -> None:
        if not self.are_faults_over and self.clock.chance(0.1):
            node.disk.fuse = self.clock.between(0, 60)
        node.start()
        node.disk.fuse = None
        if not node.is_up:
            return
        self._open_all(node)
        if self.clock.chance(0.5) or self.are_faults_over:
            self.check_node(node)

    def _open_all(self, node: StorageNode) -> None:
        for log in list(node.store.partitions.values()):
            self._opened(node, log, at_start=True)

    def _opened(self, node: StorageNode, log: PartitionLog, *, at_start: bool) -> None:
        """A node has a partition: from before, or a new one."""
        account = self.accounts.get(log.key)
        if account is None:
            return
        if at_start:
            account.check_start(node.number, log)
        seen = self._seen[node.number]
        if log.key not in seen:
            if log.is_unclean and log.failure is None and self.created[log.key] > node.joined_version:
                raise Violation(
                    "new partitions can be led", f"{log.name} is new, and node {node.number} takes it for lost"
                )
            seen.add(log.key)
        if log.is_unclean and not self.scenario.is_alone:
            account.held[node.number].is_in_sync = False

    def ended(self, node: StorageNode, *, is_clean: bool) -> None:
        """A life has ended, cleanly or not."""
        for account in self.accounts.values():
            for held in account.held:
                held.is_streaming = False
            log = node.store.partitions.get((account.topic, account.index))
            if is_clean and log is not None and log.key == (account.topic_id, account.index):
                held = account.held[node.number]
                if log.failure is None and not log.is_held:
                    held.start_durable = max(held.start_durable, log.log_start)

    def stop_node(self, node: StorageNode) -> None:
        if node.is_up:
            self._check_bounds(node)
            node.stop()

    def needs_restart(self, node: StorageNode) -> bool:
        """Some errors last until the node is restarted: those of a disk that does not read or write."""
        for log in node.store.partitions.values():
            if log.failure is not None:
                return True
            if log.write_error is not None and not isinstance(log.write_error, (DiskFull, OutOfFiles)):
                if node.disk.met <= {errno.EMFILE, errno.ENOSPC}:
                    raise Violation("writes resume", f"{log!r} waits for a restart: {log.write_error}")
                return True
        return False

    def _up(self) -> StorageNode | None:
        nodes = [node for node in self.nodes if node.is_up]
        return self.clock.random.choice(nodes) if nodes else None

    def _restart(self) -> None:
        """Restart a node cleanly, at times after a short life that voids batches, or with a loss of power soon after.

        The first records after a start are written over those of the last life.
        """
        node, chance = self._up(), self.clock.chance
        if node is None:
            return
        lives = 2 if chance(0.3) else 1
        for life in range(lives):
            self.stop_node(node)
            if not node.is_up:
                self.start_node(node)
            if life == 0 and lives == 1 and chance(0.5):
                return
            for _ in range(self.clock.between(1, 4)):
                self._produce_somewhere()
                self.pass_time(self.clock.between(*IDLE_US))
                self.pulse()
            if life + 1 < lives:
                self._meet_full_disk()
                self.pass_time(30 * MS)
                self.pulse()
        if node.is_up:
            (node.kill if chance(0.3) else node.lose_power)()

    def _kill(self) -> None:
        if (node := self._up()) is not None:
            node.kill()

    def _lose_power(self) -> None:
        if (node := self._up()) is not None:
            node.lose_power()

    def _arm_fuse(self) -> None:
        if (node := self._up()) is not None:
            node.disk.fuse = self.clock.between(0, 40)

    def _fail(self) -> None:
        """Let one operation of a disk fail, soon."""
        clock, node = self.clock, self._up()
        if node is not None and node.disk.fail_after is None:
            operation = clock.random.choice(sorted(ERRORS)) if clock.chance(0.8) else ""
            errors = sorted(ERRORS[operation] if operation else ERRORS["create"])
            node.disk.fail_only, node.disk.fail_errno = operation, clock.random.choice(errors)
            node.disk.fail_after = clock.between(0, 6)
            self.trace(node.name, f"will fail: {operation or 'anything'}, errno {node.disk.fail_errno}")

    def _meet_full_disk(self) -> None:
        """Let a disk be full, or open no file, for one write, while compaction and DeleteRecords are under way."""
        clock, account = self.clock, self._account()
        if account is None or (led := self.led(account)) is None:
            return
        node = led[0]
        if clock.chance(0.7):
            self._compact()
        number, operations = clock.random.choice(
            ((errno.ENOSPC, ("write", "create", "sync")), (errno.EMFILE, ("open", "create")))
        )
        node.disk.fail_errno, node.disk.fail_only = number, clock.random.choice(operations)
        node.disk.fail_after = clock.between(0, 1)
        self.trace(node.name, f"meets errno {number} once, at {node.disk.fail_only}")
        for _ in range(2):
            self.produce(account)
            self.pass_time(clock.between(1 * MS, 10 * MS))
        self.tick()
        if clock.chance(0.6):
            self.pass_time(clock.between(0, 5 * MS))
            self.delete_records_of(account)

    def _jump(self) -> None:
        """Set the wall clock."""
        hours = self.clock.random.choice((1, -1, 25, -25))
        self.trace("world", f"the clock jumps by {hours} hours")
        self._wall_offset_ms += hours * 3_600_000
        self._note_time(max(hours, 0) * 3_600_000)

    def _slow_jobs(self) -> None:
        if (node := self._up()) is not None:
            is_slow = node.pace.job_us[1] > 10 * MS
            node.pace.job_us = (100, 5_000) if is_slow else (50 * MS, 400 * MS)

    def _wait(self) -> None:
        """Let more time pass: mostly seconds, at times hours."""
        clock = self.clock
        duration_us = clock.between(100 * MS, 5 * SECOND)
        if clock.chance(0.2):
            duration_us = clock.between(20 * SECOND, 600 * SECOND)
        elif clock.chance(0.05):
            duration_us = clock.between(HOUR_US, 8 * HOUR_US)
        self.pass_time(duration_us)
        self.tick()

    def _wipe(self) -> None:
        """Put a new disk into a machine, after the other one has become the leader of everything."""
        accounts = list(self.accounts.values())
        node = self.clock.random.choice(self.nodes)
        for account in accounts:
            if account.leader == node.number and not self.replication.make_leader(account, 1 - node.number):
                return
        if node.is_up:
            node.kill()
        self.trace(node.name, "gets a new disk")
        node.disk.wipe()
        self._seen[node.number].clear()
        for account in accounts:
            account.held[node.number] = Held()

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _config(self) -> dict[str, str]:
        clock = self.clock
        pick = clock.random.choice
        config = {
            "cleanup.policy": pick(("delete", "compact", "compact", "compact,delete")),
            "segment.bytes": pick(("1024", "1024", "1500", "4000")),
            "min.cleanable.dirty.ratio": pick(("0.0", "0.0", "0.3")),
            "delete.retention.ms": pick(("0", "10000", "3600000")),
        }
        if self.scenario.capacity:
            config["segment.bytes"] = pick(("16384", "32768"))
        if clock.chance(0.3):
            config["retention.ms"] = pick(("30000", "600000", "7200000"))
        if clock.chance(0.3):
            config["retention.bytes"] = pick(("2000", "6000"))
        if clock.chance(0.3):
            config["segment.ms"] = pick(("1000", "20000", "600000"))
        if clock.chance(0.2):
            config["message.timestamp.type"] = "LogAppendTime"
        return config

    def change_topics(self, topics: dict[str, Topic]) -> None:
        """Have another catalogue: the nodes take it over as soon as they can."""
        self.version += 1
        self.topics = topics
        for topic in topics.values():
            for index in range(topic.partitions):
                key = (topic.id, index)
                if key not in self.accounts:
                    account = Account(topic.name, topic.id, index)
                    account.ahead_ms = self.ahead_ms
                    account.clients = [Client(1_000 + 10 * len(self.created) + n) for n in range(3)]
                    self.accounts[key] = account
                    self.created[key] = self.version
                    account.leader = self.clock.between(0, 1) if len(self.nodes) > 1 and self._is_spread() else 0
                self._apply_config(self.accounts[key], topic)
        ids = {topic.id for topic in topics.values()}
        self.accounts = {key: account for key, account in self.accounts.items() if key[0] in ids}
        for node in self.nodes:
            self._take_catalogue(node)

    def _is_spread(self) -> bool:
        return self.scenario.weights["wipe"] == 0

    @staticmethod
    def _apply_config(account: Account, topic: Topic) -> None:
        config = topic.config
        account.was_compacted |= "compact" in config["cleanup.policy"]
        account.delete_retention_ms = min(account.delete_retention_ms, int(config["delete.retention.ms"]))
        if "delete" in config["cleanup.policy"]:
            account.retention_ms = min(account.retention_ms, int(config.get("retention.ms", 7 * 24 * 3_600_000)))
            account.has_size_limit |= "retention.bytes" in config

    def _take_catalogue(self, node: StorageNode) -> None:
        if not node.is_up or node.store.catalogue.version >= self.version:
            return
        store = node.store

        def plan() -> Change | None:
            if store.catalogue.version >= self.version:
                return None
            return store.catalogue.take_over(self.version, self.topics.values())

        def taken(_: Change | None, error: Exception | None) -> None:
            if error is None and node.store is store and node.is_up:
                for log in list(store.partitions.values()):
                    if log.key not in self._seen[node.number]:
                        self._opened(node, log, at_start=False)

        def take() -> None:
            if not self.scenario.is_catalogue_blocking:
                store.changes.submit(plan, taken)
                return
            try:
                store.take_over(self.version, list(self.topics.values()))
            except WalstreamError as error:
                self.trace(node.name, f"cannot take the catalogue over: {error}")
            else:
                taken(None, None)

        node.run(take)

    def _create_topic(self, name: str) -> None:
        self._topic_count += 1
        replicas = [] if self.scenario.is_alone else [0, 1]
        topic = Topic(name, self.new_id(), self.clock.between(1, 2), self._config(), replicas, self.version + 1)
        self.trace("world", f"creates {name}: {topic.partitions} partitions, {topic.config}")
        self.change_topics({**self.topics, name: topic})

    def _some_topic(self) -> Topic | None:
        return self.clock.random.choice(list(self.topics.values())) if self.topics else None

    def _recreate_topic(self) -> None:
        """Delete a topic while its background jobs are queued, and create another one under its name."""
        clock, topic = self.clock, self._some_topic()
        if topic is None:
            return
        if clock.chance(0.6):
            account = self.accounts[topic.id, 0]
            self.delete_records_of(account)
            if clock.chance(0.5):
                self.pass_time(clock.between(*IDLE_US))
        self.trace("world", f"deletes {topic.name}")
        self.change_topics({name: other for name, other in self.topics.items() if name != topic.name})
        if clock.chance(0.4):
            self.pass_time(clock.between(*IDLE_US))
        self._create_topic(topic.name)
        self.pulse()
        for _ in range(3):
            self.produce(self.accounts[self.topics[topic.name].id, 0])
            self.pass_time(clock.between(*IDLE_US))
            self.pulse()

    def _grow_topic(self) -> None:
        """Give a topic one more partition, as the leader's catalogue plans it."""
        topic = self._some_topic()
        node = next((node for node in self.nodes if node.is_up), None)
        if topic is None or node is None or topic.partitions > 2 or node.store.catalogue.version != self.version:
            return
        self.trace("world", f"grows {topic.name}")
        self.change_topics(node.store.catalogue.grow(topic.name, topic.partitions + 1).topics)

    def _configure(self) -> None:
        topic = self._some_topic()
        node = next((node for node in self.nodes if node.is_up), None)
        if topic is not None and node is not None and node.store.catalogue.version == self.version:
            config = {**topic.config, **self._config()}
            self.trace("world", f"configures {topic.name}: {config}")
            self.change_topics(node.store.catalogue.configure(topic.name, config).topics)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _account(self) -> Account | None:
        return self.clock.random.choice(list(self.accounts.values())) if self.accounts else None

    def led(self, account: Account) -> tuple[StorageNode, PartitionLog] | None:
        """Return where a partition can be written to."""
        node = self.nodes[account.leader]
        log = node.log_of((account.topic_id, account.index))
        if log is None or not log.is_leader or log.is_held or log.write_error is not None:
            return None
        if not self.scenario.is_alone and node.roles.get(log.key) != account.epoch:
            return None
        self.agree_on_end(account, log)
        return node, log

    def agree_on_end(self, account: Account, log: PartitionLog) -> None:
        """A log that was opened again, by a start or after a full disk, has lost what was not promised."""
        if log.log_end < account.end:
            account.truncate(log.log_end, "after it was opened again")
        elif log.log_end > account.end:
            raise Violation("truncated records come back", f"{log!r} should end at {account.end}")

    def _produce_somewhere(self) -> None:
        if (account := self._account()) is not None:
            for _ in range(self.clock.between(1, 5)):
                self.produce(account)

    def produce(self, account: Account) -> bool:
        """Append a batch; return whether the log has taken it."""
        if (led := self.led(account)) is None:
            return False
        node, log = led
        talking = [client for client in account.clients if not client.is_silent]
        client = self.clock.random.choice(talking) if talking and self.clock.chance(0.6) else None
        accepted: list[Sent] = []
        node.run(partial(self._append, node, account, log, client, accepted))
        return bool(accepted)

    def _records(self, account: Account) -> list[Record]:
        clock = self.clock
        records: list[Record] = []
        for _ in range(1 if self.scenario.has_fixed_sizes else clock.between(1, 3)):
            self._values += 1
            value = f"{account.topic_id.hex[-6:]}/{account.index}/{self._values:06d}".encode()
            if self.scenario.capacity:
                value += b"." * clock.between(2_000, 8_000)
            elif not self.scenario.has_fixed_sizes:
                value += b"." * clock.between(0, 60)
            key = f"k{clock.between(0, self.scenario.keys)}".encode()
            is_tombstone = not self.scenario.has_fixed_sizes and clock.chance(0.15)
            records.append((key, None if is_tombstone else value))
        return records

    def _append(
        self, node: StorageNode, account: Account, log: PartitionLog, client: Client | None, accepted: list[Sent]
    ) -> None:
        records, now_ms = self._records(account), self.wall_ms()
        batch = encode(records, now_ms, client)
        try:
            appended = log.append(memoryview(batch), now_ms=now_ms)
        except OutOfOrderSequence as error:
            raise Violation("exactly once", f"{log.name} refuses what is next: {error}") from error
        except WalstreamError as error:
            self.trace(f"n{account.leader}", f"{log.name} refuses a batch: {error}")
            return
        header = parse_header(batch)
        if appended.base_offset != account.end or header.base_offset != account.end:
            raise Violation(
                "exactly once" if appended.base_offset < account.end else "offset reuse",
                f"{log.name} has appended a batch at {appended.base_offset}, where the log ends at {account.end}",
            )
        sent = account.appended(header, records, self.ahead_ms, now_ms)
        if client is not None:
            client.sequence += len(records)
            client.batches.append(sent)
            client.seen_ms = self.clock.now_us // 1_000
            client.is_silent = self.clock.chance(0.12)
        if node.disk.failures == node.failures_before:  # Where a start cannot read, it does not know the age.
            account.check_age(log, header)
        accepted.append(sent)

    def _retry_somewhere(self) -> None:
        account = self._account()
        if account is None or (led := self.led(account)) is None:
            return
        clients = [client for client in account.clients if client.batches]
        if clients:
            client = self.clock.random.choice(clients)
            is_last = self.clock.chance(0.7) or len(client.batches) < 2
            number = 1 if is_last else self.clock.between(2, min(5, len(client.batches)))
            node, log = led
            node.run(partial(self._retry, account, log, client, number))

    def _retry_last(self, account: Account, client: Client) -> None:
        if client.batches and (led := self.led(account)) is not None:
            led[0].run(partial(self._retry, account, led[1], client, 1))

    def _retry(self, account: Account, log: PartitionLog, client: Client, number: int) -> None:
        """Send a batch again that is in the log: it is answered with its offset, and not appended."""
        sent = client.batches[-number]
        silent_ms = self.clock.now_us // 1_000 - client.seen_ms
        is_harmed = any(account.held[account.leader].harmed)
        if sent.base < max(log.log_start, account.start) or silent_ms > SAFE_SILENCE_MS or is_harmed:
            return  # It may be forgotten by now.
        batch = encode(list(sent.records), self.wall_ms(), client, sent)
        try:
            appended = log.append(memoryview(batch), now_ms=self.wall_ms())
        except OutOfOrderSequence as error:
            if number == 1:
                raise Violation("exactly once", f"{log.name} refuses a retry of {sent.base}: {error}") from error
            return  # A replica that has copied a compacted log knows the last batch only.
        except WalstreamError:
            return
        if appended.base_offset != sent.base:
            raise Violation(
                "exactly once", f"{log.name}: a retry of {sent.base} was appended at {appended.base_offset}"
            )
        client.seen_ms = self.clock.now_us // 1_000
        client.is_silent = client.is_silent and self.clock.chance(0.8)

    # ── keeping house ────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        for node in self.nodes:
            if node.is_up:
                node.run(node.store.tick)

    def _checkpoint(self) -> None:
        if (node := self._up()) is not None:
            node.run(partial(node.store.save_checkpoint, lambda _: None))

    def _compact(self) -> None:
        for node in self.nodes:
            if node.is_up:
                node.run(node.store.compact)

    def _delete_records(self) -> None:
        if (account := self._account()) is not None:
            self.delete_records_of(account)

    def delete_records_of(self, account: Account) -> None:
        node = self.nodes[account.leader]
        log = node.log_of((account.topic_id, account.index))
        if log is None or not log.is_leader or log.failure is not None or log.high_watermark <= log.log_start:
            return
        offset = self.clock.between(log.log_start, log.high_watermark)
        account.deleted_to = max(account.deleted_to, offset)
        held, life = account.held[node.number], node.lives

        def deleted(error: Exception | None) -> None:
            if error is None and node.lives == life and account.held[node.number] is held:
                held.start_durable = max(held.start_durable, offset)
            elif error is not None and self.scenario.capacity and not node.disk.met and node.lives == life:
                raise Violation("a full disk can be freed", f"DeleteRecords of {log!r} fails: {error}")

        self.trace(node.name, f"DeleteRecords of {log.name} up to {offset}")
        node.run(partial(node.store.delete_records, log, offset, deleted))

    def _free(self) -> None:
        """Free a full disk by what a node offers: less retention, DeleteRecords, or DeleteTopics."""
        node = self.nodes[0]
        if not node.is_up or not node.store.is_full or node.store.catalogue.version != self.version:
            return
        if self.clock.chance(0.3):
            self._recreate_topic()
        elif self.clock.chance(0.5):
            self._delete_records()
        elif (topic := self._some_topic()) is not None:
            config = {**topic.config, "cleanup.policy": "delete", "retention.bytes": "2000"}
            self.trace("world", f"lowers the retention of {topic.name}")
            self.change_topics(node.store.catalogue.configure(topic.name, config).topics)

    # ── replication, as far as the log takes part in it ──────────────────────────────────────────────────────────

    def _toggle_copying(self) -> None:
        self.is_copying = not self.is_copying

    def _toggle_commits(self) -> None:
        self.is_committing = not self.is_committing or self.clock.chance(0.5)

    def pulse(self) -> None:
        """Give roles, copy, raise the high watermark, and look at what the logs show of themselves."""
        for node in self.nodes:
            self._take_catalogue(node)
        for account in list(self.accounts.values()):
            if not self.scenario.is_alone:
                self.replication.give_roles(account)
                if self.is_copying:
                    self.replication.copy(account)
            self.replication.commit(account)
        for node in self.nodes:
            self._check_bounds(node)

    def _promote(self) -> None:
        """Let the follower lead; at times producers then send their last batches again, as they do after a timeout."""
        account = self._account()
        if account is None or not self.replication.make_leader(account, 1 - account.leader):
            return
        if self.clock.chance(0.6):
            for _ in range(4):
                self.pass_time(5 * MS)
                self.pulse()
            for client in account.clients:
                self._retry_last(account, client)

    def settle_roles(self) -> None:
        for _ in range(10):
            self.pulse()
            self.pass_time(10 * MS)

    # ── harm ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _harm(self) -> None:
        """Take files away while a node is down, after a clean stop: a replica's, or those of the only copy."""
        clock, node = self.clock, self.nodes[-1]
        accounts = [account for account in self.accounts.values() if account.leader == node.number]
        if not node.is_up or (not self.scenario.is_alone and accounts):
            return
        node.disk.fail_after = node.disk.fuse = None
        logs = [log for log in node.store.partitions.values() if log.key in self.accounts]
        if not logs or self.needs_restart(node):
            return
        log = clock.random.choice(logs)
        self.stop_node(node)
        account = self.accounts[log.key]
        if log.is_held or log.write_error is not None or log.damaged or log.failure is not None:
            return
        held, segments = account.held[node.number], log.segments
        if held.harmed or held.foreign_from != NOTHING_FOREIGN or log.log_end != log.durable_end:
            return
        names = [segment.path for segment in segments if segment.size]
        if clock.chance(0.5) and len(segments) > 1 and names:
            count = clock.between(1, len(segments) - 1)
            lost = (max(log.log_start, segments[0].base_offset), segments[count].base_offset)
            for segment in segments[:count]:
                node.disk.remove(segment.path)
        else:
            last = segments[-1]
            if not last.size:
                return
            headers = list(last.headers())
            position, header = clock.random.choice(headers)
            lost = (max(header.base_offset, log.log_start), log.log_end)
            node.disk.open(last.path).truncate(position)
        if lost[0] >= lost[1]:
            lost = (lost[1], lost[1])
        else:
            held.harmed.append(lost)
            if not self.scenario.is_alone:
                held.durable = min(held.durable, lost[0])
        for inode in [inode for _, inode in node.disk.files()]:
            inode.sync()
        node.disk.sync_directory(log.folder)
        self.trace(node.name, f"{log!r} loses {lost[0]} to {lost[1]}")
        self._start_harmed(node, account, log, lost)

    def _start_harmed(self, node: StorageNode, account: Account, before: PartitionLog, lost: tuple[int, int]) -> None:
        """Start a node whose files were taken away: it reports that, or lacks nothing, as the journal had it."""
        node.start()
        log = node.log_of(before.key)
        if log is None:
            return
        self._open_all(node)
        held = account.held[node.number]
        if self.scenario.is_alone and log.failure is None and log.log_end < before.log_end:
            raise Violation("offset reuse", f"{log!r} continues below {before.log_end}, and all below was acknowledged")
        if held.harmed and not (log.damaged or log.failure or (node.store.damage_reports and log.is_unclean)):
            held.harmed.clear()
            try:
                if log.log_start > before.log_start or log.log_end < before.log_end:
                    raise Violation("durability", f"{log!r} was {before!r}")
                self._check_content(node, account, log)
            except Violation as violation:
                raise Violation(
                    "damage is reported",
                    f"node {node.number} does not report that {lost[0]} to {lost[1]} are lost: {violation}",
                ) from violation
        self.check_node(node)

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _calm(self, node: StorageNode) -> Iterator[None]:
        """Let no fault happen while the world looks at a node."""
        disk = node.disk
        before = disk.fail_after, disk.fuse, disk.cold_probability
        disk.fail_after = disk.fuse = None
        try:
            yield
        finally:
            disk.fail_after, disk.fuse, disk.cold_probability = before

    def logs(self, node: StorageNode) -> list[tuple[Account, PartitionLog]]:
        if not node.is_up:
            return []
        logs = node.store.partitions.values()
        return [(self.accounts[log.key], log) for log in logs if log.key in self.accounts]

    def _check_bounds(self, node: StorageNode) -> None:
        for account, log in self.logs(node):
            account.check_bounds(node.number, log)

    def _check_one(self) -> None:
        node = self._up()
        if node is not None and (logs := self.logs(node)):
            account, log = self.clock.random.choice(logs)
            self._check_content(node, account, log)

    def check_node(self, node: StorageNode) -> None:
        for account, log in self.logs(node):
            self._check_content(node, account, log)

    def _check_content(self, node: StorageNode, account: Account, log: PartitionLog) -> None:
        with self._calm(node):
            try:
                account.check_content(node.number, log)
            except (WalstreamError, OSError) as error:
                raise Violation("committed segments stay readable", f"{log!r}: {error}") from error
