"""A proxy between clients and a node that keeps every request frame: real material for the fuzzer.

The node is told to advertise the proxy's address, so that clients come back to it for everything.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

from walstream.processes import HOST, free_port


class Recorder:
    """Forwards bytes both ways and collects whole request frames, each without its length."""

    def __init__(self) -> None:
        self.port = free_port()
        self.target: tuple[str, int] | None = None
        self.requests: list[bytes] = []
        self._listener = socket.create_server((HOST, self.port))
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @contextlib.contextmanager
    def recording(self, target: tuple[str, int]) -> Iterator[Recorder]:
        self.target = target
        self._spawn(self._accept)
        try:
            yield self
        finally:
            for each in (self._listener, *self._sockets):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            for thread in self._threads:
                thread.join(10)

    def _spawn(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        assert self.target is not None
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self.target)
            except OSError:
                return
            self._sockets += [client, server]
            self._spawn(self._forward, client, server, True)
            self._spawn(self._forward, server, client, False)

    def _forward(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        pending = bytearray()
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                sink.sendall(chunk)
                if not keep:
                    continue
                pending += chunk
                while len(pending) >= 4:
                    (size,) = struct.unpack_from(">i", pending)
                    if len(pending) < 4 + size:
                        break
                    self.requests.append(bytes(pending[4 : 4 + size]))
                    del pending[: 4 + size]
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
