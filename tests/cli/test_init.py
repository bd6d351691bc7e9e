"""`walstream init`: the file it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from walstream.cli import main
from walstream.config import Config, load


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_writes_the_file_that_the_other_commands_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.invoke(["init"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("walstream.toml is written.")
    assert load(Path("walstream.toml")).config == Config()
    assert main.invoke(["config", "explain", "--changed", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"values": []}


def test_settings_are_put_into_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.invoke(["init", "other.toml", "--set", "source.postgres.database=shop", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "other.toml"}
    assert '\ndatabase = "shop"\n' in Path("other.toml").read_text(encoding="utf-8")
    assert load(Path("other.toml")).config.source.postgres.database == "shop"


def test_a_file_that_is_there_stays(capsys: pytest.CaptureFixture[str]) -> None:
    Path("walstream.toml").write_text("# mine\n", encoding="utf-8")
    assert main.invoke(["init"]) == 2
    assert "There is a file walstream.toml already." in capsys.readouterr().err
    assert Path("walstream.toml").read_text(encoding="utf-8") == "# mine\n"
    assert main.invoke(["init", "--force"]) == 0
    assert load(Path("walstream.toml")).config == Config()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["init", "none/walstream.toml"], "cannot be written: No such file"),
        (["init", "--set", "source.postgres.databse=x"], "Did you mean source.postgres.database?"),
        (["init", "--set", "x"], "Write it as --set source.postgres.database=shop."),
    ],
)
def test_wrong_usage(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.invoke(arguments) == 2
    assert complaint in capsys.readouterr().err
    assert not Path("walstream.toml").exists()
