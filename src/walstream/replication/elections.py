"""Who leads next: from the ISR, then from the eligible ones, then, if it is allowed, whoever led last.

Owns the choice, as a function of the record and of who is alive; the service that keeps the record makes it true, by
comparing its version. A replica of the ISR, or an eligible one, holds everything committed, so electing it is clean.
Anybody else is elected only where losing committed records has been allowed; the record remembers the epoch, so that
followers know why they are asked to cut off what they took for committed.

A replica whose copy is damaged is passed over as long as there is a sound one that may come back, because what is
damaged cannot be served. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from walstream.cluster.metadata import NO_LEADER, Member, NodeId, PartitionState, with_isr


def elect(
    state: PartitionState,
    alive: Mapping[NodeId, int],
    *,
    damaged: Collection[NodeId] = (),
    preferred: NodeId = NO_LEADER,
    resigned: NodeId = NO_LEADER,
    is_unclean_allowed: bool = False,
) -> PartitionState | None:
    """Return the record with a new leader and epoch, or None when nobody may lead.

    `alive` are the nodes that can serve, with their incarnations. Who has `resigned` is elected again only if nobody
    else can be: an eligible replica holds as much as one in the ISR, and it may be able to lead.

    Members of the ISR that are not alive leave it, or the new leader could commit nothing before it had found out by
    itself; that only ever takes replicas away, so all that is left holds everything committed, and who left an ISR
    that is too small now stays eligible.
    """
    others = {node: life for node, life in alive.items() if node != resigned}
    winner = _clean_choice(state, others, damaged, preferred)
    if winner == NO_LEADER:
        winner = _clean_choice(state, alive, damaged, preferred)
    if winner != NO_LEADER:
        if winner in state.isr_nodes:
            # The member stays as it joined: a node that lost bytes since can tell by it that it must decline.
            isr = [member for member in state.isr if member.node in alive]
        else:
            isr = [Member(winner, -1)]
        return _won(state, with_isr(state, isr), winner)
    if not is_unclean_allowed:
        return None
    winner = _any_choice(state, alive, preferred)
    if winner == NO_LEADER:
        return None
    alone = with_isr(state, [Member(winner, alive[winner])], state.replicas)
    return replace(_won(state, alone, winner), unclean_epoch=state.epoch + 1)


def _won(before: PartitionState, state: PartitionState, winner: NodeId) -> PartitionState:
    last = before.leader if before.leader != NO_LEADER else before.last_leader
    return replace(state, leader=winner, epoch=before.epoch + 1, last_leader=last)


def _clean_choice(
    state: PartitionState, alive: Mapping[NodeId, int], damaged: Collection[NodeId], preferred: NodeId
) -> NodeId:
    """Return a live node that holds everything committed: of the ISR, or else an eligible one."""
    complete = state.isr_nodes | set(state.elr)
    # If every complete copy is damaged there is nobody to wait for: a damaged one serves the rest, and is repaired.
    shunned = frozenset() if complete <= set(damaged) else frozenset(damaged)
    for group in (state.isr_nodes, frozenset(state.elr)):
        able = [node for node in state.replicas if node in group and node in alive and node not in shunned]
        if able:
            return preferred if preferred in able else able[0]
    return NO_LEADER


def _any_choice(state: PartitionState, alive: Mapping[NodeId, int], preferred: NodeId) -> NodeId:
    """Return who is likely to have lost least: the last leader, or else the first that is alive."""
    last = state.leader if state.leader != NO_LEADER else state.last_leader
    able = [node for node in state.replicas if node in alive]
    for choice in (last, preferred):
        if choice in able:
            return choice
    return able[0] if able else NO_LEADER


def unable_to_lead(state: PartitionState, me: Member, *, known_epoch: int, is_unclean: bool) -> str:
    """Return why a replica must not lead although the record says that it was elected; empty if it may.

    Checked by the winner itself, with what it alone knows. `known_epoch` is the newest epoch persisted in its log: one
    that was is not led again, because an epoch belongs to one life, and to one state of the log. A log that has lost
    bytes may have lost that, too: then only a record that names this very life will do, as an unclean election's does.
    What a late record says of an earlier life of this node, clean or not, was led by that one.
    """
    if state.epoch <= known_epoch:
        return f"epoch {state.epoch} belongs to an earlier life of this log"
    if me.node not in state.isr_nodes:
        return "this node is not in the ISR"
    if is_unclean and me not in state.isr:
        return "this replica has lost bytes since it joined the ISR"
    return ""
