"""`walstream token` as one types it: the token on stdout, everything else beside it."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from walstream.cli import main
from walstream.cli.token import DEFAULT_KEY

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: Capture, *arguments: str, code: int = 0) -> tuple[str, str]:
    assert main.invoke(["token", *arguments]) == code
    said = capsys.readouterr()
    return said.out, said.err


def in_json(capsys: Capture, *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "-o", "json")[0])


def test_mint_prints_the_token_and_nothing_else(capsys: Capture) -> None:
    out, err = run(capsys, "mint", "--subject", "replica-7", "--role", "replication", "--tenant", "acme")
    assert len(out.splitlines()) == 1
    assert out.count(".") == 2
    assert err == (
        ".walstream/feed-key.pem is made, and .walstream/feed-jwks.json to verify with: "
        "name that one in feed.auth.jwks.\n"
    )
    # The second time there is nothing to say.
    assert run(capsys, "mint", "--subject", "replica-7", "--tenant", "acme")[1] == ""


def test_mint_in_json(capsys: Capture) -> None:
    made = in_json(capsys, "mint", "--subject", "backup", "--role", "admin", "--expires-in", "12h")
    assert made["expires_at_ms"] == made["claims"]["exp"] * 1000
    assert made["claims"]["exp"] == made["claims"]["iat"] + 12 * 3600
    assert abs(made["claims"]["iat"] - time.time()) < 60
    shown = in_json(capsys, "show", made["token"])
    assert shown["claims"] == made["claims"]
    assert shown["header"]["alg"] == "EdDSA"
    assert shown["is_verified"] is False


def test_mint_follows_the_configuration(capsys: Capture) -> None:
    Path("walstream.toml").write_text('[feed.auth]\naudience = "mine"\n', encoding="utf-8")
    made = in_json(capsys, "mint", "--subject", "a", "--role", "admin", "--set", "feed.auth.role_claim=r")
    assert (made["claims"]["aud"], made["claims"]["r"]) == ("mine", "admin")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "Missing option '--subject'"),
        (("--subject", "a"), "error: The role replication needs a tenant.\nhint:  Name it with --tenant"),
        (("--subject", "a", "--role", "root"), "'root' is not one of"),
        (("--subject", "a", "--role", "admin", "--expires-in", "soon"), "'soon' is no length of time.\nhint:  Write"),
        (("--subject", "a", "--role", "admin", "--expires-in", "31d"), "cannot last for 2,678,400 seconds"),
        (("--subject", "a", "--role", "admin", "--expires-in", "0s"), "cannot last"),
    ],
)
def test_wrong_usage(capsys: Capture, arguments: tuple[str, ...], complaint: str) -> None:
    out, err = run(capsys, "mint", *arguments, code=2)
    assert out == ""
    assert complaint in err
    assert not DEFAULT_KEY.exists()


def test_jwks(capsys: Capture) -> None:
    assert "There is no key" in run(capsys, "jwks", code=2)[1]
    run(capsys, "mint", "--subject", "a", "--role", "admin")
    printed, _ = run(capsys, "jwks")
    assert json.loads(printed) == json.loads(Path(".walstream/feed-jwks.json").read_bytes())
    assert run(capsys, "jwks", "-o", "json")[0] == printed


def test_rotate_and_prune(capsys: Capture) -> None:
    old = in_json(capsys, "mint", "--subject", "a", "--role", "admin", "--key", "k.pem")
    out, err = run(capsys, "rotate", "--key", "k.pem")
    assert out == ""
    assert "from now on" in err
    rotated = in_json(capsys, "jwks", "--key", "k.pem")["keys"]
    assert len(rotated) == 2
    assert rotated[1]["kid"] == in_json(capsys, "show", old["token"])["header"]["kid"]
    pruned = in_json(capsys, "prune", "--key", "k.pem")
    assert (pruned["removed"], pruned["keys"]) == (1, rotated[:1])
    again = in_json(capsys, "rotate", "--key", "k.pem")
    assert again["key_id"] == again["keys"][0]["kid"]


def test_show(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    token, _ = run(capsys, "mint", "--subject", "replica-7", "--tenant", "acme")
    monkeypatch.setattr(sys, "stdin", io.StringIO(token))
    out, err = run(capsys, "show", "-")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(("not", "other", "signed")))
    assert (lines["subject"], lines["role"], lines["tenant"]) == ("replica-7", "replication", "acme")
    assert lines["issuer"] == "-"
    assert err == "Nothing of this was verified.\n"
    assert "This is no JSON Web Token" in run(capsys, "show", "nonsense", code=2)[1]


def test_show_commands_no_terminal(capsys: Capture) -> None:
    # Header {"alg":"none"}, claims {"sub":"\u001b[31m","exp":1e999,"aud":{"a":1}}.
    forged = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJcdTAwMWJbMzFtIiwiZXhwIjoxZTk5OSwiYXVkIjp7ImEiOjF9fQ."
    out, _ = run(capsys, "show", forged)
    assert "\x1b" not in out
    assert "\\x1b[31m" in out
