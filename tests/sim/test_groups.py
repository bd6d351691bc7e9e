"""Runs with consumer groups and time look-ups: something is asked in them, and they are the same every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from walstream.node.offsets_log import OffsetsLog
from walstream.sim.clock import Clock
from walstream.sim.cluster import Cluster
from walstream.sim.groups import Groups
from walstream.sim.lookups import Lookups
from walstream.sim.runner import STEPS, run_cluster
from walstream.sim.scenario import Scenario

made: list[Cluster] = []


def make(clock: Clock, scenario: Scenario, write: Callable[[str], None] | None) -> Cluster:
    cluster = Cluster(clock, replace(scenario, has_groups=True, has_lookups=True, has_trims=True), write)
    made.append(cluster)
    return cluster


def test_groups_and_look_ups_are_served_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    loads = 0
    load = OffsetsLog._load

    def counted(self: OffsetsLog, *args: object, **options: object) -> int:
        nonlocal loads
        loads += 1
        return load(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(OffsetsLog, "_load", counted)
    verdicts = [run_cluster(seed, STEPS, make=make) for seed in range(10)]
    assert not [str(verdict) for verdict in verdicts if not verdict.is_good]
    groups = [one for cluster in made for one in cluster.clients if isinstance(one, Groups)]
    lookups = [one for cluster in made for one in cluster.clients if isinstance(one, Lookups)]
    accounts = [account for one in groups for of in one.promises.accounts.values() for account in of.values()]
    assert loads > 30
    assert sum(one.promises.observations for one in groups) > 200
    assert sum(account.floor > 0 for account in accounts) > 50
    assert sum(request.code > 0 for account in accounts for request in account.requests.values()) > 10, "refused"
    assert sum(one.answers for one in lookups) > 100


@pytest.mark.parametrize("seed", [2, 3])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first: list[str] = []
    second: list[str] = []
    run_cluster(seed, STEPS, first.append, make=make)
    run_cluster(seed, STEPS, second.append, make=make)
    assert first == second
    assert any("group" in line for line in first)
