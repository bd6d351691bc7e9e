"""From a frame to its response: find the API, decode, call the handler, encode; and turn every failure into an answer.

Three kinds of failure, each with one end. A peer that breaks the protocol (`ProtocolError`) is disconnected. A request
that cannot be granted (any other `WalstreamError`) is answered with its code where the response has a place for one. A
bug of ours is logged once with the name of its API and answered like the second kind, with UNKNOWN_SERVER_ERROR. A
response without a place for a code closes the connection instead: the client must not wait for nothing.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

from walstream import logs
from walstream.error_codes import codes
from walstream.errors import NotAuthorized, ProtocolError, UnsupportedVersion, WalstreamError
from walstream.node.api import Api
from walstream.node.api.produce import produce
from walstream.node.api.sasl import raw_token
from walstream.node.api.versions import API_VERSIONS, unsupported_version
from walstream.node.context import Context, Node
from walstream.node.framing import held_bytes
from walstream.node.wire import Buffer, Header, Reply, Source, decode_request, encode_response, read_header

if TYPE_CHECKING:
    from walstream.node.connection import Connection
    from walstream.node.slots import Slot

log = logs.get(__name__)

PRODUCE_KEY = b"\x00\x00"
CLIENT_ID_CHARACTERS_MAX = 100
"""How much of a client's id is kept: it is for logs and metrics, and clients may send 32 KB of it."""


class Dispatcher:
    """Hands frames to handlers on behalf of the connections."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def is_pipelined(self, connection: Connection, frame: bytearray) -> bool:
        """Say whether the frame is a produce request of somebody who may send one."""
        return frame[:2] == PRODUCE_KEY and not connection.must_authenticate and not connection.takes_raw_tokens

    def handle_now(self, connection: Connection, frame: bytearray, slot: Slot) -> None:
        """Handle a produce request. Its bytes stay counted until the disk has them, or the request is refused."""
        node = self._node
        try:
            header = read_header(frame)
            self._find(header)
            context = self._context(connection, header)
            produce(context, frame, header, slot)
        except Exception as error:
            node.budget.give(held_bytes(frame))
            slot.fill([])
            if not isinstance(error, WalstreamError):
                log.exception("request failed", api="Produce", peer=connection.peer)
            connection.close(str(error))

    async def handle(self, connection: Connection, frame: bytearray) -> list[Buffer]:
        """Handle any other request. Raises WalstreamError when only closing the connection is left."""
        if connection.takes_raw_tokens:
            return await self._handle_raw_token(connection, frame)
        header = read_header(frame)
        if not self._node.security.may_call(connection.principal, header.api_key):
            raise NotAuthorized("The client has not authenticated.")
        if header.api_key == API_VERSIONS and header.version > self._node.apis[API_VERSIONS].max_version:
            reply = unsupported_version(self._node)
            return [encode_response(API_VERSIONS, 0, header.correlation_id, reply)]
        api = self._find(header)
        context = self._context(connection, header)
        connection.waits = api.waits
        started = time.perf_counter()
        try:
            return await self._answer(api, context, frame, header)
        finally:
            self._node.metrics.requests[api.key].observe(time.perf_counter() - started)

    async def _answer(self, api: Api, context: Context, frame: bytearray, header: Header) -> list[Buffer]:
        try:
            if api.answer is not None:
                return await self._answer_framed(api, context, frame, header)
            assert api.handler is not None
            reply = await api.handler(context, decode_request(frame, header))
            return [encode_response(api.key, header.version, header.correlation_id, reply)]
        except ProtocolError:
            raise
        except WalstreamError as error:
            return [_refusal(api, header, error)]
        except Exception as error:
            log.exception("request failed", api=api.name, version=header.version, peer=context.connection.peer)
            self._node.metrics.failures += 1
            return [_refusal(api, header, error)]

    async def _answer_framed(self, api: Api, context: Context, frame: bytearray, header: Header) -> list[Buffer]:
        assert api.answer is not None
        source = Source(memoryview(frame), header.position)
        is_flexible = header.version >= api.flexible_from
        if is_flexible:
            source.skip_tags()
        body = await api.answer(context, source)
        size = 4 + is_flexible + sum(map(len, body))
        return [struct.pack(">ii", size, header.correlation_id) + b"\x00" * is_flexible, *body]

    async def _handle_raw_token(self, connection: Connection, frame: bytearray) -> list[Buffer]:
        token = await raw_token(connection, bytes(frame))
        return [] if token is None else [struct.pack(">i", len(token)), token]

    def _find(self, header: Header) -> Api:
        api = self._node.apis.get(header.api_key)
        if api is None:
            raise UnsupportedVersion(f"API {header.api_key} is not offered.")
        if not api.min_version <= header.version <= api.max_version:
            raise UnsupportedVersion(
                f"{api.name} version {header.version} is not offered.",
                f"Versions {api.min_version} to {api.max_version} are.",
            )
        return api

    def _context(self, connection: Connection, header: Header) -> Context:
        connection.client_id = (header.client_id or "")[:CLIENT_ID_CHARACTERS_MAX]
        return Context(self._node, connection, header.version, connection.client_id)


def _refusal(api: Api, header: Header, error: Exception) -> Buffer:
    """Return the API's way to say that the whole request failed, or raise the error for the connection to be closed."""
    code = codes(error).kafka
    reply: Reply | None = api.refuse(header.version, code, str(error) if isinstance(error, WalstreamError) else "")
    if reply is None:
        raise error
    return encode_response(api.key, header.version, header.correlation_id, reply)
