"""How many streams may be open: in all, and of one tenant, so that no tenant can take the places of the others.

Owns the count. A call has its place from before it is opened until its client has taken its end, because all that time
it holds memory. Admins belong to no tenant: for them only the number of all streams counts. Sans-IO.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from walstream.config import FeedConfig
from walstream.errors import TooManySubscriptions


class Places:
    """The places of one feed."""

    def __init__(self, config: FeedConfig) -> None:
        self._max = config.subscriptions_max
        self._tenant_max = config.tenant_subscriptions_max
        self._taken: Counter[str] = Counter()
        """By tenant; admins under no name."""

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Take a place for as long as the context lasts. Raises TooManySubscriptions."""
        self._check(tenant)
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]

    def _check(self, tenant: str) -> None:
        # First the tenant's own: whoever has taken all it may take learns that, not how busy others are.
        if tenant and self._taken[tenant] >= self._tenant_max:
            raise TooManySubscriptions(
                f"too_many_subscriptions: {self._tenant_max} streams of the tenant {tenant} are open",
                "End one of them, or wait until one has ended; one stream can have several topics. The operator can "
                "raise feed.tenant_subscriptions_max.",
            )
        if self._taken.total() >= self._max:
            raise TooManySubscriptions(
                f"too_many_subscriptions: {self._max} streams are open",
                "Try again later, or raise feed.subscriptions_max.",
            )
