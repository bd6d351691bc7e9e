"""The plan of a snapshot: ranges that cover every row once, tables that are complete once."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from walstream.capture.snapshot_plan import (
    RANGE_BLOCKS_MAX,
    Part,
    Plan,
    Range,
    Reading,
    State,
    TableName,
    copy_statement,
    ranges,
)

NAME = TableName("public", "orders")


def reading(*block_counts: int, name: TableName = NAME, row_filter: str | None = None) -> Reading:
    parts = tuple(
        Part(oid, TableName(name.schema, f"{name.table}_{oid}"), count) for oid, count in enumerate(block_counts)
    )
    return Reading(name, ("id", "note"), row_filter, parts)


blocks = st.integers(0, 20_000)


@given(st.lists(blocks, max_size=5), st.integers(1, 64))
def test_ranges_cover_every_block_once_and_have_no_end(block_counts: list[int], workers: int) -> None:
    table = reading(*block_counts)
    spans = ranges(table, workers)
    for part in table.parts:
        mine = [span for span in spans if span.part is part]
        assert mine[0].first == 0
        assert mine[-1].end is None
        assert [span.end for span in mine[:-1]] == [span.first for span in mine[1:]]
        assert all(span.block_count <= RANGE_BLOCKS_MAX for span in mine)
        assert sum(span.block_count for span in mine) == part.block_count


def test_a_small_table_is_one_range_and_a_middle_one_is_shared() -> None:
    assert [(span.first, span.end) for span in ranges(reading(3), 4)] == [(0, None)]
    assert [(span.first, span.end) for span in ranges(reading(400), 4)] == [
        (0, 100),
        (100, 200),
        (200, 300),
        (300, None),
    ]


def test_rows_without_blocks_are_read_in_one_go() -> None:
    part = Part(1, NAME, 100_000, has_blocks=False)
    spans = ranges(Reading(NAME, ("id",), None, (part,)), 4)
    assert spans == [Range(NAME, part, 0, None)]


def test_statement_reads_published_columns_of_published_rows() -> None:
    name = TableName('we"ird', "Größe")
    part = Part(1, name, 10_000)
    table = Reading(name, ("id", 'a "quoted" one'), "(id > 7) OR (id < 3)", (part,))
    assert copy_statement(table, Range(name, part, 10, 20)) == (
        'COPY (SELECT "id", "a ""quoted"" one" FROM ONLY "we""ird"."Größe" '
        "WHERE ctid >= '(10,0)'::tid AND ctid < '(20,0)'::tid AND ((id > 7) OR (id < 3))) TO STDOUT"
    )
    whole = copy_statement(table._replace(row_filter=None), Range(name, part, 0, None))
    assert whole == 'COPY (SELECT "id", "a ""quoted"" one" FROM ONLY "we""ird"."Größe") TO STDOUT'


@given(st.lists(st.lists(blocks, max_size=3), max_size=6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_table_is_complete_once_unless_it_failed(
    tables: list[list[int]], workers: int, dice: random.Random
) -> None:
    readings = [reading(*parts, name=TableName("public", f"t{number}")) for number, parts in enumerate(tables)]
    plan = Plan(readings, workers)
    complete = set(plan.names(State.COMPLETE))
    assert complete == {table.name for table in readings if not table.parts}
    failed: set[TableName] = set()
    taken: list[Range] = []
    while not plan.is_over:
        span = plan.take() if len(taken) < workers else None
        if span is not None:
            assert span.table not in failed | complete
            taken.append(span)
            continue
        span = taken.pop(dice.randrange(len(taken)))
        if dice.random() < 0.02:
            plan.fail(span)
            failed.add(span.table)
        elif plan.read(span, row_count=span.block_count):
            assert span.table not in complete
            complete.add(span.table)
    assert not taken
    assert plan.take() is None
    assert complete == set(plan.names(State.COMPLETE))
    assert failed == set(plan.names(State.FAILED))
    assert complete | failed == {table.name for table in readings}
    for table in readings:
        if table.name in complete:
            assert plan.row_count(table.name) == sum(part.block_count for part in table.parts)
    progress = plan.progress()
    assert progress.tables_complete == progress.table_count == len(readings)
    assert progress.blocks_read == progress.block_count


def test_small_tables_come_first() -> None:
    big, small = reading(9_000, name=TableName("a", "big")), reading(1, name=TableName("z", "small"))
    plan = Plan([big, small], 2)
    first = plan.take()
    assert first is not None
    assert first.table == small.name
