"""SaslHandshake and SaslAuthenticate: the requests by which a connection becomes somebody's.

A handshake names the mechanism and begins an exchange (`node/sasl`); authenticate requests carry its tokens until it is
done. After version 0 of the handshake the tokens come without request headers, as frames of their own: `raw_token`.

A connection authenticates once. A failure is answered after a delay, so that guessing is slow, and is the last thing
said on its connection. Tokens and passwords are never logged, and the peer learns no more than that it failed.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from walstream.error_codes import codes
from walstream.errors import AuthenticationFailed, IllegalSaslState
from walstream.logs import get
from walstream.node.context import Context, Peer
from walstream.node.credentials import PLAIN
from walstream.node.sasl import Step
from walstream.node.security import TLS
from walstream.node.wire import Message, Reply

log = get(__name__)

FAILURE_DELAY_MS = 300
"""How long a failed authentication waits for its answer: three guesses a second, and nobody mistypes faster."""

# Checking a PLAIN password costs milliseconds of hashing. One thread of its own, which releases the interpreter while
# it hashes, keeps a flood of guesses away from the event loop and from the threads that read the disk.
_hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="walstream-sasl")


async def sasl_handshake(context: Context, request: Message) -> Reply:
    """Begin an authentication by the mechanism that the client names."""
    peer, security = context.connection, context.node.security
    offered = list(security.mechanisms(is_tls=peer.is_tls))
    try:
        if peer.exchange is not None or _has_logged_in(peer):
            raise IllegalSaslState("The connection has begun to authenticate already.")
        peer.exchange = security.start(request.mechanism, is_tls=peer.is_tls)
    except AuthenticationFailed as error:
        await _fail(peer, error)
        return {"error_code": codes(error).kafka, "mechanisms": offered}
    peer.takes_raw_tokens = context.version == 0
    return {"error_code": 0, "mechanisms": offered}


async def sasl_authenticate(context: Context, request: Message) -> Reply:
    """Take the next token of the authentication on its way."""
    try:
        step = await _step(context.connection, request.auth_bytes)
    except AuthenticationFailed as error:
        return {"error_code": codes(error).kafka, "error_message": error.message, "auth_bytes": b""}
    return {"error_code": 0, "error_message": None, "auth_bytes": step.reply}


async def raw_token(peer: Peer, token: bytes) -> bytes | None:
    """Take a token that came as a bare frame and return the bare frame to answer; None: close without a word."""
    try:
        step = await _step(peer, token)
    except AuthenticationFailed:
        return None
    return step.reply


async def _step(peer: Peer, token: bytes) -> Step:
    exchange = peer.exchange
    try:
        if exchange is None:
            raise IllegalSaslState("No authentication is on its way: the handshake comes first.")
        if exchange.mechanism == PLAIN:
            step = await asyncio.get_running_loop().run_in_executor(_hashing, exchange.step, bytes(token))
        else:
            step = exchange.step(bytes(token))
    except AuthenticationFailed as error:
        await _fail(peer, error)
        raise
    if step.principal is not None:
        peer.principal = step.principal
        peer.exchange = None
        peer.takes_raw_tokens = False
        log.debug("authenticated", principal=step.principal.name, mechanism=step.principal.mechanism, peer=peer.peer)
    return step


async def _fail(peer: Peer, error: AuthenticationFailed) -> None:
    mechanism = peer.exchange.mechanism if peer.exchange else ""
    log.warning("authentication failed", reason=error.message, mechanism=mechanism, peer=peer.peer)
    peer.closes_after_reply = True
    await asyncio.sleep(FAILURE_DELAY_MS / 1000)


def _has_logged_in(peer: Peer) -> bool:
    # A client certificate does not count: a peer that has one may still log in as somebody else.
    return not peer.principal.is_anonymous and peer.principal.mechanism != TLS
