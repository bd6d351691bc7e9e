"""Which assignment strategies a group can use, and which one it uses.

Invariant: a member is let in only if the strategies that all members offer stay at least one, so that there is always
something to vote for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from walstream.node.groups.member import Member


def common_protocols(members: Collection[Member]) -> set[str]:
    """Return the names of the strategies that every member offers; empty without members."""
    offers = [{name for name, _ in member.protocols} for member in members]
    return set.intersection(*offers) if offers else set()


def select_protocol(members: Collection[Member], leader: Member) -> str:
    """Let each member vote for the first it lists of those that all offer; the leader's order breaks a tie."""
    common = common_protocols(members)
    votes = Counter(next(name for name, _ in member.protocols if name in common) for member in members)
    return max((name for name, _ in leader.protocols if name in common), key=lambda name: votes[name])
