"""The end of a storage run: the faults are over, and whatever was promised "by itself" has to happen now.

Nodes start, disks are freed by retention, partitions take writes again, the replica catches up, and what retention and
DeleteRecords have dropped is gone from the disk. Then both nodes are restarted cleanly and read back once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from walstream.errors import DiskFull, OutOfFiles
from walstream.log.folders import topic_folder
from walstream.log.partition_log import PartitionLog
from walstream.log.settings import UNLIMITED
from walstream.sim.checkers import Violation
from walstream.sim.clock import MS, SECOND
from walstream.sim.storage_model import Account
from walstream.sim.storage_node import FOLDER, StorageNode

if TYPE_CHECKING:
    from walstream.sim.storage import StorageWorld

ROUNDS = 12
"""Ticks until what is due from time to time has happened."""

ROUND_US = 3 * SECOND
FETCHES = 10
"""In each of them."""

TRIES = 5
"""For a batch at the end."""

CHANGES_MAX = 20
"""Seconds until a change of the catalogue must have been taken over."""

PULSES_MAX = 200
"""Fetches until a replica must have caught up."""


def recover(world: StorageWorld) -> None:
    """Let everything recover, and check that it has."""
    world.write_before_the_end()
    world.trace("world", "faults stop")
    world.are_faults_over = world.is_copying = world.is_committing = True
    for node in world.nodes:
        node.disk.fail_after = node.disk.fuse = None
        node.pace.job_us = (100, 5_000)
        if not node.is_up:
            world.start_node(node)
    if world.scenario.capacity:
        _lower_retention(world)
    _let_pass(world)
    if world.scenario.capacity and not world.scenario.is_alone:
        _delete_topics(world)
    for node in world.nodes:
        for _, log in world.logs(node):
            if isinstance(log.write_error, (DiskFull, OutOfFiles)):
                raise Violation("writes resume", f"{log!r} on node {node.number}: {log.write_error}")
        if world.needs_restart(node):
            world.stop_node(node)
            world.start_node(node)
            if world.needs_restart(node):
                errors = [str(log.failure or log.write_error) for _, log in world.logs(node)]
                raise Violation("writes resume", f"node {node.number} was restarted: {errors}")
    _catch_up(world)
    _let_pass(world)
    for node in world.nodes:
        world.check_node(node)
        for account, log in world.logs(node):
            if log.is_leader:
                _check_retention(world, account, log)
            _check_files(world, node, log)
    _write(world)
    for node in world.nodes:
        world.stop_node(node)
        world.start_node(node)
        _check_folders(world, node)
    _catch_up(world)
    _write(world)
    for node in world.nodes:
        world.check_node(node)


def _let_pass(world: StorageWorld) -> None:
    for _ in range(ROUNDS):
        world.tick()
        world.pass_time(ROUND_US)
        for _ in range(FETCHES):
            world.pulse()
            world.pass_time(10 * MS)


def _lower_retention(world: StorageWorld) -> None:
    """Free disks by the means that a node offers."""
    catalogue = world.nodes[0].store.catalogue
    for topic in list(world.topics.values()):
        config = {**topic.config, "cleanup.policy": "delete", "retention.bytes": "2000"}
        for _ in range(CHANGES_MAX):
            if catalogue.version == world.version:
                break  # A change that was made just before the faults ended may still be on its way to the disk.
            world.pass_time(SECOND)
            world.tick()
            world.pulse()
        else:
            raise Violation("a full disk can be freed", f"{topic.name} cannot be changed: {catalogue.version}")
        world.change_topics(catalogue.configure(topic.name, config).topics)
        world.pass_time(SECOND)
        world.pulse()


def _delete_topics(world: StorageWorld) -> None:
    """Free disks further: what is above the high watermark, and a follower that is full, retention does not reach."""
    full = {
        account.topic
        for node in world.nodes
        for account, log in world.logs(node)
        if isinstance(log.write_error, DiskFull)
    }
    if full:
        world.change_topics({name: topic for name, topic in world.topics.items() if name not in full})
        _let_pass(world)


def _catch_up(world: StorageWorld) -> None:
    """Let followers fetch until they have everything, and all of it is committed."""
    for number in range(PULSES_MAX):
        world.pulse()
        world.pass_time(10 * MS)
        if number % 20 == 19:
            world.tick()
        behind = [text for account in world.accounts.values() if (text := _lacks(world, account))]
        if not behind:
            return
    raise Violation("replica catches up", "; ".join(behind))


def _lacks(world: StorageWorld, account: Account) -> str:
    """Return what a partition is missing; empty if all nodes have all of it."""
    logs = [node.log_of((account.topic_id, account.index)) for node in world.nodes]
    led = world.led(account)
    if led is None:
        return f"{account.name} is not led: {logs}"
    if any(log is None or log.log_end != account.end or log.durable_end != account.end for log in logs):
        return f"{account.name} ends at {account.end}: {logs}"
    return "" if account.high_watermark == account.end else f"{account.name} is committed to {account.high_watermark}"


def _write(world: StorageWorld) -> None:
    for account in list(world.accounts.values()):
        for _ in range(TRIES):
            if world.produce(account):
                break
            world.pass_time(100 * MS)  # Append times may have to be reserved first, as after a step of the clock.
            world.pulse()
        else:
            raise Violation("writes resume", f"{account.name} takes no batch at the end")
    _catch_up(world)


def _check_retention(world: StorageWorld, account: Account, log: PartitionLog) -> None:
    """A segment that no setting keeps is dropped, whatever the wall clock has done."""
    settings, segments = log.settings, log.segments
    if not settings.deleted or len(segments) < 2 or segments[1].base_offset > log.high_watermark or log.damaged:
        return
    sizes = [segment.size for segment in segments]
    if settings.retention_bytes != UNLIMITED and sum(sizes[1:]) >= settings.retention_bytes:
        raise Violation("housekeeping keeps running", f"{log!r} has {sizes} bytes: {settings.retention_bytes} are kept")
    if settings.retention_ms == UNLIMITED:
        return
    if account.was_compacted and segments[0].index.max_timestamp < 0:
        return  # Only headers of producers are left in it: it is as old as its file.
    limit_ms = world.wall_ms() - settings.retention_ms - 2 * ROUNDS * ROUND_US // 1_000
    first = [sent for sent in account.batches if segments[0].base_offset <= sent.base < segments[1].base_offset]
    if first and all(sent.timestamp_ms < limit_ms for sent in first):
        raise Violation("housekeeping keeps running", f"{log!r} keeps a segment whose records are too old")


def _check_files(world: StorageWorld, node: StorageNode, log: PartitionLog) -> None:
    """The disk holds the segments of a log, and nothing that was dropped or was to replace them."""
    while not node.driver.is_idle:
        world.pass_time(10 * MS)
    known = {segment.path.name for segment in log.segments}
    names = [name for name in node.disk.list(log.folder) if name.endswith((".log", ".clean", ".swap"))]
    if left := [name for name in names if name not in known]:
        raise Violation("retention frees the disk", f"{log!r} on node {node.number}: {left} are left")


def _check_folders(world: StorageWorld, node: StorageNode) -> None:
    known = {topic_folder(topic) for topic in world.topics.values()}
    left = [name for name in node.disk.list(FOLDER / "topics") if name not in known]
    if left or node.disk.list(FOLDER / "trash"):
        raise Violation("retention frees the disk", f"node {node.number} has folders of deleted topics: {left}")
