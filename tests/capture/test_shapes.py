"""Learning shapes changes how rows are read, at a bounded cost, and never what is written."""

from __future__ import annotations

import itertools

from capture.wal import Col, Table, insert
from walstream.capture import shapes
from walstream.capture.shapes import Learned
from walstream.postgres.messages import Value

COLUMNS = [Col(name) for name in "abcdefgh"]


def learned_of(table: Table) -> Learned:
    renderer = table.renderer._tables[table.info.id]
    otherwise = renderer.insert.__globals__["otherwise"]  # type: ignore[attr-defined]
    assert isinstance(otherwise, Learned)
    return otherwise


def test_a_frequent_shape_gets_its_own_function() -> None:
    table = Table(*COLUMNS)
    values: list[Value] = [b"martin", None, b"x", None, None, b'"', b"nn", None]
    rows = [insert(*values)] * (shapes.SAMPLED_ROWS * shapes.SAMPLES_MIN + 5)
    assert table.render(*rows) == table.expected(*rows)
    learned = learned_of(table)
    assert len(learned._functions) == 1
    assert learned._plain_count == shapes.SAMPLED_ROWS * shapes.SAMPLES_MIN
    assert learned._taken_count == 5
    assert "b'null'" not in learned._functions[0].source  # type: ignore[attr-defined]


def test_learning_ends_and_is_given_up_when_shapes_are_too_many() -> None:
    table = Table(*COLUMNS)
    masks = list(itertools.islice(itertools.product([True, False], repeat=8), 1, None))
    rows = [insert(*(b"x" if there else None for there in mask)) for mask in masks]
    often = [row for row in rows[:20] for _ in range(shapes.SAMPLED_ROWS * shapes.SAMPLES_MIN)]
    assert table.render(*often) == table.expected(*often)
    assert len(learned_of(table)._functions) == shapes.LEARNED_MAX
    mixed = rows * (shapes.TRIAL_ROWS // len(rows) + 2)
    assert table.render(*mixed) == table.expected(*mixed)
    assert learned_of(table)._functions == []


def test_relations_of_the_same_columns_share_their_code() -> None:
    one, two = Table(*COLUMNS, name="one"), Table(*COLUMNS, name="two")
    for table in (one, two):
        table.render(insert(*[b"x"] * 8))
    functions = [table.renderer._tables[table.info.id].insert for table in (one, two)]
    assert functions[0].__code__ is functions[1].__code__  # type: ignore[attr-defined]
    assert functions[0] is not functions[1]
