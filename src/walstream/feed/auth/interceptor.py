"""Tokens for what the server answers beside the feed's own service: reflection.

Owns that no call goes without a token. The service itself authenticates each of its calls, because it needs to know who
makes it; what a library brings along does not ask, so it is asked for here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from walstream.error_codes import codes
from walstream.errors import WalstreamError
from walstream.feed.auth.auth import Authenticator

Context = grpc.aio.ServicerContext[Any, Any]
Q = TypeVar("Q")
A = TypeVar("A")


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through that carries a token, or whose service looks at tokens itself."""

    def __init__(self, auth: Authenticator, service: str) -> None:
        """Take the name of the service that authenticates its own calls."""
        self._auth = auth
        self._own = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Q, A] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Q, A] | None:
        """Return who answers a call."""
        if not handler_call_details.method.startswith(self._own):
            try:
                await self._auth.authenticate(handler_call_details.invocation_metadata)
            except WalstreamError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: WalstreamError) -> grpc.RpcMethodHandler[Any, Any]:
    """Return what answers any call with an error."""

    async def refuse(context: Context) -> NoReturn:
        await context.abort(grpc.StatusCode[codes(error).grpc], str(error))

    async def stream(_: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        await refuse(context)
        yield b""

    return grpc.stream_stream_rpc_method_handler(stream)
