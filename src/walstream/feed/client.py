"""A client of the feed: `Client("127.0.0.1:9193", token=…)`, typed and synchronous.

Owns the channel, the token of each call and what happens when a stream breaks; what arrives is read and proved in
`received`. A subscription that was connected resumes by itself behind what it has handed out: after the feed or the
network was away, after it was told to be too slow, and with a newer token when the old one has expired.

    with Client("127.0.0.1:9193", token_file="token") as client:
        for entry in client.subscribe(subscriber_id="billing"):
            handle(entry)
            client.ack(entry.lsn, "billing")        # rather every second than for every entry
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

import grpc

from walstream import errors
from walstream.errors import (
    AuthenticationFailed,
    EntryTooLarge,
    FeedError,
    LsnNotAvailable,
    NotAuthorized,
    SubscriberTooSlow,
    TokenExpired,
    TooManySubscriptions,
    UnreachableError,
    UsageError,
    WalstreamError,
)
from walstream.feed import wal_pb2
from walstream.feed.auth.tls import client_credentials
from walstream.feed.received import Batch, Entry, Heartbeat, Op, Positions, Receiver, Watermark
from walstream.feed.received import parse as parse_lsn
from walstream.feed.received import position as parse_start
from walstream.feed.received import positions as read_positions
from walstream.feed.service.batching import ENTRY_BYTES_MAX
from walstream.positions import GlobalLsn

__all__ = ["Acked", "Batch", "Client", "Entry", "Heartbeat", "Op", "Positions", "Subscription", "Watermark"]

Token = str | Callable[[], str]
Start = GlobalLsn | str | bytes | None
Framing = Literal["records", "transactions"]

BACKOFF_S: Final = (0.05, 10.0)
"""The first pause before a broken stream is resumed, and the longest."""

MESSAGE_BYTES_MAX: Final = ENTRY_BYTES_MAX + 1024 * 1024

_METHOD: Final = "/kdb.wal.v1.WalStream/"
_FRAMINGS: Final = {"records": wal_pb2.RECORDS, "transactions": wal_pb2.TRANSACTIONS}
_RESUMABLE: Final = (UnreachableError, SubscriberTooSlow, TooManySubscriptions, TokenExpired)
_BY_STATUS: Final[dict[grpc.StatusCode, type[WalstreamError]]] = {
    grpc.StatusCode.UNAVAILABLE: UnreachableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: UnreachableError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationFailed,
    grpc.StatusCode.PERMISSION_DENIED: NotAuthorized,
    grpc.StatusCode.OUT_OF_RANGE: LsnNotAvailable,
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.UNIMPLEMENTED: UsageError,
}


class Acked(NamedTuple):
    """The answer to an acknowledgement."""

    acked: GlobalLsn
    """Where this subscriber stands."""
    watermark: GlobalLsn
    """Where the slowest active one stands."""


class Client:
    """A channel to one feed. Close it, or use it as a context."""

    def __init__(
        self,
        address: str,
        *,
        token: Token | None = None,
        token_file: str | Path | None = None,
        tls: bool = False,
        tls_ca: str = "",
        tls_certificate: str = "",
        tls_key: str = "",
        timeout_s: float = 10.0,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        """Take `host:port`, and a token: itself, a function that returns one, or a file that is read for each call."""
        if (token is None) == (token_file is None):
            raise UsageError("A client of the feed needs a token.", "Give one of token and token_file.")
        self.address = address
        self.timeout_s = timeout_s
        self.message_bytes_max = message_bytes_max
        self._token = token
        self._token_file = token_file
        options = (
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.ping_timeout_ms", 10_000),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 5_000),
        )
        if tls or tls_ca or tls_certificate:
            credentials = client_credentials(tls_ca, tls_certificate, tls_key)
            self._channel = grpc.secure_channel(address, credentials, options)
        else:
            self._channel = grpc.insecure_channel(address, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all calls."""
        self._channel.close()

    def subscribe(
        self,
        start: Start = None,
        *,
        tenant: str = "",
        topics: Sequence[str] = (),
        key_prefix: str = "",
        framing: Framing = "records",
        capture: str = "",
        subscriber_id: str = "",
        batch_size: int = 0,
        credit: int = 0,
        compression: bool = True,
        watermarks: bool = False,
        reconnect: bool = True,
    ) -> Subscription:
        """Return a stream of entries.

        It begins at an LSN (inclusive) or a resume token, with "oldest" or "head"; without any, at the last LSN that
        the subscriber has acknowledged, which is delivered again, otherwise at the oldest.
        """
        request = wal_pb2.SubscribeRequest(
            tenant_filter=tenant,
            key_prefix_filter=key_prefix,
            batch_size_hint=batch_size,
            accept_compression=(wal_pb2.SNAPPY, wal_pb2.ZSTD) if compression else (),
            subscriber_id=subscriber_id,
            framing=_framing(framing),
            topics=topics,
            credit_entries=credit,
            accept_watermarks=watermarks,
            capture=capture,
            message_bytes_max=self.message_bytes_max,
        )
        return Subscription(self, request, start, reconnect=reconnect)

    def ack(self, lsn: GlobalLsn | str, subscriber_id: str = "") -> Acked:
        """Say that everything up to this LSN is processed; returns when that is durable. Raises AckRefused."""
        request = wal_pb2.AckRequest(ack_lsn=str(GlobalLsn(lsn)) if isinstance(lsn, int) else lsn)
        request.subscriber_id = subscriber_id
        answer = wal_pb2.AckResponse.FromString(self._unary("Ack", request.SerializeToString()))
        return Acked(parse_lsn(answer.acked_lsn), parse_lsn(answer.watermark_lsn))

    def lsn(self, framing: Framing = "records", capture: str = "") -> Positions:
        """Return where the log begins and ends: its records, or the transactions of a capture."""
        return self.positions(wal_pb2.GetLSNRequest(framing=_framing(framing), capture=capture))

    def positions(self, request: wal_pb2.GetLSNRequest) -> Positions:
        """Return the answer to a request of GetLSN."""
        return read_positions(wal_pb2.GetLSNResponse.FromString(self._unary("GetLSN", request.SerializeToString())))

    def _unary(self, method: str, request: bytes) -> bytes:
        call: Any = self._channel.unary_unary(_METHOD + method)
        try:
            answer: bytes = call(request, timeout=self.timeout_s, metadata=self.metadata())
        except grpc.RpcError as error:
            raise self.translated(error) from None
        return answer

    def stream(self, request: wal_pb2.SubscribeRequest) -> Any:
        """Begin a stream of responses, as bytes."""
        call: Any = self._channel.unary_stream(_METHOD + "Subscribe")
        return call(request.SerializeToString(), metadata=self.metadata())

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what every call carries: the token as it is now."""
        return (("authorization", f"Bearer {self.current_token()}"),)

    def current_token(self) -> str:
        """Return the token as it is now. Raises UsageError."""
        if self._token_file is not None:
            try:
                return Path(self._token_file).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise UsageError(f"The token file {self._token_file} cannot be read: {error.strerror}.") from None
        assert self._token is not None
        return self._token if isinstance(self._token, str) else self._token()

    def translated(self, error: Any) -> WalstreamError:
        """Return an error of gRPC as one of ours."""
        code, details = error.code(), error.details() or ""
        trailing = dict(error.trailing_metadata() or ())
        named = getattr(errors, str(trailing.get("walstream-error", "")), None)
        if isinstance(named, type) and issubclass(named, WalstreamError):
            told = named(details)
            for name in ("oldest", "head"):
                if text := trailing.get(f"walstream-{name}-lsn"):
                    setattr(told, name, parse_lsn(str(text)))
            return told
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
            return EntryTooLarge(f"An entry does not fit into a message: {details}.", "Raise message_bytes_max.")
        kind = _BY_STATUS.get(code, FeedError)
        if kind is UnreachableError:
            return kind(f"No feed answers at {self.address}: {details}.", "`walstream feed serve` starts one.")
        return kind(details or f"The feed answered {code.name}.")


def _framing(name: Framing) -> wal_pb2.Framing:
    if name not in _FRAMINGS:
        raise UsageError(f"There is no framing {name!r}.", "There are records and transactions.")
    return _FRAMINGS[name]


class Subscription:
    """A stream of entries; iterated again, it goes on behind the last. Close it, or use it as a context."""

    def __init__(self, client: Client, request: wal_pb2.SubscribeRequest, start: Start, *, reconnect: bool) -> None:
        self._client = client
        self._request = request
        self._reconnect = reconnect
        self._call: Any = None
        self._is_closed = False
        self._was_connected = False
        self._token = ""
        self._resume = 0
        if start == "head":
            # A place of its own rather than the word: a stream that breaks before its first entry would skip some.
            found = client.positions(wal_pb2.GetLSNRequest(framing=request.framing, capture=request.capture))
            start = GlobalLsn((min(found.head, found.resolved) if found.resolved else found.head) + 1)
        position = None if start in (None, "", "oldest") else parse_start(start)
        # What is asked for while nothing has come. The LSN 0 is a place like any other: a log that never lost anything
        # tells it as its oldest.
        self._begin = str(start or "") if position is None else str(GlobalLsn(position))
        self._receiver = Receiver(position or 0)

    @property
    def resume(self) -> GlobalLsn:
        """Where another subscription goes on behind what this one has handed out; 0: nothing has come yet."""
        return GlobalLsn(self._resume)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the stream; an iteration of it ends, too."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()

    def __iter__(self) -> Iterator[Entry]:
        """Yield entries, in the order of their LSNs."""
        for batch in self.batches():
            for entry in batch.entries:
                self._resume = entry.lsn + 1
                yield entry
            self._resume = batch.resume

    def batches(self) -> Iterator[Batch]:
        """Yield batches of entries."""
        for event in self.events():
            if isinstance(event, Batch):
                yield event

    def events(self) -> Iterator[Batch | Heartbeat | Watermark]:
        """Yield everything that comes: batches, heartbeats, watermarks."""
        pause_s = BACKOFF_S[0]
        if self._resume:
            # Iterated again: what came in a batch and was not handed out has to come once more.
            self._receiver = Receiver(self._resume)
        while not self._is_closed:
            try:
                for event in self._events():
                    self._was_connected, pause_s = True, BACKOFF_S[0]
                    self._resume = self._receiver.resume
                    yield event
            except WalstreamError as error:
                if not self._resumes_after(error):
                    raise
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(pause_s * 2, BACKOFF_S[1])

    def _events(self) -> Iterator[Batch | Heartbeat | Watermark]:
        client, receiver = self._client, self._receiver
        self._request.start_lsn = str(GlobalLsn(receiver.resume)) if receiver.resume else self._begin
        self._token = client.current_token()
        self._call = client.stream(self._request)
        try:
            for data in self._call:
                event = receiver.read(data)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            if self._is_closed:
                return
            raise client.translated(error) from None
        finally:
            self._call.cancel()
        raise UnreachableError(f"The feed at {client.address} ended the stream without saying why.")

    def _resumes_after(self, error: WalstreamError) -> bool:
        if not self._reconnect or not self._was_connected or not isinstance(error, _RESUMABLE):
            return False
        # The same token would be refused again.
        return not isinstance(error, TokenExpired) or self._client.current_token() != self._token
