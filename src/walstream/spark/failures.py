"""What a failure of Spark means: walstream's own error, found again in what Spark made of it.

Owns the translation; refuses to know what is done about an error. An error that is raised in an executor or in the
planner's process comes back as text: the last `walstream.errors.<Class>: sentence` in it is what happened. What is not
ours is a SparkFailed with Spark's first line, and worth another try: a lost executor, a full disk, a killed worker.
"""

from __future__ import annotations

import re
from typing import Final

from walstream import errors
from walstream.errors import (
    KeyMissing,
    SchemaIncompatible,
    SparkFailed,
    TableUnfit,
    UsageError,
    ValueUnrepresentable,
    WalstreamError,
)

OF_ONE_TABLE: Final = (KeyMissing, SchemaIncompatible, TableUnfit, UsageError, ValueUnrepresentable)
"""What stops the table that it befalls, and no other: only somebody who changes something can mend it."""

_OURS: Final = re.compile(r"walstream\.errors\.(\w+): (.+)")
_NOISE: Final = re.compile(r"^(\[[A-Z_.]+\]\s*)?(An error occurred while calling \S+\s*:?)?\s*")


def meaning(error: BaseException) -> WalstreamError:
    """Return what an error means."""
    if isinstance(error, WalstreamError):
        return error
    text = str(error)
    for name, sentence in reversed(_OURS.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, WalstreamError):
            return kind(sentence.strip())
    first = next((line.strip() for line in text.splitlines() if _NOISE.sub("", line).strip()), type(error).__name__)
    return SparkFailed(f"Spark failed: {_NOISE.sub('', first).rstrip('.')}.", "Its log says more.")


def stops_one_table(error: WalstreamError) -> bool:
    """Whether the other tables can go on."""
    return isinstance(error, OF_ONE_TABLE)
