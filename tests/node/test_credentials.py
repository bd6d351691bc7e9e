"""Credentials as text, and the preparation of names and passwords."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import ConfigError, UsageError
from walstream.node.credentials import Credentials, make_credential, parse_credential, saslprep

SALT = bytes.fromhex("5b6d99689d12358eeca04b141236fa81")
GOOD = make_credential("wonderland", "SCRAM-SHA-256", 4096, SALT)
GOOD_512 = make_credential("wonderland", "SCRAM-SHA-512", 4096, SALT)


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_credential_survives_being_text(mechanism: str) -> None:
    text = make_credential("wonderland", mechanism)
    credential = parse_credential(text)
    assert str(credential) == text
    assert (credential.mechanism, credential.iterations) == (mechanism, 16_384)
    assert credential.matches("wonderland")
    assert not credential.matches("Wonderland")
    assert make_credential("wonderland", mechanism) != text, "every salt is new"


def test_the_text_has_the_form_of_postgresql() -> None:
    # The keys are those of the example in RFC 7677.
    assert make_credential("pencil", "SCRAM-SHA-256", 4096, SALT) == (
        "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ=="
        "$WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY=:wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU="
    )


def test_secrets_stay_out_of_representations_and_errors() -> None:
    credential = parse_credential(GOOD)
    for secret in GOOD.replace("$", ":").split(":")[2:]:
        assert secret not in repr(credential)
    with pytest.raises(ConfigError) as refusal:
        Credentials({"alice": "my plain password"}, b"")
    assert "password" not in str(refusal.value)
    assert "walstream user credential" in refusal.value.hint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "form"),
        ("wonderland", "form"),
        (GOOD.replace("SCRAM-SHA-256", "SCRAM-SHA-1"), "form"),
        (GOOD.replace("SCRAM-SHA-256", "MD5"), "form"),
        (GOOD + "$", "form"),
        (GOOD + "\n", "base64"),
        (GOOD.replace("$4096:", "$4095:"), "iterations"),
        (GOOD.replace("$4096:", "$1000001:"), "iterations"),
        (GOOD.replace("$4096:", "$-4096:"), "form"),
        (GOOD.replace("$4096:", "$٤٠٩٦:"), "form"),
        (GOOD[:-1], "base64"),
        (GOOD[:-1] + "!", "base64"),
        (GOOD.replace("SCRAM-SHA-256", "SCRAM-SHA-512"), "length"),
    ],
)
def test_a_text_that_is_no_credential(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_credential(text)


@settings(deadline=None)
@given(st.text(max_size=100) | st.text("SCRAM-H25601$:=/+ab", max_size=100))
def test_garbage_is_no_credential(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_credential(text)


@pytest.mark.parametrize(
    ("password", "mechanism", "iterations"),
    [
        ("", "SCRAM-SHA-256", 4096),
        ("\u00ad", "SCRAM-SHA-256", 4096),
        ("bell\x07", "SCRAM-SHA-256", 4096),
        ("😀", "SCRAM-SHA-256", 4096),
        ("fine", "PLAIN", 4096),
        ("fine", "SCRAM-SHA-256", 4095),
        ("fine", "SCRAM-SHA-256", 1_000_001),
    ],
)
def test_no_credential_is_made(password: str, mechanism: str, iterations: int) -> None:
    with pytest.raises(UsageError):
        make_credential(password, mechanism, iterations)


@pytest.mark.parametrize(
    "users",
    [
        {"": GOOD},
        {"al\x07ice": GOOD},
        {"alice": []},
        {"alice": [GOOD, GOOD]},
        {"zo\u00eb": GOOD, "zoe\u0308": GOOD},
    ],
)
def test_users_that_cannot_be(users: dict[str, str | list[str]]) -> None:
    with pytest.raises(ConfigError):
        Credentials(users, b"")


def test_users_know_how_they_can_log_in() -> None:
    credentials = Credentials({"alice": [GOOD, GOOD_512], "bob": GOOD}, b"")
    assert list(credentials) == ["alice", "bob"]
    assert credentials.mechanisms("alice") == {"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"}
    assert credentials.mechanisms("bob") == {"PLAIN", "SCRAM-SHA-256"}
    assert credentials.mechanisms("mallory") == set()
    assert credentials.find("bob", "SCRAM-SHA-512")[1] is False


def test_decoys_take_after_real_users() -> None:
    shapes = {(4096, 8), (8192, 20)}
    credentials = Credentials(
        {f"u{n}": make_credential("x", "SCRAM-SHA-256", n, bytes(size)) for n, size in shapes}, b"secret"
    )
    for mechanism in ("SCRAM-SHA-256", "PLAIN"):
        decoys = [credentials.find(f"nobody {number}", mechanism)[0] for number in range(30)]
        assert {(decoy.iterations, len(decoy.salt)) for decoy in decoys} == shapes
        assert len({decoy.salt for decoy in decoys}) == len(decoys)
    assert Credentials({}, b"").find("nobody", "SCRAM-SHA-512")[0].iterations == 16_384


@pytest.mark.parametrize(
    ("text", "prepared"),
    [  # RFC 4013, section 3
        ("I\u00adX", "IX"),
        ("user", "user"),
        ("USER", "USER"),
        ("\u00aa", "a"),
        ("\u2168", "IX"),
        ("a\u00a0b", "a b"),
        ("\u0627\u0628", "\u0627\u0628"),
    ],
)
def test_saslprep(text: str, prepared: str) -> None:
    assert saslprep(text) == prepared


@pytest.mark.parametrize("text", ["\x07", "\x7f", "\u06271", "a\u0627", "\ue000", "\ufffd", "\U000e0001"])
def test_saslprep_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        saslprep(text)


@settings(deadline=None)
@given(st.text(max_size=50))
def test_saslprep_raises_nothing_else_and_settles(text: str) -> None:
    try:
        prepared = saslprep(text)
    except ValueError:
        return
    assert saslprep(prepared) == prepared
