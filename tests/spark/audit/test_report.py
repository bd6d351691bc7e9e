"""An audit says "same" only of what it has compared."""

from __future__ import annotations

import pytest

from walstream.cli.pipeline_audit import _judge
from walstream.errors import UnhealthyError
from walstream.positions import Lsn
from walstream.spark.audit.report import Report, TableReport


def report(*tables: TableReport) -> Report:
    return Report(Lsn(2), Lsn(1), 0, 0.1, tables)


def test_nothing_compared_is_not_the_same() -> None:
    empty = report()
    assert not empty.is_same
    assert empty.as_dict()["state"] == "nothing compared"
    with pytest.raises(UnhealthyError, match="No table was compared"):
        _judge(empty)


def test_every_table_counts() -> None:
    same, missing = TableReport("public.a", "mirror", "same"), TableReport("public.b", "mirror", "missing")
    _judge(report(same))
    with pytest.raises(UnhealthyError, match="1 missing"):
        _judge(report(same, missing))
