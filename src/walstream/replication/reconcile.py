"""Reconciliation by leader epoch: is a follower's log a prefix of the leader's, and if not, where do they part?

Owns rules 3 to 7 of the replication rules (after Kafka's KIP-101, KIP-279 and KIP-320), as functions of two logs'
offsets and epoch maps. Never looks at a high watermark to find the place to cut at: a follower learns it late, so
cutting there loses acknowledged records; it only refuses to cut below it.

Why this suffices. An epoch belongs to one life of one leader, and a leader never rewrites an offset within it; so two
logs whose batches at an offset have the same epoch have the same batches up to there. The leader says where the
follower's last epoch, or the largest one before it, ends in its own log. Each answer either is ACCEPT or makes the
follower's log or its last epoch smaller, so the exchange ends.

What lies below the leader's log start cannot be compared. A follower that shares nothing above it begins anew there:
it keeps no bytes that nobody vouches for. Sans-IO.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from walstream.replication.events import LogView
from walstream.replication.messages import State


class Accepted(NamedTuple):
    """The follower's log is a prefix: it ends at `offset`."""

    offset: int


class Diverges(NamedTuple):
    """Of the follower's last epoch, or the largest before it, the leader has this much."""

    end_epoch: int
    end_offset: int


class StartsOver(NamedTuple):
    """Nothing is in common: the follower begins at the leader's log start."""

    log_start: int


Verdict: TypeAlias = Accepted | Diverges | StartsOver


def judge(log: LogView, state: State) -> Verdict:
    """Compare, as the leader, what a follower says it holds with the own log."""
    is_empty = state.log_start >= state.log_end
    if state.log_end < log.log_start or (is_empty and state.log_end > log.log_end):
        return StartsOver(log.log_start)
    if is_empty and state.last_epoch < 0:
        # Nothing is there that could differ; it may begin within the leader's log as well as at its start.
        return Accepted(state.log_end)
    if state.log_end == log.log_start and not is_empty:
        return StartsOver(log.log_start)
    epoch, end = log.epochs.end_offset_for(state.last_epoch, log.log_end)
    if epoch == state.last_epoch and end >= state.log_end:
        return Accepted(state.log_end)
    if end <= log.log_start and not is_empty:
        return StartsOver(log.log_start)
    return Diverges(epoch, end)


def cut_at(log: LogView, end_epoch: int, end_offset: int) -> int:
    """Return, as the follower, where to cut the own log after DIVERGING; it may lie below the log's start."""
    epoch, end = log.epochs.end_offset_for(end_epoch, log.log_end)
    if epoch == end_epoch:
        return min(end, end_offset, log.log_end)
    # The leader has an epoch here that this log never had: drop what is newer, and ask again about what is older.
    return min(end, log.log_end)


def breaks_promise(cut: int, high_watermark: int, high_watermark_epoch: int, unclean_epoch: int) -> bool:
    """Tell whether cutting there would drop what was committed, with no unclean election since to excuse it."""
    return cut < high_watermark and unclean_epoch <= high_watermark_epoch
