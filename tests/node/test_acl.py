"""Rules, and what follows from them."""

from __future__ import annotations

import pytest

from walstream.config import AclRule
from walstream.error_codes import codes
from walstream.errors import ClusterNotAuthorized, GroupNotAuthorized, NotAuthorized
from walstream.node import acl
from walstream.node.acl import ANONYMOUS, Authorizer, Principal

ALICE = Principal("alice", "SCRAM-SHA-256")
BOB = Principal("bob", "TLS")

RULES = [
    AclRule(principal="alice", kind="topic", name="orders.*", operations=("read",)),
    AclRule(principal="alice", kind="topic", name="orders.new", operations=("write",)),
    AclRule(principal="alice", kind="group", name="billing", operations=("read",)),
    AclRule(principal="bob", kind="topic", operations=("admin",)),
    AclRule(principal="bob", kind="cluster", operations=("admin",)),
    AclRule(principal="*", kind="topic", name="public", operations=("read",)),
]


@pytest.mark.parametrize(
    ("principal", "operation", "kind", "name", "allowed"),
    [
        (ALICE, "read", "topic", "orders.new", True),
        (ALICE, "read", "topic", "orders.", True),
        (ALICE, "read", "topic", "orders", False),
        (ALICE, "write", "topic", "orders.new", True),
        (ALICE, "write", "topic", "orders.new.too", False),
        (ALICE, "admin", "topic", "orders.new", False),
        (ALICE, "describe", "topic", "orders.old", True),
        (ALICE, "describe", "topic", "invoices", False),
        (ALICE, "read", "group", "billing", True),
        (ALICE, "read", "group", "billing2", False),
        (ALICE, "read", "group", "orders.new", False),
        (ALICE, "describe", "cluster", "cluster", False),
        (BOB, "admin", "topic", "anything", True),
        (BOB, "describe", "topic", "anything", True),
        (BOB, "read", "topic", "anything", False),
        (BOB, "admin", "cluster", "cluster", True),
        (BOB, "describe", "cluster", "whatever", True),
        (BOB, "admin", "group", "billing", False),
        (Principal("carol", "PLAIN"), "read", "topic", "public", True),
        (Principal("carol", "PLAIN"), "read", "topic", "orders.new", False),
        (Principal("*", "PLAIN"), "read", "topic", "orders.new", False),
        (ANONYMOUS, "read", "topic", "public", False),
        (Principal("alice", ""), "read", "topic", "orders.new", False),
    ],
)
def test_rules(principal: Principal, operation: acl.Question, kind: acl.ResourceKind, name: str, allowed: bool) -> None:
    authorizer = Authorizer(RULES, enforced=True)
    for _ in range(2):  # the second answer is remembered
        assert authorizer.allows(principal, operation, kind, name) is allowed


def test_nothing_is_allowed_by_no_rule() -> None:
    authorizer = Authorizer([], enforced=True)
    assert not authorizer.allows(ALICE, "describe", "topic", "orders")
    assert not authorizer.visible(ALICE, "orders")
    assert not authorizer.allows_some(ALICE, "describe", "topic")


def test_everything_is_allowed_where_nobody_authenticates() -> None:
    authorizer = Authorizer([], enforced=False)
    assert authorizer.allows(ANONYMOUS, "admin", "cluster")
    assert authorizer.visible(ANONYMOUS, "orders")
    assert authorizer.allows_some(ANONYMOUS, "write", "topic")
    authorizer.require(ANONYMOUS, "admin", "topic", "orders")


def test_topics_are_visible_to_those_who_may_do_anything_to_them() -> None:
    authorizer = Authorizer(RULES, enforced=True)
    assert [name for name in ("orders.new", "public", "secret") if authorizer.visible(ALICE, name)] == [
        "orders.new",
        "public",
    ]


def test_some() -> None:
    authorizer = Authorizer(RULES, enforced=True)
    assert authorizer.allows_some(ALICE, "write", "topic")
    assert not authorizer.allows_some(BOB, "write", "topic")
    assert not authorizer.allows_some(ANONYMOUS, "read", "topic")


@pytest.mark.parametrize(
    ("kind", "refusal", "code"),
    [("topic", NotAuthorized, 29), ("group", GroupNotAuthorized, 30), ("cluster", ClusterNotAuthorized, 31)],
)
def test_a_refusal_has_the_code_of_its_kind(kind: acl.ResourceKind, refusal: type[NotAuthorized], code: int) -> None:
    with pytest.raises(refusal, match="alice may not admin") as caught:
        Authorizer(RULES, enforced=True).require(ALICE, "admin", kind, "thing")
    assert type(caught.value) is refusal
    assert codes(caught.value).kafka == code


def test_names_that_clients_invent_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acl, "ANSWERS_MAX", 10)
    authorizer = Authorizer(RULES, enforced=True)
    for number in range(1000):
        assert not authorizer.allows(ALICE, "read", "topic", f"invented {number}")
    assert len(authorizer._answers) <= 10
    assert authorizer.allows(ALICE, "read", "topic", "orders.new")
