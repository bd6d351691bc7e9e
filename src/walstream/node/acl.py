"""Who a peer is, and what it may do: principals, rules and the one question "is this allowed?".

Pure: rules in, a yes or a no out. How a peer proves its name is the business of `sasl` and `security`.

The invariant: once authentication is configured, nothing is allowed that no rule allows, and an anonymous peer is
allowed nothing at all, not even by a rule for `*`. Without authentication (a node on loopback) everything is allowed.

A rule grants operations on a topic or group by its name, on all whose names begin with a prefix (`orders.*`), or on the
cluster. Any grant lets its holder see the thing: `describe` is never written in a rule, it follows from the others.
Kinds do not imply each other: `admin` of the cluster creates no topic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from walstream.config import AclRule, Operation, ResourceKind
from walstream.errors import ClusterNotAuthorized, GroupNotAuthorized, NotAuthorized

Question = Literal["read", "write", "admin", "describe"]
"""What a request can ask to do: the operations of rules, and `describe`, which each of them implies."""

CLUSTER = "cluster"
"""The name of the only resource of kind `cluster`."""

ANSWERS_MAX = 10_000
"""Answers kept at once. Names come from clients, so without a bound anybody who invents names could fill the memory."""

_REFUSALS: dict[ResourceKind, type[NotAuthorized]] = {
    "topic": NotAuthorized,
    "group": GroupNotAuthorized,
    "cluster": ClusterNotAuthorized,
}


@dataclass(frozen=True, slots=True)
class Principal:
    """A peer by its name, and the way it proved that name: a SASL mechanism, `TLS`, or nothing at all."""

    name: str
    mechanism: str

    @property
    def is_anonymous(self) -> bool:
        """Whether the peer has proved nothing, whatever it is called."""
        return not self.mechanism


ANONYMOUS = Principal("ANONYMOUS", "")


class Authorizer:
    """Answers for every request whether its principal may do what it asks."""

    def __init__(self, rules: Iterable[AclRule], *, enforced: bool) -> None:
        self._rules = tuple(rules)
        self._enforced = enforced
        self._answers: dict[tuple[str, Question, ResourceKind, str], bool] = {}

    def allows(self, principal: Principal, operation: Question, kind: ResourceKind, name: str = CLUSTER) -> bool:
        """Say whether the principal may do this to that."""
        if not self._enforced:
            return True
        if principal.is_anonymous:
            return False
        question = (principal.name, operation, kind, name)
        answer = self._answers.get(question)
        if answer is None:
            answer = any(
                _matches(rule.name, name) if kind != "cluster" else True
                for rule in self._granting(principal, operation, kind)
            )
            if len(self._answers) >= ANSWERS_MAX:
                self._answers.clear()
            self._answers[question] = answer
        return answer

    def allows_some(self, principal: Principal, operation: Question, kind: ResourceKind) -> bool:
        """Say whether there can be a resource of this kind to which the principal may do this."""
        if not self._enforced:
            return True
        return not principal.is_anonymous and any(self._granting(principal, operation, kind))

    def require(self, principal: Principal, operation: Question, kind: ResourceKind, name: str = CLUSTER) -> None:
        """Raise the NotAuthorized of that kind unless the principal may do this."""
        if not self.allows(principal, operation, kind, name):
            what = "the cluster" if kind == "cluster" else f"{kind} {name!r}"
            raise _REFUSALS[kind](
                f"{principal.name} may not {operation} {what}.",
                "The rules are in [[security.acls]] of the node's configuration.",
            )

    def visible(self, principal: Principal, topic: str) -> bool:
        """Say whether the principal may know that the topic exists."""
        return self.allows(principal, "describe", "topic", topic)

    def _granting(self, principal: Principal, operation: Question, kind: ResourceKind) -> list[AclRule]:
        return [
            rule
            for rule in self._rules
            if rule.kind == kind
            and rule.principal in ("*", principal.name)
            and (operation == "describe" or operation in rule.operations)
        ]


def _matches(pattern: str, name: str) -> bool:
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    return name == pattern


__all__ = ["ANONYMOUS", "CLUSTER", "Authorizer", "Operation", "Principal", "Question", "ResourceKind"]
