"""The demonstration's own judgement: it finds a torn cut, and only says OK when everything was looked at."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from rich.console import Console

from walstream.demo.story import conclude
from walstream.demo.verdict import Verdict, judge
from walstream.demo.workload import TABLES
from walstream.positions import Lsn
from walstream.spark.batches import CutRow
from walstream.spark.cuts import Cuts
from walstream.spark.warehouse import table_path

MONEY = pa.decimal128(12, 2)
AT = datetime(2024, 1, 1, tzinfo=UTC)
AUDITED = {"state": "same", "tables_compared": len(TABLES), "differences": 0, "rows_compared": 5}
GOOD = Verdict(2, 0, (1.0,))


def accounts(balance: int, turnover: int) -> pa.Table:
    return pa.table({"balance": pa.array([Decimal(balance)], MONEY), "turnover": pa.array([Decimal(turnover)], MONEY)})


def transfers(*amounts: int) -> pa.Table:
    """Transfers: the first from before there were tables, the others from half a second before the second cut."""
    count = len(amounts)
    moments = [AT, *(AT + timedelta(seconds=1.5) for _ in amounts[1:])][:count]
    return pa.table(
        {
            "amount": pa.array([Decimal(amount) for amount in amounts], MONEY),
            "at": pa.array(moments, pa.timestamp("us", "UTC")),
            "_commit_lsn": pa.array([150] * count, pa.int64()),
            "_seq": pa.array([1] * count, pa.int64()),
        }
    )


def record(warehouse: Path, number: int, versions: dict[str, int]) -> None:
    row = CutRow(point=number, source_epoch=0, end_lsn=Lsn(number * 100), commit_time_us=0, versions=versions)
    Cuts(str(warehouse), "ws").record(row, now=lambda: AT.timestamp() + number)


def cuts(tmp_path: Path, turnover: int, balance: int = 100) -> Verdict:
    """Two cuts: nothing moved yet, then 7 moved in the transfers, and what the accounts say of it."""
    for table in TABLES:
        path = table_path(str(tmp_path), table)
        first = accounts(100, 0) if table == "public.accounts" else transfers()
        then = accounts(balance, turnover) if table == "public.accounts" else transfers(3, 4)
        write_deltalake(path, first)
        write_deltalake(path, then, mode="overwrite")
    record(tmp_path, 1, dict.fromkeys(TABLES, 0))
    record(tmp_path, 2, dict.fromkeys(TABLES, 1))
    return judge(str(tmp_path))


def test_cuts_that_agree(tmp_path: Path) -> None:
    found = cuts(tmp_path, turnover=14)
    assert (found.cuts, found.torn) == (2, 0)
    assert found.freshness_s == pytest.approx((0.5,))


def test_a_torn_cut_is_found(tmp_path: Path) -> None:
    assert cuts(tmp_path, turnover=7).torn == 1


def test_money_that_came_from_nowhere_is_found(tmp_path: Path) -> None:
    assert cuts(tmp_path, turnover=14, balance=101).torn == 1


@pytest.mark.parametrize(
    ("audited", "verdict", "code"),
    [
        ({}, GOOD, 0),
        ({"state": "different", "differences": 1}, GOOD, 1),
        ({"tables_compared": 2}, GOOD, 1),
        ({}, Verdict(2, 1, (1.0,)), 1),
        ({}, Verdict(0, 0, (1.0,)), 1),
        ({}, Verdict(2, 0, ()), 1),
    ],
)
def test_ok_only_when_all_of_it_holds(audited: dict[str, Any], verdict: Verdict, code: int) -> None:
    screen = io.StringIO()
    assert conclude(AUDITED | audited, verdict, Console(file=screen, width=200)) == code
    assert screen.getvalue().startswith("FAILED: " if code else "OK: ")
