"""TLS and mutual TLS with a real server and a real client, certificates that change, and files that are of no use."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from feed.issuer import Signer, jwks
from node.certificates import Authority, Pair
from walstream.config import FeedAuthConfig, FeedConfig, FeedTlsConfig
from walstream.error_codes import codes
from walstream.errors import ConfigError, WalstreamError
from walstream.feed.auth.auth import Authenticator
from walstream.feed.auth.tls import ServerFiles, check_listener, client_credentials, listen, server_credentials

METHOD = "/test.Who/AmI"
FAR_S = 4_000_000_000


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.server()


@pytest.fixture(scope="module")
def client_pair(authority: Authority) -> Pair:
    return authority.client("client", "/CN=replica")


def tls(pair: Pair, **more: Any) -> FeedTlsConfig:
    return FeedTlsConfig(certificate=pair.certificate, key=pair.key, **more)


@asynccontextmanager
async def serving(config: FeedConfig, authenticator: Authenticator | None = None) -> AsyncIterator[str]:
    """Run a server that answers with who asks, and give its address."""

    async def who(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        if authenticator is None:
            return b"nobody asked"
        try:
            identity = await authenticator.authenticate(context.invocation_metadata() or ())
            return f"{identity.role} {identity.may_read(request.decode()) or 'all'}".encode()
        except WalstreamError as error:
            await context.abort(grpc.StatusCode[codes(error).grpc], str(error))
            raise

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(who)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Who", {"AmI": handler}),))
    port = listen(server, config)
    await server.start()
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(None)


async def ask(channel: grpc.aio.Channel, request: bytes = b"", token: str = "") -> str:
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    async with channel:
        answer: bytes = await channel.unary_unary(METHOD)(request, metadata=metadata, timeout=10)
        return answer.decode()


def secure(address: str, ca: str, certificate: str = "", key: str = "") -> grpc.aio.Channel:
    return grpc.aio.secure_channel(address, client_credentials(ca, certificate, key))


async def refused(channel: grpc.aio.Channel) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(channel)
    return caught.value.code()


class TestOnTheWire:
    async def test_tls(self, authority: Authority, pair: Pair, tmp_path: Path) -> None:
        stranger = Authority(tmp_path / "stranger")
        async with serving(FeedConfig(port=0, tls=tls(pair))) as address:
            assert await ask(secure(address, authority.certificate)) == "nobody asked"
            assert await refused(secure(address, stranger.certificate)) == grpc.StatusCode.UNAVAILABLE
            assert await refused(grpc.aio.insecure_channel(address)) == grpc.StatusCode.UNAVAILABLE

    async def test_mutual_tls(self, authority: Authority, pair: Pair, client_pair: Pair, tmp_path: Path) -> None:
        mine = Authority(tmp_path / "mine").client("client", "/CN=replica")
        given = tls(pair, client_ca=authority.certificate, client_auth="required")
        async with serving(FeedConfig(port=0, tls=given)) as address:
            with_certificate = secure(address, authority.certificate, client_pair.certificate, client_pair.key)
            assert await ask(with_certificate) == "nobody asked"
            assert await refused(secure(address, authority.certificate)) == grpc.StatusCode.UNAVAILABLE
            by_another = secure(address, authority.certificate, mine.certificate, mine.key)
            assert await refused(by_another) == grpc.StatusCode.UNAVAILABLE

    async def test_without_tls_on_loopback(self) -> None:
        async with serving(FeedConfig(port=0)) as address:
            assert await ask(grpc.aio.insecure_channel(address)) == "nobody asked"

    async def test_tokens(self, authority: Authority, pair: Pair, tmp_path: Path) -> None:
        signer = Signer()
        write(tmp_path / "jwks.json", jwks(signer))
        config = FeedConfig(port=0, tls=tls(pair), auth=FeedAuthConfig(jwks=str(tmp_path / "jwks.json")))
        authenticator = Authenticator.of(config)
        await authenticator.open()
        replica, admin = signer.token(exp=FAR_S), signer.token(exp=FAR_S, role="admin")
        async with serving(config, authenticator) as address:

            def channel() -> grpc.aio.Channel:
                return secure(address, authority.certificate)

            assert await ask(channel(), token=replica) == "replication acme"
            assert await ask(channel(), token=admin) == "admin all"
            assert await ask(channel(), b"blue", admin) == "admin blue"
            assert await refused(channel()) == grpc.StatusCode.UNAUTHENTICATED
            for request, token, status in (
                (b"blue", replica, grpc.StatusCode.PERMISSION_DENIED),
                (b"", signer.token(exp=1), grpc.StatusCode.UNAUTHENTICATED),
                (b"", Signer().token(exp=FAR_S, role="admin"), grpc.StatusCode.UNAUTHENTICATED),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(channel(), request, token)
                assert caught.value.code() == status
            # As gRPC's own clients attach a token.
            both = grpc.composite_channel_credentials(
                client_credentials(authority.certificate), grpc.access_token_call_credentials(admin)
            )
            assert await ask(grpc.aio.secure_channel(address, both)) == "admin all"

    async def test_a_renewed_certificate_counts_for_the_next_connection(self, pair: Pair, tmp_path: Path) -> None:
        old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
        files = Pair(str(tmp_path / "server.pem"), str(tmp_path / "server.key"))
        copy(old.server(), files)
        async with serving(FeedConfig(port=0, tls=tls(files))) as address:
            assert await ask(secure(address, old.certificate)) == "nobody asked"
            # A certificate whose key is not there yet, then both, then nonsense.
            shutil.copy(new.server().certificate, files.certificate)
            assert await ask(secure(address, old.certificate)) == "nobody asked"
            copy(new.server(), files)
            assert await ask(secure(address, new.certificate)) == "nobody asked"
            assert await refused(secure(address, old.certificate)) == grpc.StatusCode.UNAVAILABLE
            write(Path(files.certificate), b"nonsense")
            assert await ask(secure(address, new.certificate)) == "nobody asked"

    async def test_a_port_that_is_taken(self) -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        port = listen(server, FeedConfig(port=0))
        await server.start()
        other = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
            listen(other, FeedConfig(port=port))
        await other.stop(None)
        await server.stop(None)


def copy(source: Pair, target: Pair) -> None:
    shutil.copy(source.certificate, target.certificate)
    shutil.copy(source.key, target.key)


def write(file: Path, contents: bytes) -> None:
    file.write_bytes(contents)


class TestListener:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"])
    def test_loopback(self, host: str) -> None:
        check_listener(FeedConfig(host=host))

    @pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.168.1.1", "feed.example.org"])
    def test_beyond_it(self, host: str, pair: Pair) -> None:
        with pytest.raises(ConfigError) as caught:
            check_listener(FeedConfig(host=host))
        assert "[feed.tls] lacks certificate and key" in caught.value.message
        assert "allow_insecure = true in [feed]" in caught.value.hint
        check_listener(FeedConfig(host=host, allow_insecure=True))
        check_listener(FeedConfig(host=host, tls=tls(pair)))

    async def test_addresses_of_the_sixth_version(self) -> None:
        for host in ("::1", "[::1]"):
            server = grpc.aio.server()
            assert listen(server, FeedConfig(host=host, port=0)) > 0
            await server.stop(None)


class TestFiles:
    def refuse(self, config: FeedTlsConfig) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            server_credentials(config)
        return caught.value

    def test_without_tls(self) -> None:
        assert server_credentials(FeedTlsConfig()) is None

    def test_missing(self, pair: Pair, tmp_path: Path) -> None:
        gone = str(tmp_path / "gone.pem")
        error = self.refuse(FeedTlsConfig(certificate=gone, key=pair.key))
        assert error.message == f"feed.tls.certificate {gone} cannot be read: No such file or directory."
        assert "feed.tls.key" in self.refuse(FeedTlsConfig(certificate=pair.certificate, key=gone)).message
        assert "feed.tls.client_ca" in self.refuse(tls(pair, client_ca=gone, client_auth="required")).message

    def test_swapped(self, pair: Pair) -> None:
        error = self.refuse(FeedTlsConfig(certificate=pair.key, key=pair.certificate))
        assert "holds no certificate" in error.message
        assert "PEM" in error.hint

    def test_key_of_another_certificate(self, authority: Authority, pair: Pair) -> None:
        other = authority.server("other")
        error = self.refuse(FeedTlsConfig(certificate=pair.certificate, key=other.key))
        assert error.message == f"feed.tls.key {other.key} does not belong to the certificate {pair.certificate}."

    def test_no_key(self, pair: Pair) -> None:
        error = self.refuse(FeedTlsConfig(certificate=pair.certificate, key=pair.certificate))
        assert "holds no private key" in error.message

    def test_encrypted_key(self, pair: Pair, tmp_path: Path) -> None:
        locked = tmp_path / "locked.key"
        command = ["openssl", "pkcs8", "-topk8", "-in", pair.key, "-out", str(locked), "-passout", "pass:secret"]
        subprocess.run(command, check=True, capture_output=True)
        error = self.refuse(FeedTlsConfig(certificate=pair.certificate, key=str(locked)))
        assert "is encrypted" in error.message

    def test_client_files(self, authority: Authority, client_pair: Pair, tmp_path: Path) -> None:
        assert client_credentials()
        assert client_credentials(authority.certificate, client_pair.certificate, client_pair.key)
        for arguments, said in (
            (("", client_pair.certificate, ""), "together"),
            ((str(tmp_path / "none"), "", ""), "The authority"),
            ((authority.certificate, client_pair.certificate, authority.pair.key), "The key"),
        ):
            with pytest.raises(ConfigError, match=said):
                client_credentials(*arguments)

    def test_read_again_only_when_changed(self, authority: Authority, tmp_path: Path) -> None:
        files = Pair(str(tmp_path / "server.pem"), str(tmp_path / "server.key"))
        copy(authority.server("first"), files)
        watched = ServerFiles(tls(files))
        watched.read()
        assert watched.renew() is None
        copy(authority.server("second"), files)
        assert watched.renew() is not None
        assert watched.renew() is None
        Path(files.key).unlink()
        assert watched.renew() is None
        copy(authority.server("third"), files)
        assert watched.renew() is not None


class TestConfiguration:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"certificate": "a"}, "together"),
            ({"key": "a"}, "together"),
            ({"client_ca": "a"}, "needs certificate"),
            ({"certificate": "a", "key": "b", "client_ca": "c"}, "asks nobody"),
            ({"certificate": "a", "key": "b", "client_auth": "required"}, "needs client_ca"),
        ],
    )
    def test_contradictions(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            FeedTlsConfig(**given)
