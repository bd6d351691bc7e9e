"""The WalStream service: its three calls, and the streams that are open.

Owns what a call means: who may make it, what it is answered with, how its errors are told. The streams are in
`subscription`, acknowledgements in `ack_log` and `watermarks`, entries come from `reading`. Responses of Subscribe are
bytes already and go out as they are.

An error ends a stream twice: in a last WalResponse, as the RFC has it, and in the status of the call, with its code and
with where to resume in the trailing metadata. Nothing is ever left out of a stream without one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from walstream import logs
from walstream.config import FeedConfig
from walstream.error_codes import codes
from walstream.errors import AckRefused, UsageError, WalstreamError
from walstream.feed import wal_pb2
from walstream.feed.auth.auth import Authenticator
from walstream.feed.auth.identity import Identity, Session
from walstream.feed.service.ack_log import AckLog, now_ms
from walstream.feed.service.batching import SharedCuts
from walstream.feed.service.demand import Demand
from walstream.feed.service.places import Places
from walstream.feed.service.responses import error_response, shown
from walstream.feed.service.resume import resume_token
from walstream.feed.service.sources import extent, open_source
from walstream.feed.service.subscription import ClientGone, Sent, StreamFailed, Subscription, Surroundings
from walstream.feed.service.telling import telling, told
from walstream.feed.service.watermarks import Subscriber, Watermarks
from walstream.positions import GlobalLsn

if TYPE_CHECKING:
    from walstream.feed.reading.reading import Reading

log = logs.get(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
M = TypeVar("M", bound=Message)

SERVICE: Final = wal_pb2.DESCRIPTOR.services_by_name["WalStream"].full_name

CHECK_S: Final = 0.25
"""How often streams are looked at for having to end."""

HEAD_WAIT_S: Final = 1.0
HEAD_LOOK_S: Final = 0.02
"""How long an acknowledgement waits for this feed to see what another feed has sent already."""


class Service:
    """Answers the calls of one feed."""

    def __init__(
        self, config: FeedConfig, reading: Reading, auth: Authenticator, marks: Watermarks, executor: Executor
    ) -> None:
        self.config = config
        self.reading = reading
        self.marks = marks
        self.streams: dict[int, Subscription] = {}
        self._by_subscriber: dict[Subscriber, dict[int, Subscription]] = {}
        self.sent = Sent()
        self.cuts = SharedCuts()
        self.ends: Counter[str] = Counter()
        """How many streams ended with which status."""
        self.calls: Counter[tuple[str, str]] = Counter()
        """How many calls were answered, by method and status."""
        self._auth = auth
        self._acks: AckLog | None = None
        self._numbers = itertools.count(1)
        self._places = Places(config)
        self.ending = 0
        """Streams that have ended and whose subscribers have not taken that yet."""
        self._stopping: WalstreamError | None = None
        self._around = Surroundings(
            reading=reading,
            cuts=self.cuts,
            executor=executor,
            heartbeat_s=config.heartbeat_ms / 1000,
            sent=self.sent,
            watermark=lambda demand: self.watermark(demand.subscriber),
            on_sent=self._note_sent,
        )

    def use(self, acks: AckLog) -> None:
        """Take the log of acknowledgements, which in its turn tells this service of them."""
        self._acks = acks

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a server calls. Requests come as bytes: nothing of them is read before it is known who calls."""
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Subscribe": grpc.unary_stream_rpc_method_handler(self._subscribe),
                "Ack": unary(self._ack, response_serializer=wal_pb2.AckResponse.SerializeToString),
                "GetLSN": unary(self._get_lsn, response_serializer=wal_pb2.GetLSNResponse.SerializeToString),
            },
        )

    # Subscribe

    async def _subscribe(self, request: bytes, context: Context) -> None:
        with ExitStack() as place:
            try:
                stream = await self._open(request, context, place)
            except WalstreamError as refusal:
                place.close()
                await context.write(error_response(refusal.message))
                await self._abort(context, "Subscribe", refusal)
            await self._stream(stream, context)

    async def _stream(self, stream: Subscription, context: Context) -> None:
        try:
            # Only the client ends a stream without an error, and it does so by cancelling this.
            error = await stream.run(context.write)
        finally:
            self._close(stream)
        if isinstance(error, ClientGone):
            return
        error = told(error, stream.demand.subscriber.role)
        # What the call was given it cannot take back, and holds until the client takes it or is gone. Meanwhile the
        # stream keeps its place: so many messages can be held, and no more.
        self.ending += 1
        try:
            if await stream.is_writable():
                await context.write(error_response(error.message))
                await self._abort(context, "Subscribe", error, stream)
        finally:
            self.ending -= 1
            stream.abandon()

    async def _open(self, request: bytes, context: Context, place: ExitStack) -> Subscription:
        identity = await self._auth.authenticate(context.invocation_metadata() or ())
        with telling(identity.role):
            return await self._open_for(identity, request, context, place)

    async def _open_for(self, identity: Identity, request: bytes, context: Context, place: ExitStack) -> Subscription:
        demand = Demand.of(_read(wal_pb2.SubscribeRequest, request), identity, self.config)
        if self._stopping is not None:
            raise self._stopping
        place.enter_context(self._places.taken(identity.tenant))
        await self._make_room(demand.subscriber)
        acked, covered = self.marks.acked(demand.subscriber), self.marks.covered(demand.subscriber)
        opened = await open_source(self.reading, demand, acked, covered)
        bounds = demand.bounds(self.config)
        stream = Subscription(next(self._numbers), demand, Session(identity), opened, bounds, self._around)
        self.streams[stream.number] = stream
        self._by_subscriber.setdefault(demand.subscriber, {})[stream.number] = stream
        self.marks.connect(demand.subscriber, stream.number, opened.start, now_ms(), demand.choice)
        # As it is now: an acknowledgement may have come while the source was opened.
        stream.acknowledge(self.marks.acked(demand.subscriber))
        log.info(
            "subscribed",
            subscriber=str(demand.subscriber),
            stream=stream.number,
            role=identity.role,
            start=str(GlobalLsn(opened.start)),
            peer=context.peer(),
        )
        return stream

    def _note_sent(self, stream: Subscription, sent: int, delivered: int) -> None:
        self.marks.advance(stream.demand.subscriber, stream.number, sent, delivered)

    async def _make_room(self, subscriber: Subscriber) -> None:
        forgotten = self.marks.make_room(subscriber, now_ms())
        if forgotten is not None and self._acks is not None:
            log.info("subscriber forgotten", subscriber=str(forgotten))
            await self._acks.forget(forgotten)

    def _close(self, stream: Subscription) -> None:
        subscriber = stream.demand.subscriber
        del self.streams[stream.number]
        del self._by_subscriber[subscriber][stream.number]
        if not self._by_subscriber[subscriber]:
            del self._by_subscriber[subscriber]
        self.marks.disconnect(subscriber, stream.number, now_ms())
        error = stream.error or ClientGone("The client left.")
        status = "CANCELLED" if isinstance(error, ClientGone) else codes(error).grpc
        self.ends[status] += 1
        if isinstance(error, StreamFailed):
            log.error("stream failed", exc_info=error.__cause__)
        log.info(
            "subscription over",
            subscriber=str(subscriber),
            stream=stream.number,
            status=status,
            reason=error.message,
            entries=stream.sent.entries,
            resume=str(GlobalLsn(stream.resume)),
        )

    async def _abort(
        self, context: Context, method: str, error: WalstreamError, stream: Subscription | None = None
    ) -> NoReturn:
        code = codes(error).grpc
        self.calls[method, code] += 1
        trailing: list[tuple[str, str | bytes]] = [("walstream-error", type(error).__name__)]
        for name in ("oldest", "head"):
            if lsn := getattr(error, name, 0):
                trailing.append((f"walstream-{name}-lsn", str(GlobalLsn(lsn))))
        details = str(error)
        if stream is not None:
            resume = str(GlobalLsn(stream.resume))
            trailing += [("walstream-resume-lsn", resume), ("walstream-resume-token-bin", resume_token(stream.resume))]
            details += f" Resume at {resume}."
        await context.abort(grpc.StatusCode[code], details, tuple(trailing))

    # Ack and GetLSN

    async def _ack(self, request: bytes, context: Context) -> wal_pb2.AckResponse:
        return await self._answer("Ack", context, lambda identity: self._acknowledge(request, identity))

    async def _acknowledge(self, data: bytes, identity: Identity) -> wal_pb2.AckResponse:
        assert self._acks is not None
        request = _read(wal_pb2.AckRequest, data)
        if not request.ack_lsn:
            raise UsageError("ack_lsn is empty.", "It is the LSN of the last entry that was processed.")
        lsn = int(GlobalLsn.parse(request.ack_lsn))
        name = request.subscriber_id or identity.subject
        subscriber = Subscriber.of(identity.role, identity.tenant, name)
        # Whoever shows a newer token goes on, also when there is nothing new to acknowledge.
        self._renew(subscriber, identity)
        if lsn > self.marks.acked(subscriber):
            await self._check_sent(subscriber, lsn)
            await self._make_room(subscriber)
        acked = await self._acks.acknowledge(subscriber, lsn)
        return wal_pb2.AckResponse(watermark_lsn=shown(self.watermark(subscriber) or 0), acked_lsn=shown(acked))

    def _renew(self, subscriber: Subscriber, identity: Identity) -> None:
        for stream in self._streams_of(subscriber):
            if stream.session.identity.is_same_as(identity):
                stream.session.renew(identity)

    async def _check_sent(self, subscriber: Subscriber, lsn: int) -> None:
        """Refuse what was not sent to a subscriber that is connected here, and what nobody can have seen."""
        ceiling = self.marks.ceiling(subscriber)
        if ceiling is None:
            ceiling = await self._head(lsn)
        if lsn > ceiling:
            raise AckRefused(
                f"ack_refused: {GlobalLsn(lsn)} was not sent to {subscriber} yet",
                f"It was sent everything up to {GlobalLsn(ceiling)}." if ceiling else "Nothing is there yet.",
            )

    async def _head(self, lsn: int) -> int:
        """Return where the log ends, having waited for that to reach an LSN that another feed may have sent already."""
        if found := await self.reading.head_of_transactions(lsn):
            return found
        for _ in range(int(HEAD_WAIT_S / HEAD_LOOK_S)):
            if self._furthest() >= lsn:
                break
            await asyncio.sleep(HEAD_LOOK_S)
        return self._furthest()

    def _furthest(self) -> int:
        """Return the last LSN that a subscriber can have: of an entry, or told by a heartbeat."""
        return max(self.reading.head(), self.reading.resolved())

    async def _get_lsn(self, data: bytes, context: Context) -> wal_pb2.GetLSNResponse:
        async def look(identity: Identity) -> wal_pb2.GetLSNResponse:
            request = _read(wal_pb2.GetLSNRequest, data)
            subscriber = Subscriber(identity.role, identity.tenant, identity.subject)
            found = await extent(self.reading, request.framing, request.capture)
            return wal_pb2.GetLSNResponse(
                head_lsn=str(GlobalLsn(found.head)),
                oldest_lsn=str(GlobalLsn(found.oldest)),
                resolved_lsn=shown(found.resolved),
                watermark_lsn=shown(self.watermark(subscriber) or 0),
            )

        return await self._answer("GetLSN", context, look)

    async def _answer(self, method: str, context: Context, make: Callable[[Identity], Awaitable[T]]) -> T:
        try:
            identity = await self._auth.authenticate(context.invocation_metadata() or ())
            with telling(identity.role):
                made = await make(identity)
        except WalstreamError as error:
            await self._abort(context, method, error)
        self.calls[method, "OK"] += 1
        return made

    # What others ask and tell

    def watermark(self, subscriber: Subscriber) -> int | None:
        """Return the watermark that a subscriber is told: an admin that of all, others that of their tenant."""
        return self.marks.watermark(now_ms(), None if subscriber.role == "admin" else subscriber.tenant)

    def hear(self, subscriber: Subscriber) -> None:
        """Hear that a record about a subscriber has come: what it has acknowledged gives credit."""
        acked = self.marks.acked(subscriber)
        for stream in self._streams_of(subscriber):
            stream.acknowledge(acked)

    def end(self, subscriber: Subscriber, error: WalstreamError) -> None:
        """End the streams of a subscriber."""
        for stream in self._streams_of(subscriber):
            stream.end(error)

    def stop(self, error: WalstreamError) -> None:
        """End all streams and refuse new ones."""
        self._stopping = error
        for stream in self.streams.values():
            stream.end(error)

    def _streams_of(self, subscriber: Subscriber) -> list[Subscription]:
        return list(self._by_subscriber.get(subscriber, {}).values())

    async def check_streams(self) -> NoReturn:
        """End streams whose time has come, for as long as the feed runs."""
        while True:
            await asyncio.sleep(CHECK_S)
            now, now_s = time.monotonic(), time.time()
            for stream in list(self.streams.values()):
                try:
                    stream.check(now, now_s)
                except Exception as error:
                    # A bug that one stream meets must not let all the others outlive their tokens.
                    stream.end(StreamFailed(error))


def _read(kind: type[M], data: bytes) -> M:
    """Read a request. Raises UsageError."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise UsageError(f"The request is no {kind.__name__}.", "wal.proto says how it is written.") from None
