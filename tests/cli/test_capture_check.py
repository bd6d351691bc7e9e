"""`walstream capture check` as its user sees it: what is printed where, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postgres.servers import Database
from walstream.cli import main

Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Check:
    """Run `capture check` on the database, and return its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    settings = {"port": database.server.port, "database": database.name, "slot_name": database.name}
    for name, value in settings.items():
        monkeypatch.setenv(f"WALSTREAM_SOURCE__POSTGRES__{name.upper()}", str(value))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main.invoke(["capture", "check", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_what_is_wrong_and_the_sql_that_mends_it(database: Database, check: Check) -> None:
    database.execute("create table keyless (a int)")
    code, out, err = check()
    assert code == 4, err
    assert "problem   replica identity        public.keyless: no replica identity" in out
    assert "\nALTER TABLE public.keyless REPLICA IDENTITY FULL;\n" in out
    assert err == f"error: 2 problems keep {database.name} at 127.0.0.1:{database.server.port} from being captured.\n"
    # What is printed after the table is SQL, a statement per line.
    for line in out[out.index("-- replica identity") :].splitlines():
        if line and not line.startswith("--"):
            database.execute(line)
    code, out, err = check()
    assert (code, err) == (0, "")
    assert "--" not in out


def test_fix_creates_publication_and_slot(database: Database, check: Check) -> None:
    database.execute("create table orders (id int primary key)")
    code, _, err = check()
    assert code == 4, err
    assert err.endswith("hint:  `walstream capture check --fix` creates what is missing.\n")
    code, out, err = check("--fix")
    assert code == 0, err
    assert err.count("Created, with: ") == 2
    assert "walstream holds all tables" in out
    assert check("--fix") == (0, check()[1], "")


def test_as_json(database: Database, check: Check) -> None:
    code, out, err = check("--fix", "--output", "json")
    found: dict[str, Any] = json.loads(out)
    assert code == 0, err
    assert found["created"] == ["publication", "slot"]
    assert (found["state"], found["database"], found["slot"]) == ("ok", database.name, database.name)
    assert {"subject", "state", "message", "sql", "after"} == set(found["findings"][0])
    assert all(finding["state"] == "ok" for finding in found["findings"])


def test_nobody_answers(check: Check) -> None:
    code, out, err = check("--set", "source.postgres.port=1")
    assert (code, out) == (3, "")
    assert err.startswith("error: PostgreSQL at 127.0.0.1:1 cannot be reached")


def test_refused(check: Check) -> None:
    code, _, err = check("--set", "source.postgres.user=stranger")
    assert code == 5, err
    assert 'role "stranger" does not exist' in err


def test_password_comes_from_the_environment(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = check("--set", "source.postgres.password_env=SHOP_PASSWORD")
    assert code == 2, err
    assert "no variable SHOP_PASSWORD" in err
    monkeypatch.setenv("SHOP_PASSWORD", "secret of mine")
    code, out, err = check("--set", "source.postgres.password_env=SHOP_PASSWORD")
    assert code == 4, err
    assert "secret of mine" not in out + err


def test_streams_say_which_tables_matter(database: Database, check: Check) -> None:
    database.execute("create table orders (id int primary key); create table keyless (a int)")
    code, out, err = check("--fix", "--set", 'streams=[{"table": "public.or*"}]')
    assert code == 0, err
    assert "walstream holds 1 table" in out
