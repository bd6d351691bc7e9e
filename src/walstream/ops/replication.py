"""The state of replication on one node, as one plain document: for health, for metrics and for `walstream status`.

Reads what cores and links know and changes nothing. How far a follower is behind is the leader's to say: in records
exactly, in bytes as nearly as offsets tell without reading, in seconds since it was last at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from walstream.replication.follower import Follower
from walstream.replication.leader import Leader
from walstream.replication.wire.follower_link import FollowerLink
from walstream.replication.wire.leader_link import LeaderLink

if TYPE_CHECKING:
    from walstream.log.partition_log import PartitionLog
    from walstream.node.driver import Replica
    from walstream.node.peer_links import PeerLink
    from walstream.node.replicas import Replicas

DETAILS_MAX = 100
"""Partitions that are named; with more the counts say enough."""


class Lagging(NamedTuple):
    """One follower of one partition that this node leads."""

    topic: str
    partition: int
    follower: int
    is_in_sync: bool
    is_streaming: bool
    records: int
    """-1 while the follower has not said where it is."""
    size_bytes: int
    seconds: float


def followers(replicas: Replicas) -> list[Lagging]:
    """Return every follower of every partition that this node leads."""
    found: list[Lagging] = []
    now_ms = replicas.clock_ms()
    for replica in replicas.replicas.values():
        leader = replica.manager.role
        if not isinstance(leader, Leader):
            continue
        log = replica.partition
        in_sync = leader.isr.state.isr_nodes
        for session in leader.sessions.values():
            end = session.lag.end
            is_behind = end is None or end < log.log_end
            found.append(
                Lagging(
                    log.topic,
                    log.index,
                    session.node,
                    session.node in in_sync,
                    session.is_streaming,
                    -1 if end is None else log.log_end - end,
                    bytes_after(log, log.log_start if end is None else end),
                    max(now_ms - session.lag.caught_up_ms, 0) / 1000 if is_behind else 0.0,
                )
            )
    return found


def bytes_after(log: PartitionLog, offset: int) -> int:
    """Return about how many bytes of the log lie at and after an offset, from the sizes of its segments alone."""
    segments = log.segments
    total = 0
    end = log.log_end
    for segment in reversed(segments):
        if segment.base_offset >= offset:
            total += segment.size
        elif end > offset:
            total += segment.size * (end - offset) // max(end - segment.base_offset, 1)
            break
        end = segment.base_offset
    return total


def links(replicas: Replicas) -> list[dict[str, Any]]:
    """Return every link there is or should be."""
    found = [_link(link) for link in (*replicas.links.outgoing.values(), *replicas.links.incoming.values())]
    for peer, reason in replicas.links.failures.items():
        found.append({"peer": peer, "direction": "outgoing", "state": "down", "reason": reason})
    return sorted(found, key=lambda one: (one["peer"], one["direction"]))


def _link(link: PeerLink) -> dict[str, Any]:
    assert link.peer is not None
    document: dict[str, Any] = {
        "peer": link.peer.node_id,
        "direction": "outgoing" if link.is_outgoing else "incoming",
        "state": "up",
        "address": link.address,
        "protocol_version": link.peer.version,
        "incarnation": link.peer.incarnation,
        "sent_bytes": link.sent_bytes,
        "unsent_bytes": link.line.unsent_bytes if link.line is not None else 0,
        "round_trip_ms": link.link.round_trip_ms,
    }
    if isinstance(link.link, LeaderLink):
        document["credit_bytes"] = link.link.credit.available_bytes
        document["waiting_partitions"] = link.waiting
    elif isinstance(link.link, FollowerLink):
        document["held_bytes"] = link.link.credit.held_bytes
    return document


def is_under_replicated(replica: Replica) -> bool:
    """Say whether a partition that this node leads has a replica that is not in sync."""
    leader = replica.manager.role
    return isinstance(leader, Leader) and len(leader.isr.state.isr) < len(leader.isr.state.replicas)


def is_below_min_isr(replica: Replica) -> bool:
    """Say whether a partition that this node leads takes no acks=all."""
    leader = replica.manager.role
    return isinstance(leader, Leader) and not leader.can_commit


def is_leaderless(replica: Replica) -> bool:
    """Say whether this node should lead the partition and does not."""
    state = replica.manager.state
    is_mine = state is not None and replica.node_id in (state.leader, state.last_leader)
    return is_mine and not replica.partition.is_leader


def document(replicas: Replicas) -> dict[str, Any]:
    """Return all of it."""
    all_replicas = list(replicas.replicas.values())
    lagging = followers(replicas)
    under = [replica.partition.name for replica in all_replicas if is_under_replicated(replica)]
    below = [replica.partition.name for replica in all_replicas if is_below_min_isr(replica)]
    leaderless = [replica.partition.name for replica in all_replicas if is_leaderless(replica)]
    catalogue = replicas.store.catalogue
    return {
        "node_id": replicas.node_id,
        "cluster_id": catalogue.cluster_id or None,
        "controller_id": replicas.config.controller,
        "incarnation": replicas.metadata.incarnation,
        "mode": replicas.config.mode,
        "partitions_led": sum(replica.partition.is_leader for replica in all_replicas),
        "partitions_under_replicated": len(under),
        "partitions_below_min_isr": len(below),
        "partitions_leaderless": len(leaderless),
        "partitions_quarantined": sum(bool(replica.quarantined) for replica in all_replicas),
        "under_replicated": under[:DETAILS_MAX],
        "below_min_isr": below[:DETAILS_MAX],
        "leaderless": leaderless[:DETAILS_MAX],
        "quarantined": [
            {"partition": replica.partition.name, "reason": replica.quarantined}
            for replica in all_replicas
            if replica.quarantined
        ][:DETAILS_MAX],
        "links": links(replicas),
        "followers": _by_follower(lagging),
        "partitions_held": {replica.partition.name: _held(replica) for replica in all_replicas[:DETAILS_MAX]},
    }


def _by_follower(lagging: list[Lagging]) -> list[dict[str, Any]]:
    """Sum up each follower over all partitions that this node leads."""
    found: dict[int, dict[str, Any]] = {}
    for one in lagging:
        row = found.setdefault(
            one.follower,
            {
                "node_id": one.follower,
                "partitions": 0,
                "partitions_in_sync": 0,
                "lag_records": 0,
                "lag_bytes": 0,
                "lag_seconds_max": 0.0,
            },
        )
        row["partitions"] += 1
        row["partitions_in_sync"] += one.is_in_sync
        row["lag_records"] += max(one.records, 0)
        row["lag_bytes"] += one.size_bytes
        row["lag_seconds_max"] = round(max(row["lag_seconds_max"], one.seconds), 3)
    return [found[node_id] for node_id in sorted(found)]


def _held(replica: Replica) -> dict[str, Any]:
    log, role = replica.partition, replica.manager.role
    state = replica.manager.state
    held: dict[str, Any] = {
        "role": "leader" if isinstance(role, Leader) else "follower" if isinstance(role, Follower) else "none",
        "epoch": log.leader_epoch,
        "log_start": log.log_start,
        "high_watermark": log.high_watermark,
        "durable_end": log.durable_end,
        "log_end": log.log_end,
    }
    if isinstance(role, Leader) and state is not None:
        held["in_sync"] = sorted(role.isr.state.isr_nodes)
        held["eligible"] = list(role.isr.state.elr)
    elif isinstance(role, Follower):
        held["leader"] = role.leader
        held["is_streaming"] = role.is_streaming
    return held
