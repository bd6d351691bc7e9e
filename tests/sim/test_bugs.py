"""Every planted bug is found: soon where it is looked for, and within a thousand of the usual seeds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from walstream import sim
from walstream.sim.bugs import BUGS
from walstream.sim.planting import Bug, planted
from walstream.sim.runner import STEPS, run_cluster

SEED = {
    "truncating to the hw": 3,
    "counting sent": 0,
    "counting received": 0,
    "counting before the epoch is acknowledged": 3,
    "trusting a rebooted replica": 3,
    "skipping the divergence check": 9,
    "acking before fsync": 0,
    "serving above the hw": 2,
    "serving what fails its crc": 66,
    "settled too early": 5,
    "forgetting producers": 3,
    "minimal isr": 3,
    "shrinking before it is committed": 3,
    "committing below min_isr": 2,
    "electing outside the isr": 5,
    "electing a new disk": 4,
    "keeping a zombie leader": 14,
    "keeping the epoch over a restart": 0,
    "forgetting the epoch map": 0,
    "sending without credit": 3,
    "acking all too early": 0,
    "acking one too early": 0,
    "not waiting for followers": 0,
    "forgetting who waits": 0,
    "exposing what nobody committed": 0,
    "counting one too few": 0,
    "cutting too much": 3,
    "deleting too much": 3,
    "never joining again": 0,
    "reading nothing again": 3,
    "asking nobody for what is damaged": 3,
    "holding on to what was given up": 8,
    "skipping damage": 3,
    "never loading again": 0,
    "loading below an old high watermark": 3,
    "applying only what was answered": 3,
    "answering before it is committed": 0,
    "deleting only what is committed": 3,
    "comparing names of topics": 1,
    "raising what the log raises": 0,
    "comparing headers": 0,
    "looking above the high watermark": 0,
}
"""The seed that finds each quickly. Another change of the code may shift it: then one of the next ones does."""

TRIES = 30


OWN_BOOKKEEPING = {"durable end", "unannounced cut"}
"""What a checker says when its own account of a log does not add up any more: no mistake of replication leads there."""


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 10
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert set(SEED) == {bug.name for bug in BUGS}


def test_every_invariant_is_proved_by_one_of_them() -> None:
    paths = [path for path in Path(sim.__path__[0]).glob("*.py") if not path.name.startswith("storage")]
    source = "".join(path.read_text(encoding="utf-8") for path in paths)
    named = set(re.findall(r'(?:_fail|Violation|self\._wait)\(\s*"([^"]+)"', source))
    assert len(named) > 15
    assert named - OWN_BOOKKEEPING == {invariant for bug in BUGS for invariant in bug.found_by}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_it_is_found(bug: Bug) -> None:
    first = SEED[bug.name]
    with planted(bug):
        for seed in range(first, first + TRIES):
            verdict = run_cluster(seed, STEPS, make=bug.make)
            if verdict.invariant in bug.found_by:
                break
        else:
            pytest.fail(f"nobody noticed: {bug.text}")
    without = run_cluster(seed, STEPS, make=bug.make)
    assert without.is_good, without


def test_nothing_of_a_bug_is_left_behind() -> None:
    for bug in BUGS:
        before = [(owner, name, owner.__dict__[name]) for owner, name, _ in bug.patches()]
        with planted(bug):
            assert any(owner.__dict__[name] is not original for owner, name, original in before)
        assert all(owner.__dict__[name] is original for owner, name, original in before)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_it_is_found_within_a_thousand_seeds(bug: Bug) -> None:
    """In the usual runs, which are drawn with no bug in mind."""
    with planted(bug):
        for seed in range(1_000):
            if run_cluster(seed).invariant in bug.found_by:
                return
    pytest.fail(f"nobody noticed: {bug.text}")
