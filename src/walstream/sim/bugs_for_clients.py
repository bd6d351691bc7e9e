# ruff: noqa: ARG001, ARG005  What replaces a method has its signature.
"""Mistakes in what clients are told, in offsets, and in coming back: planted to prove the checkers (see `planting`)."""

from __future__ import annotations

from collections.abc import Mapping

from walstream.log.partition_log import PartitionLog
from walstream.log.scrub import Scrub
from walstream.log.waiting import NOBODY, Callback, Waiter
from walstream.node.driver import Replica
from walstream.replication import follower
from walstream.replication.effects import TrimLog
from walstream.replication.follower import Follower
from walstream.replication.isr import Isr, Lag
from walstream.replication.leader import Leader
from walstream.replication.manager import Manager
from walstream.replication.repair import Repairs
from walstream.sim.planting import Bug, Patch, owner_of

# ── acknowledgements ────────────────────────────────────────────────────────────────────────────────────────────────


def _acking_all_too_early() -> list[Patch]:
    def when_visible(self: PartitionLog, offset: int, callback: Callback) -> Waiter:
        return self.when_durable(offset, callback)

    return [(owner_of(PartitionLog, "when_visible"), "when_visible", when_visible)]


def _acking_one_too_early() -> list[Patch]:
    owner = owner_of(PartitionLog, "when_durable")
    original = PartitionLog.when_durable

    def when_durable(self: PartitionLog, offset: int, callback: Callback) -> Waiter:
        if not self.is_leader:
            return original(self, offset, callback)
        callback(None)
        return NOBODY

    return [(owner, "when_durable", when_durable)]


def _not_waiting_for_followers() -> list[Patch]:
    def when_followers_durable(self: Replica, offset: int, callback: Callback) -> Waiter:
        callback(None)
        return NOBODY

    return [(Replica, "when_followers_durable", when_followers_durable)]


def _forgetting_who_waits() -> list[Patch]:
    def advance(self: PartitionLog, offset: int) -> None:
        self.high_watermark_epoch = self.leader_epoch
        self.high_watermark = max(self.high_watermark, min(offset, self.durable_end))
        self._notify()

    return [(PartitionLog, "advance_high_watermark", advance)]


# ── offsets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _exposing_what_nobody_committed() -> list[Patch]:
    original = Follower._follow_watermark

    def follow_watermark(self: Follower, now_ms: int) -> None:
        self._leader_watermark = max(self._leader_watermark, self._ctx.log.durable_end)
        original(self, now_ms)

    return [(Follower, "_follow_watermark", follow_watermark)]


def _counting_one_too_few() -> list[Patch]:
    original = Isr.high_watermark

    def high_watermark(self: Isr, own_end: int, lags: Mapping[int, Lag]) -> int:
        reached = original(self, own_end, lags)
        return reached - 1 if reached > 0 else reached

    return [(Isr, "high_watermark", high_watermark)]


def _cutting_too_much() -> list[Patch]:
    return [
        (follower, "cut_at", lambda log, end_epoch, end_offset: log.log_start),
        (follower, "breaks_promise", lambda *_: False),
    ]


def _deleting_too_much() -> list[Patch]:
    return [(follower, "TrimLog", lambda log_start: TrimLog(1 << 60))]


# ── coming back ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _never_joining_again() -> list[Patch]:
    return [(Leader, "_joins", lambda self, session: False)]


def _reading_nothing_again() -> list[Patch]:
    return [(Scrub, "tick", lambda self: None)]


def _asking_nobody_for_what_is_damaged() -> list[Patch]:
    return [(Repairs, "go_on", lambda self, sources, now_ms: None)]


def _holding_on_to_what_was_given_up() -> list[Patch]:
    follow = Manager._follow

    def follow_as_ever(self: Manager, leader: int, epoch: int, unclean_epoch: int) -> Follower:
        return follow(self, leader, epoch, -1)

    return [(Leader, "unclean_epoch", property(lambda self: -1)), (Manager, "_follow", follow_as_ever)]


BUGS_FOR_CLIENTS = (
    Bug(
        "acking all too early", "acks=all is answered when this node alone has the batch.",
        ("acks=all",),
        _acking_all_too_early, ("slow disk",),
    ),
    Bug(
        "acking one too early", "acks=1 is answered before the batch is on the leader's disk.",
        ("acks=1",),
        _acking_one_too_early, ("slow disk",),
    ),
    Bug(
        "not waiting for followers", "In mode sync acks=1 is answered as in mode async.",
        ("acks=1 in sync mode",),
        _not_waiting_for_followers, ("slow disk",), sync_followers=2,
    ),
    Bug(
        "forgetting who waits", "The high watermark moves, and nobody is told.",
        ("writes resume",),
        _forgetting_who_waits, ("slow disk",),
    ),
    Bug(
        "exposing what nobody committed", "A follower takes its own end for the high watermark.",
        ("hw of a follower", "log matching", "offsets"),
        _exposing_what_nobody_committed, ("slow disk",),
    ),
    Bug(
        "counting one too few", "The high watermark lies in the middle of a batch.",
        ("offsets",),
        _counting_one_too_few, ("slow disk",),
    ),
    Bug(
        "cutting too much", "A follower that differs begins its log anew, whatever it has promised.",
        ("truncated below the hw", "in sync", "committed on too few", "leader completeness"),
        _cutting_too_much, ("isolate", "handover", "crash"),
    ),
    Bug(
        "deleting too much", "A follower deletes everything that is committed where its leader deletes the beginning.",
        ("log start", "leader completeness"),
        _deleting_too_much, ("slow disk",), has_trims=True,
    ),
    Bug(
        "never joining again", "Who has left the ISR stays out of it.",
        ("convergence",),
        _never_joining_again,
    ),
    Bug(
        "reading nothing again", "Rot in what nobody reads is never found.",
        ("convergence",),
        _reading_nothing_again, ("rot", "slow disk"), scrub_bytes_per_s=20_000,
    ),
    Bug(
        "asking nobody for what is damaged", "A damaged batch is found, and never fetched from a peer.",
        ("convergence",),
        _asking_nobody_for_what_is_damaged, ("rot", "slow disk"), scrub_bytes_per_s=20_000,
    ),
    Bug(
        "holding on to what was given up", "A follower does not hear that an election was unclean, and cuts nothing.",
        ("convergence",),
        _holding_on_to_what_was_given_up, ("isolate", "crash", "kill"), is_unclean_allowed=True,
    ),
)  # fmt: skip
