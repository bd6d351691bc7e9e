"""Places in a log as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from walstream.cli.moments import Place, parse
from walstream.errors import UsageError

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
NOW_MS = 1_769_860_800_000


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("beginning", Place("beginning")),
        ("earliest", Place("beginning")),
        ("END", Place("end")),
        ("latest", Place("end")),
        ("0", Place("offset", 0)),
        ("42", Place("offset", 42)),
        ("-10", Place("last", 10)),
        ("15m", Place("time", NOW_MS - 900_000)),
        ("2h", Place("time", NOW_MS - 7_200_000)),
        ("250ms", Place("time", NOW_MS - 250)),
        ("2026-01-31T12:00:00Z", Place("time", NOW_MS)),
        ("2026-01-31 13:00:00.250+01:00", Place("time", NOW_MS + 250)),
    ],
)
def test_places(text: str, place: Place) -> None:
    assert parse(text, NOW) == place


@pytest.mark.parametrize("text", ["", "yesterday", "10x", "--5", "1.5", "2026-13-01"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(UsageError, match="is no place in a log") as caught:
        parse(text, NOW)
    assert "beginning, end, an offset" in caught.value.hint
