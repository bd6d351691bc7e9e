"""Seeds: the usual three hundred, and those that once found something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from walstream.sim.runner import STEPS, run_seed
from walstream.sim.search import keep, kept, run_chunk, search

SEEDS = Path(__file__).parents[1] / "seeds"
CHUNK = 25
LONG_FIRST, LONG_END = 1_000, 6_000


@pytest.mark.parametrize("first", range(0, 300, CHUNK))
def test_every_promise_is_kept(first: int) -> None:
    failed = [str(verdict) for verdict in run_chunk(first, first + CHUNK, STEPS) if not verdict.is_good]
    assert not failed


@pytest.mark.long
@pytest.mark.parametrize("first", range(LONG_FIRST, LONG_END, 250))
def test_every_promise_is_kept_for_longer(first: int) -> None:
    failed = [str(verdict) for verdict in run_chunk(first, first + 250, STEPS) if not verdict.is_good]
    assert not failed


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_long_runs_keep_every_promise(seed: int) -> None:
    verdict = run_seed(seed, 40_000)
    assert verdict.is_good, verdict


@pytest.mark.parametrize(("world", "seed", "steps", "found"), kept(SEEDS))
def test_what_a_seed_once_found_stays_mended(world: str, seed: int, steps: int, found: str) -> None:
    verdict = run_seed(seed, steps, world=world)
    assert verdict.is_good, f"{verdict} (once: {found})"


def trace_of(seed: int) -> list[str]:
    lines: list[str] = []
    run_seed(seed, 800, lines.append)
    return lines


@pytest.mark.parametrize("seed", [1, 4, 7, 11])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first = trace_of(seed)
    assert len(first) > 100
    assert trace_of(seed) == first


def test_the_same_seed_is_the_same_run_in_every_process() -> None:
    def run(hash_seed: str) -> str:
        command = [sys.executable, "-m", "walstream.cli.main", "sim", "--seed", "5", "--steps", "800"]
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False).stdout

    first = run("1")
    assert len(first.splitlines()) > 100
    assert run("4711") == first
    assert first.splitlines() == [*trace_of(5)]


def test_another_seed_is_another_run() -> None:
    assert trace_of(1)[1:] != trace_of(2)[1:]


def test_a_trace_changes_nothing() -> None:
    silent, traced = run_seed(6, 800), run_seed(6, 800, lambda _: None)
    assert silent == traced


def test_processes_give_their_verdicts_in_the_order_of_the_seeds() -> None:
    verdicts = list(search(0, 50, 60, processes=2))
    assert verdicts == list(search(0, 50, 60))
    assert [verdict.seed for verdict in verdicts] == list(range(50))


def test_a_seed_that_failed_is_kept_once(tmp_path: Path) -> None:
    verdict = run_seed(3, 50)
    path = keep(verdict, tmp_path)
    path.write_text("what it found\n", encoding="utf-8")
    assert keep(verdict, tmp_path) == path
    assert kept(tmp_path) == [("cluster", 3, 50, "what it found")]


def test_seeds_of_the_two_worlds_are_kept_apart(tmp_path: Path) -> None:
    verdicts = [run_seed(4, 20, world=world) for world in ("cluster", "storage")]
    assert [keep(verdict, tmp_path).name for verdict in verdicts] == ["4-20.txt", "storage-4-20.txt"]
    assert [where[:3] for where in kept(tmp_path)] == [("cluster", 4, 20), ("storage", 4, 20)]


def test_a_seed_is_a_run_of_each_world() -> None:
    both, cluster, storage = run_seed(8), run_seed(8, world="cluster"), run_seed(8, 180, world="storage")
    assert both.happened == cluster.happened + storage.happened
    assert "storage" in str(both)
    assert "storage" not in str(cluster)
