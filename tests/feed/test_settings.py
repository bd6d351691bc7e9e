"""The feed's settings: what would let strangers in cannot be configured, and the refusal says why."""

from __future__ import annotations

import pytest

from walstream.config import FeedConfig, load
from walstream.config.feed import ASYMMETRIC
from walstream.errors import ConfigError


def refuse(**given: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(overrides={f"feed.{name.replace('__', '.')}": value for name, value in given.items()})
    return caught.value


def test_defaults() -> None:
    feed = load().config.feed
    assert (feed.host, feed.port, feed.topics, feed.cluster) == ("127.0.0.1", 9193, ("*",), "walstream")
    assert feed.auth.algorithms == ("EdDSA", "ES256", "RS256")
    assert (feed.auth.audience, feed.auth.issuer, feed.auth.clock_skew_s) == ("walstream", "", 30)
    assert not feed.allow_insecure


@pytest.mark.parametrize("name", ["none", "None", "NONE"])
def test_no_signature(name: str) -> None:
    error = refuse(auth__algorithms=["EdDSA", name])
    assert "anybody could write the token" in error.message
    assert "EdDSA | ES256" in error.hint


@pytest.mark.parametrize("name", ["HS256", "HS384", "HS512", "hs256"])
def test_symmetric_algorithms(name: str) -> None:
    assert "whoever can check a token can also make one" in refuse(auth__algorithms=name).message


@pytest.mark.parametrize("given", ["RS257", "ES256K", "eddsa", "*", "EdDSA ES256"])
def test_unknown_algorithms(given: str) -> None:
    assert "no algorithm that is known" in refuse(auth__algorithms=given).message


def test_algorithms() -> None:
    refuse(auth__algorithms=[])
    assert load(overrides={"feed.auth.algorithms": ", ".join(ASYMMETRIC)}).config.feed.auth.algorithms == ASYMMETRIC


@pytest.mark.parametrize(
    ("jwks", "said"),
    [
        ("file:///etc/jwks.json", "by its path"),
        ("ftp://example.org/", "by its path"),
        ("https://", "no host"),
        ("https://:8443/jwks", "no host"),
        ("https://user:secret@example.org/", "password in its address"),
        ("http://[::1/", "Invalid IPv6"),
    ],
)
def test_addresses_of_key_sets(jwks: str, said: str) -> None:
    assert said.lower() in refuse(auth__jwks=jwks).message.lower()


@pytest.mark.parametrize("jwks", ["keys/jwks.json", "https://auth.example.org/jwks", "HTTP://localhost:8080/jwks"])
def test_places_of_key_sets(jwks: str) -> None:
    assert load(overrides={"feed.auth.jwks": jwks}).config.feed.auth.jwks == jwks


@pytest.mark.parametrize("skew_s", [-1, 301])
def test_skew_is_bounded(skew_s: int) -> None:
    assert refuse(auth__clock_skew_s=skew_s).hint == "Allowed: integer from 0 to 300."


def test_a_cache_that_could_not_be_kept() -> None:
    assert "jwks_refresh_min_s is larger" in refuse(auth__jwks_cache_s=5).message


@pytest.mark.parametrize("cluster", ["", "a:b", "a b"])
def test_a_cluster_is_one_part_of_a_prefix(cluster: str) -> None:
    refuse(cluster=cluster)


def test_the_whole_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        FeedConfig().allow_insecure = True  # type: ignore[misc]
