"""Development tokens: a feed believes them, the key is for its owner alone, and rotation loses no token."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jwt import PyJWKSet

from walstream.config import FeedAuthConfig, FeedConfig
from walstream.errors import AuthenticationFailed, UsageError
from walstream.feed.auth import tokens as tokens_module
from walstream.feed.auth.auth import Authenticator, Identity
from walstream.feed.auth.tokens import EXPIRES_IN_S_MAX, LocalKeys, Wish, decoded

ADMIN = Wish("backup", "admin")
CONFIG = FeedAuthConfig()


@pytest.fixture
def keys(tmp_path: Path) -> LocalKeys:
    return LocalKeys(tmp_path / "a" / "b" / "feed-key.pem")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def believed(keys: LocalKeys, token: str, config: FeedAuthConfig = CONFIG) -> Identity:
    given = config.model_copy(update={"jwks": str(keys.jwks)})
    return await Authenticator.of(FeedConfig(auth=given)).verify(token)


async def test_a_feed_believes_them(keys: LocalKeys) -> None:
    now_s = time.time()
    token, claims = keys.mint(Wish("replica-7", "replication", "acme", 60), CONFIG, now_s)
    identity = await believed(keys, token)
    assert identity == Identity("replica-7", "replication", "acme", int(now_s) + 60 + 30, claims["jti"])


async def test_they_say_what_the_configuration_wants(keys: LocalKeys) -> None:
    config = FeedAuthConfig(audience="mine", issuer="me", role_claim="r", tenant_claim="t")
    token, claims = keys.mint(Wish("a", "replication", "acme"), config, time.time())
    assert (claims["aud"], claims["iss"], claims["r"], claims["t"]) == ("mine", "me", "replication", "acme")
    assert (await believed(keys, token, config)).tenant == "acme"
    with pytest.raises(AuthenticationFailed):
        await believed(keys, token)


def test_files(keys: LocalKeys) -> None:
    keys.mint(ADMIN, CONFIG, time.time())
    assert mode(keys.key) == 0o600
    assert mode(keys.jwks) == 0o644 & ~umask()
    assert sorted(path.name for path in keys.key.parent.iterdir()) == ["feed-jwks.json", "feed-key.pem"]
    published = keys.jwks.read_text(encoding="utf-8")
    assert "d" not in json.loads(published)["keys"][0]
    # Other programs read both: openssl the key, any JWT library the key set.
    subprocess.run(["openssl", "pkey", "-in", str(keys.key), "-noout"], check=True, capture_output=True)
    assert len(PyJWKSet.from_json(published).keys) == 1


def umask() -> int:
    before = os.umask(0o022)
    os.umask(before)
    return before


def test_the_key_is_made_once(keys: LocalKeys) -> None:
    first = decoded(keys.mint(ADMIN, CONFIG, 1)[0])[0]["kid"]
    before = keys.key.read_bytes()
    assert decoded(keys.mint(ADMIN, CONFIG, 1)[0])[0]["kid"] == first
    assert keys.key.read_bytes() == before
    assert [entry["kid"] for entry in keys.public()] == [first]


def test_tokens_differ(keys: LocalKeys) -> None:
    assert keys.mint(ADMIN, CONFIG, 1)[1]["jti"] != keys.mint(ADMIN, CONFIG, 1)[1]["jti"]


async def test_rotation_keeps_what_is_out_there_until_it_is_pruned(keys: LocalKeys) -> None:
    old, _ = keys.mint(ADMIN, CONFIG, time.time())
    made = keys.rotate()
    new, _ = keys.mint(ADMIN, CONFIG, time.time())
    assert decoded(new)[0]["kid"] == made["kid"] != decoded(old)[0]["kid"]
    assert mode(keys.key) == 0o600
    assert [entry["kid"] for entry in keys.public()] == [made["kid"], decoded(old)[0]["kid"]]
    assert await believed(keys, old)
    assert await believed(keys, new)
    assert keys.prune() == 1
    assert keys.prune() == 0
    assert await believed(keys, new)
    with pytest.raises(AuthenticationFailed, match="not known here"):
        await believed(keys, old)


async def test_a_running_feed_follows_rotation_and_pruning(keys: LocalKeys) -> None:
    old, _ = keys.mint(ADMIN, CONFIG, time.time())
    feed = Authenticator.of(FeedConfig(auth=FeedAuthConfig(jwks=str(keys.jwks))))
    await feed.open()
    assert await feed.verify(old)
    keys.rotate()
    assert await feed.verify(keys.mint(ADMIN, CONFIG, time.time())[0])
    assert await feed.verify(old)
    keys.prune()
    with pytest.raises(AuthenticationFailed):
        await feed.verify(old)


def test_a_key_set_that_was_lost_is_made_again(keys: LocalKeys) -> None:
    token, _ = keys.mint(ADMIN, CONFIG, 1)
    keys.jwks.unlink()
    keys.rotate()
    assert decoded(token)[0]["kid"] in [entry["kid"] for entry in keys.public()]


def test_a_key_is_published_before_it_signs(keys: LocalKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[str] = []
    save = tokens_module._save

    def noted(path: Path, contents: bytes, mode: int) -> None:
        saved.append(path.name)
        save(path, contents, mode)

    monkeypatch.setattr(tokens_module, "_save", noted)
    keys.mint(ADMIN, CONFIG, 1)
    keys.rotate()
    assert saved == ["feed-jwks.json", "feed-key.pem"] * 2


def test_after_a_crash_between_the_two_files(keys: LocalKeys) -> None:
    token, _ = keys.mint(ADMIN, CONFIG, 1)
    before = keys.key.read_bytes()
    keys.rotate()
    # The key set is written first: this is what a crash before the second write leaves behind.
    keys.key.write_bytes(before)
    again, _ = keys.mint(ADMIN, CONFIG, 1)
    assert decoded(again)[0]["kid"] == decoded(token)[0]["kid"]
    assert len(keys.public()) == 2


MINT = """
import sys
from pathlib import Path
from walstream.config import FeedAuthConfig
from walstream.feed.auth.tokens import LocalKeys, Wish

sys.stdin.read(1)
print(LocalKeys(Path(sys.argv[1])).mint(Wish("a", "admin"), FeedAuthConfig(), 1)[0])
"""


def test_many_at_once_make_one_key(keys: LocalKeys) -> None:
    command = [sys.executable, "-c", MINT, str(keys.key)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    # They wait for the end of their input, which comes to all of them at once.
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    tokens = [process.communicate(timeout=60)[0] for process in running]
    assert len({decoded(token)[0]["kid"] for token in tokens}) == 1
    assert len(keys.public()) == 1


class TestRefused:
    @pytest.mark.parametrize(
        ("wish", "said"),
        [
            (Wish("", "admin"), "subject"),
            (Wish("a", "replication"), "needs a tenant"),
            (Wish("a", "admin", "acme"), "all tenants"),
            (Wish("a", "admin", "", 0), "cannot last"),
            (Wish("a", "admin", "", EXPIRES_IN_S_MAX + 1), "cannot last"),
        ],
    )
    def test_wishes(self, keys: LocalKeys, wish: Wish, said: str) -> None:
        with pytest.raises(UsageError, match=said) as caught:
            keys.mint(wish, CONFIG, 1)
        assert caught.value.hint
        assert not keys.key.exists()

    @pytest.mark.parametrize("loose", [0o644, 0o640, 0o604])
    def test_a_key_that_others_can_read(self, keys: LocalKeys, loose: int) -> None:
        keys.mint(ADMIN, CONFIG, 1)
        keys.key.chmod(loose)
        with pytest.raises(UsageError, match="read by others") as caught:
            keys.mint(ADMIN, CONFIG, 1)
        assert "chmod 600" in caught.value.hint

    def test_another_kind_of_key(self, tmp_path: Path) -> None:
        key = tmp_path / "key.pem"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        key.chmod(0o600)
        with pytest.raises(UsageError, match="no Ed25519 key"):
            LocalKeys(key).mint(ADMIN, CONFIG, 1)
        key.write_bytes(b"nonsense")
        with pytest.raises(UsageError, match="no Ed25519 key"):
            LocalKeys(key).mint(ADMIN, CONFIG, 1)

    @pytest.mark.parametrize("document", [b"", b"[]", b'{"keys": 1}', b'{"keys": [1]}'])
    def test_a_key_set_that_is_none_is_left_alone(self, keys: LocalKeys, document: bytes) -> None:
        keys.mint(ADMIN, CONFIG, 1)
        keys.jwks.write_bytes(document)
        with pytest.raises(UsageError, match="is no key set"):
            keys.rotate()
        assert keys.jwks.read_bytes() == document

    def test_nothing_there(self, keys: LocalKeys) -> None:
        for act in (keys.public, keys.prune):
            with pytest.raises(UsageError, match="There is no key") as caught:
                act()
            assert "walstream token mint" in caught.value.hint
        assert not keys.key.parent.exists()

    def test_a_folder_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(UsageError, match="cannot be used"):
            LocalKeys(tmp_path / "file" / "key.pem").mint(ADMIN, CONFIG, 1)

    @pytest.mark.parametrize("token", ["", "a", "a.b", "a.b.c", "....", "\ud800.a.b"])
    def test_what_is_no_token(self, token: str) -> None:
        with pytest.raises(UsageError, match="no JSON Web Token"):
            decoded(token)
