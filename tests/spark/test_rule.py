"""The rule over columns against the rule record by record."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.points import ORDERS, span
from walstream.capture.commit_points import RowFacts, Span
from walstream.capture.reading import Counts
from walstream.errors import DataLoss, RowsMissing
from walstream.positions import Lsn
from walstream.spark.rule import Spans

records = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 60), st.sampled_from([None, "s", "t"])), min_size=1, max_size=60
)


def admitted(spans: Spans, offsets: list[int], facts: list[RowFacts]) -> tuple[list[bool], list[int]]:
    mask, index = spans.admit(
        np.array(offsets),
        np.array([each.gen for each in facts]),
        np.array([int(each.commit_lsn) for each in facts]),
        np.array([each.snapshot == spans.snapshot for each in facts]),
    )
    return mask.tolist(), spans.counts(mask, index).tolist()


@given(records, st.lists(st.integers(0, 60), min_size=2, max_size=8, unique=True).map(sorted), st.data())
def test_the_columns_admit_what_the_rule_does(
    found: list[tuple[int, int, str | None]], cuts: list[int], data: st.DataObject
) -> None:
    lsns = sorted(data.draw(st.lists(st.integers(0, 60), min_size=len(cuts), max_size=len(cuts))))
    stream = [
        Span(ORDERS, start, stop, 0, 1, Lsn(lsns[number]), Lsn(lsns[number + 1]))
        for number, (start, stop) in enumerate(pairwise(cuts))
    ]
    facts = [RowFacts(gen, Lsn(lsn), snapshot) for gen, lsn, snapshot in found]
    offsets = list(range(len(facts)))
    for spans in (stream, [Span(ORDERS, cuts[0], cuts[-1], 0, 1, snapshot="s")]):
        mask, counts = admitted(Spans.of(spans), offsets, facts)
        assert mask == [any(each.admits(o, f) for each in spans) for o, f in zip(offsets, facts, strict=True)]
        assert counts == [sum(each.admits(o, f) for o, f in zip(offsets, facts, strict=True)) for each in spans]
        expected = Counts(spans)
        assert mask == [expected.admit(o, f) for o, f in zip(offsets, facts, strict=True)]


def test_another_number_than_the_point_says() -> None:
    spans = Spans.of([span(0, 10), span(10, 20)])
    spans.check(np.array([10, 10]), 0)
    with pytest.raises(RowsMissing, match=r"holds 9 rows .* in the offsets \[10, 20\); the commit point says 10"):
        spans.check(np.array([10, 9]), 0)
    with pytest.raises(RowsMissing, match="holds 11 rows"):
        spans.check(np.array([11, 10]), 5)
    with pytest.raises(DataLoss, match="begins at offset 5, so that 4 of the 10 rows from 0 on are gone"):
        spans.check(np.array([6, 10]), 5)


def test_spans_that_do_not_belong_together_are_our_bug() -> None:
    with pytest.raises(AssertionError):
        Spans.of([span(0, 10), span(10, 20, gen=1)])
