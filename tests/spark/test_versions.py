"""Which version of a table types a read."""

from __future__ import annotations

import pytest

from spark.envelopes import column, version
from walstream.errors import UsageError
from walstream.spark.types import TableVersion
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


OF_GEN_1 = version(column("id", "int4"), number=1, gen=1)
OF_A_ZOMBIE = version(column("id", "int4"), column("old", "text"), number=2, gen=2)
OF_GEN_3 = version(column("id", "int4"), column("new", "text"), number=2, gen=3)
OF_GEN_5 = version(column("id", "int4"), column("new", "text"), column("more", "text"), number=3, gen=5)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("gen", "meant"),
    [
        (1, (OF_GEN_1, OF_A_ZOMBIE, OF_GEN_5)),
        (2, (OF_GEN_1, OF_A_ZOMBIE, OF_GEN_5)),
        (3, (OF_GEN_1, OF_GEN_3, OF_GEN_5)),
        (4, (OF_GEN_1, OF_GEN_3, OF_GEN_5)),
        (5, (OF_GEN_1, OF_GEN_3, OF_GEN_5)),
        (9, (OF_GEN_1, OF_GEN_3, OF_GEN_5)),
    ],
)
def test_a_row_means_the_record_of_the_largest_generation_up_to_its_own(
    gen: int, meant: tuple[TableVersion, ...], order: int
) -> None:
    """Two captures gave the number 2 to different tables: a zombie, in generation 2, and its successor."""
    known = Versions("ws", [OF_GEN_3, OF_GEN_1, OF_GEN_5, OF_A_ZOMBIE][::order])
    assert known.at("public", "orders", gen) == meant


def test_a_version_by_its_number_is_that_of_the_newest_generation() -> None:
    known = Versions("ws", [OF_GEN_3, OF_GEN_1, OF_A_ZOMBIE])
    assert known.newest("public", "orders", 2) is OF_GEN_3
    assert known.newest("public", "orders") is OF_GEN_3
    assert known.typing("public", "orders", ["id"]) is OF_GEN_3
