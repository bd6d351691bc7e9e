"""What a failure of Spark, of Delta or of the disk means: walstream's own error, found again in what was made of it.

Owns the translation; refuses to know what is done about an error. An error that is raised in an executor or in the
planner's process comes back as text: the last `walstream.errors.<Class>: sentence` in it is what happened. What is not
ours is a SparkFailed with Spark's first line, and worth another try: a lost executor, a full disk, a killed worker. So
is what this process itself could not read or write: files, and Delta's logs.
"""

from __future__ import annotations

import errno
import re
from typing import Final

from deltalake.exceptions import DeltaError

from walstream import errors
from walstream.errors import (
    KeyMissing,
    SchemaIncompatible,
    SparkFailed,
    TableUnfit,
    UsageError,
    ValueUnrepresentable,
    WalstreamError,
    WarehouseFailed,
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
    if isinstance(error, DeltaError):
        return WarehouseFailed(f"Delta's log of a table failed: {_first(error)}.", "See what is in its folder.")
    # A connection that ends is one to Spark: the log's and PostgreSQL's have errors of their own.
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return WarehouseFailed(f"A file could not be read or written: {_first(error)}.", _hint(error))
    for name, sentence in reversed(_OURS.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, WalstreamError):
            return kind(sentence.strip())
    return SparkFailed(f"Spark failed: {_first(error)}.", "Its log says more.")


def _first(error: BaseException) -> str:
    """Return the first line of an error that says something."""
    lines = (_NOISE.sub("", line.strip()).strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__).rstrip(".")


def _hint(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Make room on the disk of pipeline.warehouse, or of spark.local.dir."
    return "See that pipeline.warehouse can be read and written from here."


def stops_one_table(error: WalstreamError) -> bool:
    """Whether the other tables can go on."""
    return isinstance(error, OF_ONE_TABLE)
