"""A node in a process of its own, known as its user knows it: by a command, an environment, a Kafka port."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from walstream.processes import HOST, ServerProcess

_API_VERSIONS_REQUEST = struct.pack(">ihhih", 10, 18, 0, 1, -1)


class NodeProcess(ServerProcess):
    """One node as a child process. A context manager: leaving it stops the node."""

    name = "node"
    command = ("node", "start")
    taken = "in use"

    def __init__(self, data: Path, *, settings: Mapping[str, str] | None = None, log: Path | None = None) -> None:
        """Take the data folder, settings by `section.key`, and the file that gets what the node prints."""
        super().__init__(log or data.with_name(f"{data.name}.log"), settings)
        self.data = data

    def own_settings(self) -> dict[str, str]:
        """Return where it listens, and its data folder."""
        return {"node.listen": self.address, "node.http_listen": self.http_address, "node.data": str(self.data)}

    def answers(self) -> bool:
        """Whether the Kafka port answers a request; with TLS, which this cannot speak, whether it accepts."""
        try:
            with socket.create_connection((HOST, self.port), 2) as connection:
                if self.settings.get("security.tls_certificate"):
                    return True
                connection.sendall(_API_VERSIONS_REQUEST)
                return len(connection.recv(8)) > 0
        except OSError:
            return False
