"""`walstream sim`: what a run that fails says, and where it is kept."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from walstream.cli import main
from walstream.sim.bugs import BUGS
from walstream.sim.planting import planted

STEPS = 300


@pytest.fixture
def _bug() -> Iterator[None]:
    """A mistake that hardly any seed overlooks."""
    with planted(next(bug for bug in BUGS if bug.name == "counting sent")):
        yield


def test_a_run_that_keeps_its_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.invoke(["sim", "--seed", "3", "--steps", str(STEPS)]) == 0
    said = capsys.readouterr()
    assert "all promises kept" in said.err
    assert "again:" not in said.err
    assert "seed 3: " in said.out.splitlines()[0]
    assert main.invoke(["sim", "--seed", "3", "--steps", str(STEPS), "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["seed"], told["steps"], told["invariant"]) == (3, STEPS, "")


@pytest.mark.usefixtures("_bug")
@pytest.mark.parametrize("which", [["--seed", "0"], ["--seeds", "0:1"]], ids=["one", "many"])
def test_a_run_that_fails_tells_how_to_see_it_again(
    which: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.invoke(["sim", *which, "--steps", str(STEPS), "--keep", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    (repeat,) = [line for line in said.splitlines() if "again: walstream" in line]
    command = repeat.split("walstream ", 1)[1].split(" Kept in")[0]
    assert command == f"sim --seed 0 --steps {STEPS}"
    path = tmp_path / f"0-{STEPS}.txt"
    assert path.read_text(encoding="utf-8").strip() in said
    assert main.invoke(shlex.split(command)) == 1
    again = capsys.readouterr()
    assert "VIOLATION" in again.out.splitlines()[-1]
    assert path.read_text(encoding="utf-8").strip() in again.err


@pytest.mark.parametrize("which", [[], ["--seed", "1", "--seeds", "0:2"], ["--seeds", "2:1"], ["--seeds", "x"]])
def test_wrong_usage(which: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.invoke(["sim", *which]) == 2
    assert "--seeds" in capsys.readouterr().err
