"""The table of cuts, without Spark: what is recorded, found, kept and forgotten."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable

from walstream.errors import CutExpired, ForeignLog, UsageError
from walstream.positions import Lsn
from walstream.spark.batches import CutRow
from walstream.spark.cuts import Cuts
from walstream.spark.warehouse import checkpoint_path, cuts_path, table_path


def row(point: int, lsn: int, epoch: int = 1, **versions: int) -> CutRow:
    return CutRow(point, epoch, Lsn(lsn), lsn * 1_000_000, versions, dict.fromkeys(versions, "s"), rows=3, batch_id=7)


@pytest.fixture
def cuts(tmp_path: Path) -> Cuts:
    return Cuts(str(tmp_path / "warehouse"), "w")


def test_a_cut_comes_back_as_it_was_recorded(cuts: Cuts) -> None:
    assert cuts.last() is None
    given = CutRow(5, 1, Lsn(500), 1_700_000_000_000_001, {"a": 1, "b": 2}, {"a": "s", "c": "t"}, {"c": "why"}, 9, 4)
    assert cuts.record(given, now=lambda: 1_800_000_000.25)
    found = cuts.last()
    assert found == CutRow(
        **{name: getattr(given, name) for name in CutRow.__slots__ if name != "written_at_us"},
        written_at_us=1_800_000_000_250_000,
    )
    assert cuts.all() == [found]


def test_a_cut_is_recorded_once_and_never_after_a_later_one(cuts: Cuts) -> None:
    assert cuts.record(row(5, 50, a=1))
    assert not cuts.record(row(5, 50, a=2))
    assert not cuts.record(row(4, 40, a=0))
    assert cuts.record(row(6, 50, a=2))
    assert [(one.point, one.versions) for one in cuts.all()] == [(5, {"a": 1}), (6, {"a": 2})]


def test_a_cut_is_recorded_again_with_a_table_that_has_caught_up(cuts: Cuts) -> None:
    assert cuts.record(row(5, 50, a=1))
    assert cuts.record(row(5, 50, a=1, b=7))
    assert not cuts.record(row(5, 50, a=1, b=8))
    assert not cuts.record(row(5, 50, c=1))
    assert cuts.find("latest").versions == {"a": 1, "b": 7}
    assert cuts.last() == cuts.all()[-1]
    assert cuts.record(row(6, 60, a=2))


def test_two_handles_see_each_other(cuts: Cuts) -> None:
    other = Cuts(cuts.warehouse, "w")
    assert other.last() is None
    assert cuts.record(row(1, 10, a=0))
    assert not other.record(row(1, 10, a=9))
    assert other.record(row(2, 20, a=1))
    assert cuts.last() == other.last()


def test_a_cut_whose_commit_is_there_is_recorded_whatever_fails_after_it(cuts: Cuts) -> None:
    """Delta writes a checkpoint of its log after the commit: on a full disk that fails, and the commit stands."""
    for point in range(1, 99):
        cuts.record(row(point, point, a=point))
    checkpoint = Path(cuts_path(cuts.warehouse)) / "_delta_log" / f"{99:020}.checkpoint.parquet"
    (checkpoint / "in the way").mkdir(parents=True)
    assert cuts.record(row(99, 99, a=99))
    shutil.rmtree(checkpoint)
    assert [one.point for one in Cuts(cuts.warehouse).all()] == list(range(1, 100))
    assert cuts.record(row(100, 100, a=100))


def test_cuts_of_another_capture_are_refused(cuts: Cuts) -> None:
    cuts.record(row(5, 50, a=1))
    other = Cuts(cuts.warehouse, "other")
    for ask in (other.last, other.versions, lambda: other.record(row(9, 90, a=2))):
        with pytest.raises(ForeignLog, match=r'the tables of w, not of other\..*capture.prefix to "w"'):
            ask()
    assert Cuts(cuts.warehouse).last() == cuts.last(), "whoever only reads need not know whose they are"


class TestFinding:
    def test_the_last_one_at_or_before_an_lsn(self, cuts: Cuts) -> None:
        for point, lsn in ((1, 10), (2, 20), (3, 20), (4, 30)):
            cuts.record(row(point, lsn, a=point))
        assert [cuts.find(Lsn(lsn)).point for lsn in (10, 19, 20, 29, 30, 99)] == [1, 1, 3, 3, 4, 4]
        assert cuts.find("latest").point == 4

    def test_of_the_newest_source_epoch_unless_told(self, cuts: Cuts) -> None:
        cuts.record(row(1, 1000, a=0))
        cuts.record(row(2, 10, epoch=2, a=1))
        assert cuts.find(Lsn(5000)).point == 2
        assert cuts.find(Lsn(5000), source_epoch=1).point == 1
        with pytest.raises(CutExpired, match="the oldest is at 0/A"):
            cuts.find(Lsn(9))
        with pytest.raises(CutExpired, match="none of that epoch"):
            cuts.find(Lsn(9), source_epoch=3)

    def test_nothing_there(self, cuts: Cuts) -> None:
        with pytest.raises(UsageError, match="holds no cut yet"):
            cuts.find("latest")


class TestMaintenance:
    def test_old_ones_go_and_the_newest_stays(self, cuts: Cuts) -> None:
        for point in range(1, 6):
            cuts.record(row(point, point * 10, a=point), now=lambda point=point: float(point))
        assert cuts.expire(3_000_000) == 2
        assert [one.point for one in cuts.all()] == [3, 4, 5]
        with pytest.raises(CutExpired, match="No cut at or before 0/14 of source epoch 1 is kept; the oldest is at"):
            cuts.find(Lsn(20))
        assert cuts.expire(99_000_000) == 2
        assert [one.point for one in cuts.all()] == [5]
        assert cuts.expire(99_000_000) == 0

    def test_versions_that_must_stay(self, cuts: Cuts) -> None:
        cuts.record(row(1, 10, a=4))
        cuts.record(row(2, 20, a=4, b=0))
        cuts.record(row(3, 30, a=6, b=0))
        assert cuts.versions() == {"a": [4, 6], "b": [0]}

    def test_small_files_are_put_together(self, cuts: Cuts) -> None:
        for point in range(1, 21):
            cuts.record(row(point, point, a=point))
        before = cuts.all()
        cuts.tidy()
        assert cuts.all() == before
        assert len(DeltaTable(cuts_path(cuts.warehouse)).file_uris()) == 1
        assert cuts.record(row(21, 21, a=21))
        assert Cuts(cuts.warehouse).last() == cuts.last()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("public.orders", "w/public/orders"),
        ("public.orders.2024", "w/public/orders.2024"),
        ('"a.b".c', "w/a.b/c"),
        ("public.a/b c", "w/public/a%2Fb%20c"),
        ("_checkpoint.x", "w/%5Fcheckpoint/x"),
        ("x..", "w/x/%2E"),
        ("x..hidden", "w/x/%2Ehidden"),
        ("x.ä", "w/x/%C3%A4"),
    ],
)
def test_where_a_table_lies(name: str, path: str) -> None:
    assert table_path("w/", name) == path
    assert (cuts_path("w"), checkpoint_path("w/")) == ("w/_walstream_commits", "w/_checkpoint")
