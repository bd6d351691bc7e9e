"""Places in a log as people write them: `beginning`, `end`, an offset, a time, a while ago, the last few.

Pure: the text and the present in, a `Place` out. `tail --from` and `group reset --to` share it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from walstream.errors import UsageError

_AGO = re.compile(r"(\d+)(ms|s|m|h|d)")
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
PLACES = "beginning, end, an offset (42), the last few (-10), a time (2026-01-31T12:00:00Z), or a while ago (15m)"


@dataclass(frozen=True, slots=True)
class Place:
    """Where to begin: `value` is an offset, a count of records or a time in milliseconds, as the kind says."""

    kind: Literal["beginning", "end", "offset", "last", "time"]
    value: int = 0


def parse(text: str, now: datetime) -> Place:
    """Read a place; a time without a zone is one of the local clock."""
    word = text.strip().lower()
    if word in ("beginning", "earliest", "start"):
        return Place("beginning")
    if word in ("end", "latest"):
        return Place("end")
    if re.fullmatch(r"-\d+", word):
        return Place("last", -int(word))
    if word.isdigit():
        return Place("offset", int(word))
    if match := _AGO.fullmatch(word):
        ago = timedelta(**{_UNITS[match[2]]: int(match[1])})
        return Place("time", _milliseconds(now - ago))
    try:
        return Place("time", _milliseconds(datetime.fromisoformat(text.strip()).astimezone()))
    except ValueError:
        raise UsageError(f"{text!r} is no place in a log.", f"Write {PLACES}.") from None


def _milliseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
