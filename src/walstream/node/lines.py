"""The bytes of a link between two nodes, on a socket: what is to be sent, in order, and what has come.

A `Line` knows no message. Plain lines own their sockets: buffers go to the kernel from where they lie, and ranges of
files without passing through this process (sendfile), all in one order. Lines with TLS are asyncio's, which encrypts
every byte and so has to copy it.

What a socket does not take at once waits, and is counted in `unsent_bytes`: whoever has much to send looks there first
and is told by `writable` when it may go on. So a line holds a few frames, whatever its peer does.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from walstream import logs
from walstream.log.disk import Buffer

log = logs.get(__name__)

UNSENT_BYTES_MAX = 2 * 1024 * 1024
"""As much may wait on a line before its link asks for no more data: two frames, so that the socket never runs dry."""

IOV_MAX = 512
SENDFILE_BYTES_MAX = 1024 * 1024
"""Of a file at a time, so that other connections have their turn."""
READS_MAX = 8
"""Reads of one line in a turn of the loop."""


class FileRange(NamedTuple):
    """Bytes that the kernel sends from a file. `holder` keeps the file open."""

    descriptor: int
    position: int
    length: int
    holder: object


class Owner(Protocol):
    """The link on a line."""

    def buffer(self) -> memoryview:
        """Return where the next bytes go; never empty."""

    def received(self, count: int) -> None:
        """Handle so many bytes that were written there; an exception ends the connection."""

    def writable(self) -> None:
        """Hear that the line has room again."""

    def lost(self, reason: str) -> None:
        """Hear that the connection is gone. The last thing it hears."""


class Line(Protocol):
    """A connection to another node."""

    peer: str
    can_send_files: bool

    @property
    def unsent_bytes(self) -> int:
        """Return what the socket has not taken yet."""

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers, behind everything given before. They may not change until they are sent."""

    def send_file(self, part: FileRange) -> None:
        """Send a part of a file, behind everything given before."""

    def close(self) -> None:
        """Send what is given as far as the socket takes it at once, and close; the owner hears nothing more."""


class PlainLine:
    """A line on a socket of its own."""

    can_send_files = True

    def __init__(self, connected: socket.socket, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = _name(connected.getpeername())
        self._socket = connected
        self._descriptor = connected.fileno()
        self._owner = owner
        self._loop = loop
        self._out: deque[memoryview | FileRange] = deque()
        self._unsent_bytes = 0
        self._is_writing = False
        self._is_closed = False
        loop.add_reader(self._descriptor, self._read)

    @property
    def unsent_bytes(self) -> int:
        """Return what the socket has not taken yet."""
        return self._unsent_bytes

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers, behind everything given before."""
        for buffer in buffers:
            self._unsent_bytes += len(buffer)
            self._out.append(memoryview(buffer))
        if not self._is_writing:
            self._flush()

    def send_file(self, part: FileRange) -> None:
        """Send a part of a file, behind everything given before."""
        self._unsent_bytes += part.length
        self._out.append(part)
        if not self._is_writing:
            self._flush()

    def _flush(self) -> None:
        """Give the socket what it takes, and come again when it has taken all and wants more."""
        if self._is_closed:
            return
        try:
            while self._out:
                first = self._out[0]
                if isinstance(first, FileRange):
                    self._send_range(first)
                else:
                    self._send_buffers()
        except BlockingIOError:
            self._watch(True)
            return
        except OSError as error:
            self._lose(_reason(error))
            return
        self._watch(False)

    def _send_buffers(self) -> None:
        parts: list[memoryview] = []
        for part in self._out:
            if isinstance(part, FileRange) or len(parts) == IOV_MAX:
                break
            parts.append(part)
        sent = self._socket.sendmsg(parts)
        self._unsent_bytes -= sent
        while parts and sent >= len(parts[0]):
            sent -= len(parts[0])
            del parts[0]
            self._out.popleft()
        if sent:
            self._out[0] = parts[0][sent:]

    def _send_range(self, part: FileRange) -> None:
        wanted = min(part.length, SENDFILE_BYTES_MAX)
        sent = os.sendfile(self._descriptor, part.descriptor, part.position, wanted)
        if sent == 0:
            raise OSError(errno.EIO, "the file is shorter than it was")
        self._unsent_bytes -= sent
        if sent == part.length:
            self._out.popleft()
        else:
            self._out[0] = part._replace(position=part.position + sent, length=part.length - sent)

    def _watch(self, is_writing: bool) -> None:
        if is_writing != self._is_writing:
            self._is_writing = is_writing
            if is_writing:
                self._loop.add_writer(self._descriptor, self._go_on)
            else:
                self._loop.remove_writer(self._descriptor)

    def _go_on(self) -> None:
        self._flush()
        if not self._is_closed and self._unsent_bytes < UNSENT_BYTES_MAX:
            self._owner.writable()

    def _read(self) -> None:
        for _ in range(READS_MAX):
            buffer = self._owner.buffer()
            try:
                count = self._socket.recv_into(buffer)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(_reason(error))
                return
            if count == 0:
                self._lose("the peer has closed the connection")
                return
            room = len(buffer)
            del buffer
            try:
                self._owner.received(count)
            except Exception as error:
                log.exception("received bytes not handled", peer=self.peer)
                self._lose(_failure(error))
                return
            if self._is_closed or count < room:
                return

    def _lose(self, reason: str) -> None:
        if not self._is_closed:
            self._end()
            self._owner.lost(reason)

    def close(self) -> None:
        """Send what the socket takes at once, and close."""
        if not self._is_closed:
            self._end()

    def _end(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._descriptor)
        if self._is_writing:
            self._loop.remove_writer(self._descriptor)
        self._out.clear()
        self._socket.close()


class TlsLine(asyncio.BufferedProtocol):
    """A line that asyncio encrypts. Its owner is known once the connection is made."""

    can_send_files = False

    def __init__(self, made: Callable[[TlsLine], Owner | None]) -> None:
        """Take what makes the owner of a new connection; None: it is closed again."""
        self.peer = ""
        self.certificate: Mapping[str, Any] = {}
        """What the peer has shown, as `ssl` describes it."""
        self._made = made
        self._owner: Owner | None = None
        self._transport = cast(asyncio.Transport, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self.peer = _name(transport.get_extra_info("peername"))
        self.certificate = transport.get_extra_info("peercert") or {}
        self._owner = self._made(self)
        if self._owner is None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        assert self._owner is not None
        return self._owner.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        owner = self._owner
        if owner is None:
            return
        try:
            owner.received(nbytes)
        except Exception as error:
            log.exception("received bytes not handled", peer=self.peer)
            self._owner = None
            self._transport.abort()
            owner.lost(_failure(error))

    def resume_writing(self) -> None:
        if self._owner is not None:
            self._owner.writable()

    def connection_lost(self, exc: Exception | None) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.lost(_reason(exc) if exc else "the peer has closed the connection")

    @property
    def unsent_bytes(self) -> int:
        """Return what the socket has not taken yet."""
        return self._transport.get_write_buffer_size()

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers, behind everything given before."""
        self._transport.writelines(buffers)

    def send_file(self, part: FileRange) -> None:
        """Refuse: what is encrypted passes through the process."""
        raise AssertionError(f"{part} cannot be sent as a file over TLS")

    def close(self) -> None:
        """Send what is given, and close."""
        self._owner = None
        self._transport.close()


def _name(address: object) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) and len(address) >= 2 else "unknown"


def _failure(error: Exception) -> str:
    return f"this node failed to handle the received bytes: {error!r}"


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "TLS failed").replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
