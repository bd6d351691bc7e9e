"""The keys in time: cached, read again when they are old or one is unknown, kept when the issuer is down."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from feed.issuer import Clock, JwksServer, Signer, jwks
from node.certificates import Authority
from walstream.config import FeedConfig
from walstream.error_codes import codes
from walstream.errors import ConfigError, UnreachableError
from walstream.feed.auth import keys as keys_module
from walstream.feed.auth.keys import DOCUMENT_BYTES_MAX, FileSource, Keys, UrlSource

OLD, NEW = Signer("EdDSA", "old"), Signer("EdDSA", "new")
CACHE_S, REFRESH_MIN_S = 300, 10


@pytest.fixture
def server() -> Iterator[JwksServer]:
    with JwksServer(jwks(OLD)) as started:
        yield started


async def opened(source: FileSource | UrlSource, clock: Clock) -> Keys:
    keys = Keys(source, CACHE_S, REFRESH_MIN_S, clock)
    await keys.open()
    return keys


async def has(keys: Keys, key_id: str) -> bool:
    return bool(await keys.find(key_id, "EdDSA"))


class TestAddress:
    async def test_one_reading_serves_until_the_cache_is_old(self, server: JwksServer) -> None:
        clock = Clock()
        keys = await opened(UrlSource(server.url), clock)
        for _ in range(50):
            assert await has(keys, "old")
        clock.now_s = CACHE_S - 1
        assert await has(keys, "old")
        assert server.requests == 1
        clock.now_s = CACHE_S
        assert await has(keys, "old")
        assert server.requests == 2

    async def test_an_unknown_key_is_looked_for(self, server: JwksServer) -> None:
        clock = Clock()
        keys = await opened(UrlSource(server.url), clock)
        server.document = jwks(OLD, NEW)
        clock.now_s = REFRESH_MIN_S
        assert await has(keys, "new")
        assert await has(keys, "old")
        assert server.requests == 2

    async def test_a_withdrawn_key_counts_no_more_after_the_next_reading(self, server: JwksServer) -> None:
        clock = Clock()
        keys = await opened(UrlSource(server.url), clock)
        server.document = jwks(NEW)
        clock.now_s = CACHE_S
        assert not await has(keys, "old")
        assert await has(keys, "new")

    async def test_a_storm_of_unknown_keys_does_not_reach_the_issuer(self, server: JwksServer) -> None:
        clock = Clock()
        keys = await opened(UrlSource(server.url), clock)
        for number in range(1_000):
            clock.now_s = number / 10
            assert not await has(keys, f"forged-{number}")
        # 100 seconds, at most one reading in each 10 of them, and the first.
        assert server.requests == 10

    async def test_many_at_once_wait_for_one_reading(self, server: JwksServer) -> None:
        clock = Clock()
        keys = await opened(UrlSource(server.url), clock)
        server.document, server.delay_s = jwks(OLD, NEW), 0.2
        clock.now_s = REFRESH_MIN_S
        assert all(await asyncio.gather(*(has(keys, "new") for _ in range(200))))
        assert server.requests == 2

    async def test_who_began_a_reading_may_leave_and_others_get_it(self, server: JwksServer) -> None:
        clock = Clock()
        keys = await opened(UrlSource(server.url), clock)
        server.document, server.delay_s = jwks(NEW), 0.2
        clock.now_s = REFRESH_MIN_S
        first = asyncio.create_task(has(keys, "new"))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(has(keys, "new"))
        await asyncio.sleep(0.05)
        first.cancel()
        assert await second
        assert server.requests == 2

    async def test_keys_stay_while_the_issuer_is_down(self, server: JwksServer) -> None:
        clock = Clock()
        keys = await opened(UrlSource(server.url), clock)
        server.stop()
        for moment in (CACHE_S, CACHE_S * 10):
            clock.now_s = moment
            assert await has(keys, "old")
            assert not await has(keys, "new")
        assert isinstance(keys.failure, UnreachableError)
        assert keys.age_s == CACHE_S * 10

    @pytest.mark.parametrize(
        ("status", "document"), [(500, b"{}"), (200, b"<html>"), (200, b'{"keys": []}'), (204, b"")]
    )
    async def test_keys_stay_when_the_answer_is_of_no_use(
        self, server: JwksServer, status: int, document: bytes
    ) -> None:
        clock = Clock()
        keys = await opened(UrlSource(server.url), clock)
        good, server.status, server.document = server.document, status, document
        clock.now_s = CACHE_S
        assert await has(keys, "old")
        assert keys.failure is not None
        server.status, server.document = 200, good
        clock.now_s = CACHE_S + REFRESH_MIN_S
        assert await has(keys, "old")
        assert keys.failure is None

    async def test_tries_are_apart_while_the_issuer_is_down(self, server: JwksServer) -> None:
        clock = Clock()
        keys = await opened(UrlSource(server.url), clock)
        server.status = 503
        for tenth in range(200):
            clock.now_s = CACHE_S + tenth / 10
            assert await has(keys, "old")
        assert server.requests == 3

    async def test_without_any_keys_it_is_not_the_token_that_is_at_fault(self, server: JwksServer) -> None:
        clock = Clock()
        server.status = 503
        keys = Keys(UrlSource(server.url), CACHE_S, REFRESH_MIN_S, clock)
        with pytest.raises(UnreachableError, match="status 503"):
            await keys.open()
        for _ in range(3):
            with pytest.raises(UnreachableError) as caught:
                await keys.find("old", "EdDSA")
            assert codes(caught.value).grpc == "UNAVAILABLE"
        assert server.requests == 1
        server.status = 200
        clock.now_s = REFRESH_MIN_S
        assert await has(keys, "old")


class TestEncrypted:
    def test_only_a_certificate_that_is_trusted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        authority = Authority(tmp_path)
        pair = authority.server()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        with JwksServer(jwks(OLD), context) as server:
            with pytest.raises(UnreachableError, match="certificate verify failed"):
                UrlSource(server.url).read()
            monkeypatch.setenv("SSL_CERT_FILE", authority.certificate)
            assert UrlSource(server.url).read() == jwks(OLD)


class TestAnswers:
    def test_redirects_are_not_followed(self, server: JwksServer) -> None:
        with JwksServer(jwks(NEW)) as other:
            server.status, server.location = 302, other.url
            with pytest.raises(UnreachableError, match="status 302"):
                UrlSource(server.url).read()
            assert other.requests == 0

    def test_size(self, server: JwksServer) -> None:
        server.document = b" " * DOCUMENT_BYTES_MAX
        assert len(UrlSource(server.url).read()) == DOCUMENT_BYTES_MAX
        server.document += b" "
        with pytest.raises(ConfigError, match="larger than"):
            UrlSource(server.url).read()

    def test_silence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keys_module, "TIMEOUT_S", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            begun_s = time.monotonic()
            with pytest.raises(UnreachableError, match="does not answer: timed out"):
                UrlSource(f"http://127.0.0.1:{silent.getsockname()[1]}/").read()
            assert time.monotonic() - begun_s < 3

    def test_nobody_there(self) -> None:
        with pytest.raises(UnreachableError, match="Connection refused") as caught:
            UrlSource("http://127.0.0.1:1/").read()
        assert caught.value.hint == "feed.auth.jwks names it."

    def test_what_is_not_http(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            source = UrlSource(f"http://127.0.0.1:{server.getsockname()[1]}/")

            async def answer_nonsense() -> None:
                reading = asyncio.create_task(asyncio.to_thread(source.read))
                peer, _ = await asyncio.to_thread(server.accept)
                with peer:
                    peer.sendall(b"220 mail.example.org ESMTP\r\n")
                with pytest.raises(UnreachableError):
                    await reading

            asyncio.run(answer_nonsense())


class TestFile:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        file = tmp_path / "jwks.json"
        file.write_bytes(jwks(OLD))
        return file

    @staticmethod
    def write(file: Path, document: bytes) -> None:
        file.write_bytes(document)

    @staticmethod
    def move_away(file: Path) -> None:
        file.rename(file.with_suffix(".away"))

    @staticmethod
    def replace(file: Path, document: bytes) -> None:
        beside = file.with_suffix(".new")
        beside.write_bytes(document)
        beside.replace(file)

    async def test_a_change_counts_at_once(self, file: Path) -> None:
        keys = await opened(FileSource(file), Clock())
        assert await has(keys, "old")
        self.replace(file, jwks(NEW))
        # The clock stands still: neither the cache nor the least time between readings is waited for.
        assert await has(keys, "new")
        assert not await has(keys, "old")

    async def test_written_in_place(self, file: Path) -> None:
        keys = await opened(FileSource(file), Clock())
        self.write(file, jwks(OLD, NEW))
        assert await has(keys, "new")

    async def test_a_broken_file_changes_nothing_and_is_read_once(self, file: Path) -> None:
        keys = await opened(FileSource(file), Clock())
        self.replace(file, b'{"keys": [')
        reads = count_reads(keys)
        for _ in range(20):
            assert await has(keys, "old")
        assert len(reads) == 1
        assert isinstance(keys.failure, ConfigError)
        self.replace(file, jwks(NEW))
        assert await has(keys, "new")
        assert keys.failure is None

    async def test_a_file_that_is_gone_changes_nothing(self, file: Path) -> None:
        clock = Clock()
        keys = await opened(FileSource(file), clock)
        self.move_away(file)
        clock.now_s = CACHE_S
        assert await has(keys, "old")
        self.write(file, jwks(NEW))
        assert await has(keys, "new")

    async def test_no_file_at_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file") as caught:
            await opened(FileSource(tmp_path / "none.json"), Clock())
        assert codes(caught.value).exit == 2

    async def test_size(self, file: Path) -> None:
        self.write(file, b" " * (DOCUMENT_BYTES_MAX + 1))
        with pytest.raises(ConfigError, match="larger than"):
            await opened(FileSource(file), Clock())

    def test_has_changed(self, file: Path) -> None:
        source = FileSource(file)
        assert source.has_changed()
        source.read()
        assert not source.has_changed()
        os.utime(file, ns=(1, 1))
        assert source.has_changed()


def count_reads(keys: Keys) -> list[None]:
    reads: list[None] = []
    source = keys._source
    read = source.read

    def counted() -> bytes:
        reads.append(None)
        return read()

    source.read = counted  # type: ignore[method-assign]
    return reads


class TestConfiguration:
    def config(self, jwks: str, **more: object) -> FeedConfig:
        return FeedConfig.model_validate({"auth": {"jwks": jwks}, **more})

    def test_keys_are_needed(self) -> None:
        with pytest.raises(ConfigError, match=r"feed\.auth\.jwks is not set") as caught:
            Keys.of(FeedConfig())
        assert "walstream token mint" in caught.value.hint

    @pytest.mark.parametrize("url", ["http://keys.example.org/", "HTTP://10.0.0.1:80/jwks", "http://0.0.0.0/"])
    def test_http_beyond_loopback_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigError, match="not encrypted"):
            Keys.of(self.config(url))
        assert Keys.of(self.config(url, allow_insecure=True))

    @pytest.mark.parametrize("url", ["https://keys.example.org/", "http://127.0.0.1:8080/jwks", "http://localhost/"])
    def test_https_and_loopback(self, url: str) -> None:
        assert Keys.of(self.config(url))

    async def test_a_path(self, tmp_path: Path) -> None:
        (tmp_path / "k.json").write_bytes(jwks(OLD))
        keys = Keys.of(self.config(str(tmp_path / "k.json")))
        await keys.open()
        assert await has(keys, "old")
