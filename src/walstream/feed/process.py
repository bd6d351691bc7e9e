"""A feed in a process of its own, with a key that signs tokens for it: for tests and benchmarks."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from walstream.config import FeedAuthConfig
from walstream.feed.auth.identity import Role
from walstream.feed.auth.tokens import LocalKeys, Wish
from walstream.feed.client import Client
from walstream.processes import HOST, ServerProcess


class FeedProcess(ServerProcess):
    """One feed of one log. A context manager: leaving it stops the feed."""

    name = "feed"
    command = ("feed", "serve")
    taken = "cannot listen"

    def __init__(self, folder: Path, bootstrap: str, *, settings: Mapping[str, str] | None = None) -> None:
        """Take a folder for its key and its log file, the address of the log, and settings by `section.key`."""
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder / "feed.log", settings)
        self.keys = LocalKeys(folder / "key.pem")
        self._bootstrap = bootstrap
        self.token("first", "admin")  # The key set has to be there when the feed starts.

    def own_settings(self) -> dict[str, str]:
        """Return where it listens, whom it believes, and where the log is."""
        return {
            "feed.port": str(self.port),
            "feed.http_listen": self.http_address,
            "feed.auth.jwks": str(self.keys.jwks),
            "capture.bootstrap": self._bootstrap,
        }

    def answers(self) -> bool:
        """Whether the port takes connections: it does so when everything else is ready."""
        try:
            with socket.create_connection((HOST, self.port), 2):
                return True
        except OSError:
            return False

    def token(self, subject: str, role: Role = "replication", tenant: str = "", expires_in_s: int = 3600) -> str:
        """Sign a token."""
        wish = Wish(subject, role, tenant, expires_in_s)
        return self.keys.mint(wish, FeedAuthConfig(), time.time())[0]

    def client(self, subject: str = "test", role: Role = "admin", tenant: str = "", **more: Any) -> Client:
        """Return a client with a token of its own."""
        return Client(self.address, token=self.token(subject, role, tenant), **more)
