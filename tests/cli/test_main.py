"""The command line without a node: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from walstream import error_codes, errors
from walstream.cli import main
from walstream.cli.client import Client
from walstream.cli.options import confirm_name, pairs
from walstream.config import reference
from walstream.errors import UsageError
from walstream.node.credentials import parse_credential

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a walstream.toml or a WALSTREAM_… of whoever runs the tests out of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WALSTREAM_BOOTSTRAP", "127.0.0.1:1")


def commands(command: Any, path: str = "walstream") -> dict[str, Any]:
    """Return every command that does something, by what one types."""
    if not hasattr(command, "commands"):
        return {path: command}
    names = command.list_commands(None)
    return {k: v for name in names for k, v in commands(command.get_command(None, name), f"{path} {name}").items()}


COMMANDS = commands(get_command(main.app))


def test_commands_are_the_known_ones() -> None:
    assert sorted(COMMANDS) == [
        "walstream capture check",
        "walstream capture run",
        "walstream capture status",
        "walstream config explain",
        "walstream config reference",
        "walstream demo",
        "walstream feed ack",
        "walstream feed lsn",
        "walstream feed serve",
        "walstream feed subscribe",
        "walstream group describe",
        "walstream group list",
        "walstream group reset",
        "walstream init",
        "walstream node start",
        "walstream pipeline audit",
        "walstream pipeline maintain",
        "walstream pipeline run",
        "walstream pipeline status",
        "walstream produce",
        "walstream sim",
        "walstream status",
        "walstream tail",
        "walstream token jwks",
        "walstream token mint",
        "walstream token prune",
        "walstream token rotate",
        "walstream token show",
        "walstream topic alter",
        "walstream topic create",
        "walstream topic delete",
        "walstream topic describe",
        "walstream topic list",
        "walstream user credential",
    ]


def test_a_command_imports_no_other() -> None:
    program = """
import sys
from walstream.cli import main
main.invoke(["node", "start", "--help"])
print("imported:", *(name for name in main.ORDER if f"walstream.cli.{name}" in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "imported: node"


def test_a_name_that_is_almost_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.invoke(["topics"]) == 2
    assert "Did you mean 'topic'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_command_is_documented(name: str) -> None:
    documented = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert re.search(rf"^#+ `{re.escape(name)}\b", documented, flags=re.MULTILINE), f"docs/cli.md has no {name}"


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_are_documented_in_the_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.invoke([*name.split()[1:], "--help"]) == 0
    assert capsys.readouterr().out
    assert COMMANDS[name].help
    for parameter in COMMANDS[name].params:
        assert parameter.help, parameter.name


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in COMMANDS
        if not re.search(r"reference|node start|capture run|pipeline run|feed serve|demo", name)
    ],
)
def test_data_can_be_had_as_json(name: str) -> None:
    assert "output" in {parameter.name for parameter in COMMANDS[name].params}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["topic", "foo"], "error: No such command 'foo'.\nhint:  `walstream topic --help` shows what there is.\n"),
        (["topic", "create"], "error: Missing argument 'TOPIC'.\n"),
        (["topic", "list", "--colour"], "error: No such option: --colour"),
        (["topic", "list", "-o", "jsn"], "'jsn' is not one of 'table', 'json'"),
        (["topic", "create", "a", "--set", "x"], "error: --set x has no value.\nhint:  Write it as --set retention"),
        (["topic", "list", "-b", "nowhere"], "error: 'nowhere' is no address.\nhint:  Write it as host:port.\n"),
        (["topic", "list", "--tls-ca", "none.pem"], "error: There is no file none.pem.\n"),
        (["topic", "list", "--user", "a", "--password-file", "none"], "error: The password file none cannot be read"),
        (["tail", "a", "--from", "noon"], "error: 'noon' is no place in a log.\n"),
        (["produce", "a", "--key", "k", "--key-separator", ":"], "contradict each other"),
        (["config", "explain", "--set", "log.segmentbytes=1"], "hint:  Did you mean log.segment_bytes?\n"),
        (["node", "start", "--listen", "x"], "error: node.listen = 'x' (flag node.listen=x) is not allowed"),
    ],
)
def test_wrong_usage(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.invoke(arguments) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.out == ""
    assert "Traceback" not in said.err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.invoke(["topic", "list", "--output", "json"]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "error: No node answers at 127.0.0.1:1: Connection refused.\n"
        "hint:  Start one with `walstream node start`, or name another with --bootstrap HOST:PORT.\n"
    )


def test_nothing_asked_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.invoke([]) == 2
    said = capsys.readouterr()
    assert "Usage: walstream" in said.out + said.err
    assert "error" not in said.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.invoke(["--version"]) == 0
    assert capsys.readouterr().out.startswith("walstream")


@pytest.mark.parametrize(
    "kind", [errors.UnhealthyError, errors.NotAuthorized, errors.DirectoryLocked, errors.CorruptLog]
)
def test_exit_code_is_the_errors(
    kind: type[errors.WalstreamError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Client, topic: str | None = None) -> None:
        raise kind("It cannot be.", "Do this.")

    monkeypatch.setattr(Client, "metadata", refuse)
    assert main.invoke(["topic", "list"]) == error_codes.codes(kind).exit
    assert capsys.readouterr().err == "error: It cannot be.\nhint:  Do this.\n"


class TestConfig:
    def test_explain(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        Path("walstream.toml").write_text("[log]\nsegment_bytes = 4096\n", encoding="utf-8")
        monkeypatch.setenv("WALSTREAM_NODE__NODE_ID", "7")
        assert main.invoke(["config", "explain", "--changed", "--set", "node.data=there"]) == 0
        lines = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
        assert lines == [
            ["key", "value", "from"],
            ["node.data", '"there"', "flag node.data=there"],
            ["node.node_id", "7", "environment WALSTREAM_NODE__NODE_ID"],
            ["log.segment_bytes", "4096", "file walstream.toml"],
        ]

    def test_explain_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.invoke(["config", "explain", "-o", "json"]) == 0
        values = {row["key"]: row for row in json.loads(capsys.readouterr().out)["values"]}
        assert values["log.segment_bytes"] == {
            "key": "log.segment_bytes", "value": 134217728, "source": "default", "detail": "",
        }  # fmt: skip

    def test_credentials_are_not_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("walstream.toml").write_text('[security.users]\nann = "SCRAM-secret"\n', encoding="utf-8")
        for output in ("table", "json"):
            assert main.invoke(["config", "explain", "-o", output]) == 0
            said = capsys.readouterr().out
            assert "ann" in said
            assert "SCRAM-secret" not in said

    def test_reference(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.invoke(["config", "reference"]) == 0
        assert capsys.readouterr().out == reference()


class TestUser:
    def test_credential_is_toml_that_proves_the_password(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WALSTREAM_PASSWORD", "pencil")
        assert main.invoke(["user", "credential", "ann@example"]) == 0
        printed = capsys.readouterr().out
        Path("walstream.toml").write_text(printed, encoding="utf-8")
        assert printed.startswith('[security.users]\n"ann@example" = "SCRAM-SHA-256$')
        assert parse_credential(printed.split('"')[3]).matches("pencil")
        assert main.invoke(["config", "explain", "--changed"]) == 0

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("secret").write_text("pencil\n", encoding="utf-8")
        arguments = ["user", "credential", "ann", "--mechanism", "SCRAM-SHA-512", "--password-file", "secret"]
        assert main.invoke([*arguments, "-o", "json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert (made["name"], made["mechanism"]) == ("ann", "SCRAM-SHA-512")
        assert parse_credential(made["credential"]).matches("pencil")


def test_pairs() -> None:
    assert pairs(["a=1", "b=x=y"], "--set", "") == {"a": "1", "b": "x=y"}
    with pytest.raises(UsageError):
        pairs(["=1"], "--set", "a=1")


def test_a_dangerous_act_wants_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    confirm_name("orders", "orders", "This deletes.")
    with pytest.raises(UsageError, match="Nothing was done"):
        confirm_name("orders", "order", "This deletes.")
    monkeypatch.setattr(typer, "prompt", lambda *_, **__: "orders")
    confirm_name("orders", None, "This deletes.")
