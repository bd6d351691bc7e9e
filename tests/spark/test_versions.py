"""Which version of a table types a read."""

from __future__ import annotations

import pytest

from spark.envelopes import column, version
from walstream.errors import UsageError
from walstream.spark.versions import Versions

FIRST = version(column("id", "int4"), column("old", "text"), number=1)
SECOND = version(column("id", "int4"), column("new", "text"), number=2)
THIRD = version(column("id", "int4"), column("new", "text"), column("more", "text"), number=3)
ALL = Versions("ws", [THIRD, FIRST, SECOND])


@pytest.mark.parametrize(
    ("columns", "number"), [(["id"], 3), (["id", "new"], 3), (["id", "old"], 1), (["more"], 3), ([], 3)]
)
def test_the_newest_that_has_every_column(columns: list[str], number: int) -> None:
    assert ALL.typing("public", "orders", columns).version == number


def test_a_version_that_was_asked_for_stays() -> None:
    assert ALL.typing("public", "orders", ["id"], 2) is SECOND


def test_columns_that_were_never_together_are_told() -> None:
    with pytest.raises(UsageError, match=r"No version of public\.orders has the columns new, old together"):
        ALL.typing("public", "orders", ["new", "old"])
