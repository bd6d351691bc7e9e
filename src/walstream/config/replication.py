"""The section [replication]: the nodes of a static cluster, who leads what, and how followers are kept in step.

Without `nodes` there is no cluster: the node is alone, nothing listens for leaders, and nothing here is looked at. The
shared secret is never in the file: a setting names the environment variable that holds it.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from walstream.config.section import MIB, Section

ReplicationMode = Literal["async", "sync"]
LinkCompression = Literal["none", "lz4", "zstd"]

NODE_ID_MAX = 32_766
"""Node ids of a cluster are the high bits of producer ids, which have room for fifteen."""


class ClusterNode(Section):
    """One node of the cluster; every node is told of all of them, itself included."""

    id: int = Field(ge=0, le=NODE_ID_MAX)
    """Its number: the node whose `node.node_id` it is."""

    kafka: str = Field(pattern=r"^.+:\d{1,5}$")
    """Address that Kafka clients are told, as `host:port`."""

    replication: str = Field(pattern=r"^.+:\d{1,5}$")
    """Address at which leaders reach it, as `host:port`."""


class LeaderRule(Section):
    """Which node leads some topics; the first rule that fits counts, and the controller leads the rest."""

    topics: str = Field(min_length=1)
    """Name of the topic; a trailing `*` makes it a prefix."""

    node: int = Field(ge=0, le=NODE_ID_MAX)
    """Number of the node that leads all its partitions."""


class ReplicationConfig(Section):
    """A static cluster: its nodes, its leaders, and how far a follower may fall behind. Alone without `nodes`."""

    nodes: tuple[ClusterNode, ...] = ()
    """The nodes, as `[[replication.nodes]]` tables, the same on every one of them. Empty: a single node."""

    controller_id: int = Field(default=-1, ge=-1, le=NODE_ID_MAX)
    """Number of the node that changes topics and leads what no rule gives to another; -1: the first of `nodes`."""

    leaders: tuple[LeaderRule, ...] = ()
    """Who leads what, as `[[replication.leaders]]` tables. Empty: the controller leads everything."""

    listen: str = Field(default="127.0.0.1:9192", pattern=r"^.*:\d{1,5}$")
    """Address for leaders, as `host:port`. Beyond loopback it needs a secret or TLS with client certificates."""

    replication_factor: int = Field(default=3, ge=1, le=64)
    """Replicas of a topic that is created without saying how many; never more than there are nodes."""

    min_isr: int = Field(default=2, ge=1, le=64)
    """In-sync replicas that `acks=all` asks for where the topic does not say (`min.insync.replicas`) or has fewer."""

    mode: ReplicationMode = "async"
    """`sync`: a produce request with `acks=1` also waits until `sync_followers` followers have it on their disks."""

    sync_followers: int = Field(default=1, ge=1, le=63)
    """Followers that mode `sync` waits for; of a topic that has fewer, all."""

    isr_lag_ms_max: int = Field(default=10_000, ge=100)
    """A follower that has not been at the leader's end for this long is no longer in sync."""

    isr_lag_records_max: int = Field(default=0, ge=0)
    """A follower with more records to go is no longer in sync; 0: only time counts."""

    heartbeat_interval_ms: int = Field(default=10_000, ge=50)
    """How often each side of a link says that it is there when it has nothing else to say."""

    heartbeat_timeout_ms: int = Field(default=30_000, ge=100)
    """A link on which nothing came for this long is closed and made again."""

    handshake_timeout_ms: int = Field(default=5_000, ge=100)
    """How long a new link may take to connect, authenticate and agree on a version."""

    reconnect_delay_ms: int = Field(default=30_000, ge=10)
    """What a leader waits before it dials a follower again: waits begin short, double up to this, and are longer by up
    to half, by chance."""

    secret_env: str = ""
    """Name of the environment variable with the secret that all nodes share. Empty: no secret is asked for."""

    tls_certificate: str = ""
    """PEM file of the node's certificate chain. With `tls_key` and `tls_ca` it turns TLS on, with certificates on both
    sides, each naming the host of its node's address in `nodes`."""

    tls_key: str = ""
    """PEM file of the certificate's private key."""

    tls_ca: str = ""
    """PEM file of the authorities of the nodes' certificates."""

    allow_insecure: bool = False
    """Listen for leaders beyond loopback without secret and TLS: whoever reaches the port can write to the log."""

    credit_bytes: int = Field(default=16 * MIB, ge=MIB, le=2**31 - 1)
    """Bytes that a leader may have under way to a follower that has not yet written them."""

    compression: LinkCompression = "none"
    """How records are compressed between nodes, when both sides can; what producers compressed gains little."""

    version_1_fallback: bool = False
    """Whether protocol version 1 is spoken with peers that know no other: such a replica is never in sync. Not with
    a secret, which version 1 cannot prove."""

    max_queue_size: int = Field(default=100_000, ge=1)
    """Records a follower of protocol version 1 may lag; beyond, it is skipped to the end with a warning."""

    scrub_bytes_per_s: int = Field(default=4 * MIB, ge=0)
    """How fast stored batches are read again and their checksums compared, in the background; 0: never."""

    scrub_interval_ms: int = Field(default=3_600_000, ge=0)
    """From the beginning of one such round over all partitions to that of the next, at least: it may take longer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        ids = [node.id for node in self.nodes]
        if len(set(ids)) != len(ids):
            raise ValueError("replication.nodes has two nodes with the same id")
        if self.controller_id != -1 and self.controller_id not in ids:
            raise ValueError(f"replication.controller_id {self.controller_id} is not one of replication.nodes")
        for rule in self.leaders:
            if rule.node not in ids:
                raise ValueError(
                    f"replication.leaders gives {rule.topics} to {rule.node}, not one of replication.nodes"
                )
        if len({bool(self.tls_certificate), bool(self.tls_key), bool(self.tls_ca)}) > 1:
            raise ValueError("replication.tls_certificate, tls_key and tls_ca are given together or not at all")
        if self.version_1_fallback and self.secret_env:
            raise ValueError("replication.version_1_fallback and secret_env exclude each other: use TLS instead")
        if self.heartbeat_timeout_ms < 2 * self.heartbeat_interval_ms:
            raise ValueError("replication.heartbeat_timeout_ms is less than two of replication.heartbeat_interval_ms")
        return self

    @property
    def is_cluster(self) -> bool:
        """Whether there are other nodes."""
        return len(self.nodes) > 1

    @property
    def controller(self) -> int:
        """The number of the node that changes topics."""
        return self.nodes[0].id if self.controller_id == -1 else self.controller_id

    def leader_of(self, topic: str) -> int:
        """Return the number of the node that leads a topic."""
        for rule in self.leaders:
            if topic == rule.topics or (rule.topics.endswith("*") and topic.startswith(rule.topics[:-1])):
                return rule.node
        return self.controller

    def replicas_of(self, topic: str, factor: int) -> tuple[int, ...]:
        """Return the nodes that hold a topic, its leader first: the next ones in the order of `nodes` follow it."""
        ids = [node.id for node in self.nodes]
        first = ids.index(self.leader_of(topic))
        return tuple((ids[first:] + ids[:first])[: min(factor, len(ids))])
