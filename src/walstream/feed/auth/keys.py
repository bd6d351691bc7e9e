"""The keys that tokens are verified with: read from a file or an address, cached, and read again when they may be old.

Owns when the key set is read: at the start, when it is older than `jwks_cache_s`, when its file has changed, and when a
token names a key that is not in it. What is in a set belongs to `keysets`.

Invariants. However many tokens name unknown keys, readings are at least `jwks_refresh_min_s` apart, and there is one at
a time, which all who need it wait for. A reading that fails changes nothing: the keys that were there go on counting,
because an issuer that cannot be reached is no reason to turn everybody away. A reading that succeeds replaces them: a
key that was withdrawn does not count any more.
"""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from walstream import logs
from walstream.config import FeedConfig
from walstream.errors import ConfigError, UnreachableError, WalstreamError
from walstream.feed.auth.keysets import Key, KeySet, parse
from walstream.node.security import is_loopback

DOCUMENT_BYTES_MAX: Final = 256 * 1024
TIMEOUT_S: Final = 5.0
"""For one reading; tokens that need it wait for it, at most this long in each `jwks_refresh_min_s`."""

log = logs.get(__name__)


class Source(Protocol):
    """Where a key set is published."""

    name: str

    def read(self) -> bytes:
        """Return the document; may block. Raises ConfigError or UnreachableError."""

    def has_changed(self) -> bool:
        """Say, without blocking, whether the document is known to be another than the one that was read last."""


class Keys:
    """The key set of one source, as fresh as it has to be."""

    def __init__(
        self, source: Source, cache_s: float, refresh_min_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._cache_s = cache_s
        self._refresh_min_s = refresh_min_s
        self._clock = clock
        self._set = KeySet()
        self._read_at_s: float | None = None
        """When the set was read, by the clock."""
        self._tried_at_s: float | None = None
        self._reading: asyncio.Task[None] | None = None
        self._failure: WalstreamError | None = None
        """Why the last reading failed; None when it did not."""

    @classmethod
    def of(cls, config: FeedConfig) -> Keys:
        """Take the source from the configuration. Raises ConfigError."""
        return cls(_source(config), config.auth.jwks_cache_s, config.auth.jwks_refresh_min_s)

    @property
    def age_s(self) -> float:
        """How long ago the keys were read; infinite before they ever were."""
        return float("inf") if self._read_at_s is None else self._clock() - self._read_at_s

    @property
    def failure(self) -> WalstreamError | None:
        """Why the last reading failed, for whoever reports health; None when it did not."""
        return self._failure

    async def open(self) -> None:
        """Read the keys for the first time. Raises ConfigError or UnreachableError: without keys nobody gets in."""
        await self._refresh()
        self._require()

    async def find(self, key_id: str | None, algorithm: str) -> tuple[Key, ...]:
        """Return the keys that may have signed such a token, having looked for new ones if there is none.

        Raises what the reading did when there have never been any keys.
        """
        if self._is_stale():
            await self._refresh()
        found = self._set.find(key_id, algorithm)
        if not found and self._may_refresh():
            await self._refresh()
            found = self._set.find(key_id, algorithm)
        self._require()
        return found

    def _require(self) -> None:
        """Raise why there have never been any keys, if so: then it is not the token that is at fault."""
        if self._read_at_s is None and self._failure:
            # A new error each time: one that is raised again and again drags all its traces along.
            raise type(self._failure)(self._failure.message, self._failure.hint)

    def _is_stale(self) -> bool:
        # A changed file is read at once: looking costs nothing, and a broken one is read once, not again and again.
        return self._source.has_changed() or (self.age_s >= self._cache_s and self._may_refresh())

    def _may_refresh(self) -> bool:
        # While a reading is under way, to ask for another is to wait for that one.
        return (
            self._reading is not None
            or self._tried_at_s is None
            or self._clock() - self._tried_at_s >= self._refresh_min_s
        )

    async def _refresh(self) -> None:
        """Read the keys again, or wait for the reading that is under way."""
        if self._reading is None:
            self._tried_at_s = self._clock()
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(self._forget)
        # The call that began the reading may be cancelled; others wait for the same.
        await asyncio.shield(self._reading)

    def _forget(self, reading: asyncio.Task[None]) -> None:
        self._reading = None
        if not reading.cancelled() and (error := reading.exception()):
            log.error("reading the key set failed in a way that nobody thought of", error=repr(error))

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                document = await asyncio.to_thread(self._source.read)
            found = parse(document, self._source.name)
        except TimeoutError:
            self._fail(UnreachableError(f"The key set {self._source.name} does not arrive.", _NAMED))
        except (ConfigError, UnreachableError) as error:
            self._fail(error)
        else:
            self._take(found)

    def _take(self, found: KeySet) -> None:
        if found != self._set or self._failure:
            log.info("key set read", source=self._source.name, keys=len(found.keys))
            for reason in found.left_out:
                log.warning("key of the key set left out", source=self._source.name, reason=reason)
        self._set, self._failure, self._read_at_s = found, None, self._clock()

    def _fail(self, error: WalstreamError) -> None:
        # Told when it begins and when it is over, not at each try.
        if not self._failure:
            log.warning("key set not read", source=self._source.name, reason=error.message, keys=len(self._set.keys))
        self._failure = error


_NAMED: Final = "feed.auth.jwks names it."


class FileSource:
    """A key set in a file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._seen: tuple[int, ...] = ()

    def read(self) -> bytes:
        """Return the file's bytes."""
        try:
            # Noted before it is read: what is written in between is read again.
            self._seen = self._look()
            with self._path.open("rb") as file:
                document = file.read(DOCUMENT_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(f"The key set {self.name} cannot be read: {error.strerror}.", _NAMED) from None
        return _bounded(document, self.name)

    def has_changed(self) -> bool:
        """Say whether the file is another than the one that was read, or has other times or another size."""
        try:
            return self._look() != self._seen
        except OSError:
            # A file that is just being replaced is there again in a moment.
            return False

    def _look(self) -> tuple[int, ...]:
        found = self._path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class UrlSource:
    """A key set at an http or https address."""

    def __init__(self, url: str) -> None:
        self.name = url
        self._opener = urllib.request.build_opener(_NoRedirects)

    def read(self) -> bytes:
        """Return the body of a successful answer."""
        deadline_s = time.monotonic() + TIMEOUT_S
        request = urllib.request.Request(self.name, headers={"Accept": "application/jwk-set+json, application/json"})
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                document = b""
                while part := answer.read1(64 * 1024):
                    document = _bounded(document + part, self.name)
                    if time.monotonic() > deadline_s:
                        raise TimeoutError("it is too slow")
        except urllib.error.HTTPError as error:
            with error:
                code = error.code
            raise UnreachableError(f"{self.name} answers with status {code}, not with a key set.", _NAMED) from None
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise UnreachableError(f"{self.name} does not answer: {reason}.", _NAMED) from None
        return document

    def has_changed(self) -> bool:
        """Say no: only asking would tell."""
        return False


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows nothing: a redirect could lead from https to http, and to keys of somebody else."""

    def redirect_request(self, *_arguments: Any, **_more: Any) -> None:
        """Leave the answer as it is, which makes an HTTPError of it."""


def _bounded(document: bytes, name: str) -> bytes:
    if len(document) > DOCUMENT_BYTES_MAX:
        raise ConfigError(f"The key set {name} is larger than {DOCUMENT_BYTES_MAX:,} bytes.", _NAMED)
    return document


def _source(config: FeedConfig) -> Source:
    jwks = config.auth.jwks
    if not jwks:
        raise ConfigError(
            "feed.auth.jwks is not set, so that no token could be verified.",
            "Name a JWKS file or address; `walstream token mint` makes a key and such a file for development.",
        )
    if "://" not in jwks:
        return FileSource(Path(jwks))
    address = urlsplit(jwks)
    if address.scheme.lower() == "http" and not is_loopback(address.hostname or "") and not config.allow_insecure:
        raise ConfigError(
            f"feed.auth.jwks = {jwks} is not encrypted: whoever is on the way could put in keys of their own.",
            "Use https; allow_insecure = true in [feed] allows it all the same.",
        )
    return UrlSource(jwks)
