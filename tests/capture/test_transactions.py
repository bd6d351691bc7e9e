"""The assembler: stories of what PostgreSQL sends, and all of them at random against an obvious model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture import sender
from capture.sender import RunningTransaction, Sender
from walstream.capture.source import Batch, Change, Transaction
from walstream.capture.spill import Budget, SpillFile
from walstream.capture.transactions import Assembler
from walstream.errors import DecodeError, SourceError
from walstream.positions import Lsn, Position

PLENTY = 1 << 30


@pytest.fixture
def assembler(tmp_path: Path) -> Assembler:
    return Assembler(Budget(PLENTY), lambda: SpillFile(tmp_path))


def changes(transactions: list[Transaction]) -> list[Change]:
    return list(Batch(transactions, Lsn(0)).changes)


def values(transaction: Transaction) -> list[str]:
    return [change.after["id"] or "" for change in changes([transaction]) if change.after is not None]


def take(assembler: Assembler) -> list[Transaction]:
    return assembler.take(PLENTY)[0]


def test_a_whole_transaction(assembler: Assembler) -> None:
    assembler.feed([sender.begin(7, 100, 1_700_000_000_000_000), sender.relation(1, "t"), sender.insert(1, "a")])
    assert not assembler.ready
    assert assembler.in_block
    assembler.feed([sender.insert(1, "b"), sender.commit(100, 108, 1_700_000_000_000_000)])
    taken, last_lsn = assembler.take(1)
    (transaction,) = taken
    assert (transaction.xid, transaction.commit_lsn, transaction.end_lsn) == (7, 100, 108)
    assert transaction.commit_time_us == 1_700_000_000_000_000
    assert transaction.change_count == 2
    assert last_lsn == 108
    assert list(transaction.rows) == [sender.relation(1, "t"), sender.insert(1, "a"), sender.insert(1, "b")]
    first, second = changes(taken)
    assert first.position == Position(0, Lsn(100), 1)
    assert second.position == Position(0, Lsn(100), 2)
    assert first.relation is not None
    assert (first.op, first.relation.table, first.before, first.after) == ("c", "t", None, {"id": "a"})


def test_messages_may_begin_after_a_frame_header(assembler: Assembler) -> None:
    said = [sender.begin(7, 100), sender.relation(1, "t"), sender.insert(1, "a"), sender.commit(100, 108)]
    assembler.feed([b"w" + bytes(24) + data for data in said], 25)
    assert values(take(assembler)[0]) == ["a"]


def test_every_kind_of_change(assembler: Assembler) -> None:
    assembler.feed(
        [
            sender.begin(7, 100),
            sender.origin("elsewhere"),
            sender.type_(90_000, "colour"),
            sender.relation(1, "t", ("id", "colour")),
            sender.insert(1, "a", None),
            sender.update(1, "b", "red", old_key=("a", None)),
            sender.update(1, "b", "blue"),
            sender.delete(1, "b", None),
            sender.truncate(1, 1),
            sender.message(90, "note", b"hello", transactional=True),
            sender.commit(100, 108),
        ]
    )
    (transaction,) = take(assembler)
    assert transaction.origin == "elsewhere"
    assert transaction.change_count == 6
    assert [(change.op, change.before, change.after) for change in changes([transaction])] == [
        ("c", None, {"id": "a", "colour": None}),
        ("u", {"id": "a"}, {"id": "b", "colour": "red"}),
        ("u", None, {"id": "b", "colour": "blue"}),
        ("d", {"id": "b"}, None),
        ("t", None, None),
        ("t", None, None),
        ("m", None, {"prefix": "note", "content": "hello"}),
    ]


def test_an_empty_transaction_vanishes_but_moves_the_lsn(assembler: Assembler) -> None:
    assembler.feed([sender.begin(7, 100), sender.commit(100, 108)])
    assert assembler.take(10) == ([], 108)


def test_limit_is_soft_and_the_lsn_is_that_of_what_was_taken(assembler: Assembler) -> None:
    for xid in (1, 2, 3):
        rows = [sender.insert(1, str(number)) for number in range(3)]
        described = [sender.relation(1, "t")] if xid == 1 else []
        assembler.feed([sender.begin(xid, xid * 100), *described, *rows, sender.commit(xid * 100, xid * 100 + 8)])
    taken, last_lsn = assembler.take(4)
    assert [transaction.xid for transaction in taken] == [1, 2]
    assert last_lsn == 208
    assert assembler.ready_changes == 3
    taken, last_lsn = assembler.take(4)
    assert [transaction.xid for transaction in taken] == [3]
    assert values(taken[0]) == ["0", "1", "2"]
    assert last_lsn == 308


def test_streamed_transactions_alternate_and_leave_in_commit_order(assembler: Assembler) -> None:
    assembler.feed(
        [
            sender.stream_start(5, first=True),
            sender.relation(1, "t", xid=5),
            sender.insert(1, "five-1", xid=5),
            sender.stream_stop(),
            sender.stream_start(6, first=True),
            sender.relation(1, "t", xid=6),
            sender.insert(1, "six-1", xid=6),
            sender.stream_stop(),
            sender.begin(9, 50),
            sender.relation(1, "t"),
            sender.insert(1, "nine"),
            sender.commit(50, 58),
            sender.stream_start(5, first=False),
            sender.insert(1, "five-2", xid=5),
            sender.stream_stop(),
            sender.stream_commit(6, 100, 108),
            sender.stream_commit(5, 200, 208),
        ]
    )
    taken = take(assembler)
    assert [(transaction.xid, values(transaction)) for transaction in taken] == [
        (9, ["nine"]),
        (6, ["six-1"]),
        (5, ["five-1", "five-2"]),
    ]
    # Nothing of the stream is left in the rows: they read like those of any transaction.
    assert list(taken[1].rows) == [sender.relation(1, "t"), sender.insert(1, "six-1")]


def test_the_origin_of_a_streamed_transaction_is_told_in_its_first_piece(assembler: Assembler) -> None:
    assembler.feed([sender.stream_start(5, first=True), sender.origin("elsewhere"), sender.relation(1, "t", xid=5)])
    assembler.feed([sender.truncate(1, xid=5), sender.message(9, "p", b"c", transactional=True, xid=6)])
    assembler.feed([sender.stream_stop(), sender.stream_abort(5, 6), sender.stream_commit(5, 100, 108)])
    (transaction,) = take(assembler)
    assert transaction.origin == "elsewhere"
    assert list(transaction.rows) == [sender.relation(1, "t"), sender.truncate(1)]


def test_an_aborted_subtransaction_takes_its_rows_and_descriptions_with_it(assembler: Assembler) -> None:
    assembler.feed(
        [
            sender.stream_start(5, first=True),
            sender.relation(1, "t", xid=5),
            sender.insert(1, "kept", xid=5),
            # In a savepoint a column is added and a row written; then everything is rolled back.
            sender.relation(1, "t", ("id", "extra"), xid=6),
            sender.insert(1, "lost", "lost", xid=6),
            sender.stream_stop(),
            sender.stream_abort(5, 6),
            sender.stream_start(5, first=False),
            sender.relation(1, "t", xid=5),
            sender.insert(1, "also kept", xid=5),
            sender.stream_stop(),
            sender.stream_commit(5, 200, 208),
            sender.begin(9, 300),
            sender.insert(1, "next"),
            sender.commit(300, 308),
        ]
    )
    first, second = take(assembler)
    assert values(first) == ["kept", "also kept"]
    assert first.change_count == 2
    assert values(second) == ["next"]


def test_an_aborted_transaction_leaves_nothing(assembler: Assembler) -> None:
    assembler.feed([sender.stream_start(5, first=True), sender.relation(1, "t", xid=5), sender.insert(1, "a", xid=5)])
    assembler.feed([sender.stream_stop(), sender.stream_abort(5, 5), sender.stream_abort(77, 77)])
    assert assembler.take(10) == ([], 0)
    assert assembler._budget.used_bytes == 0


def test_what_a_transaction_without_changes_described_is_handed_on(assembler: Assembler) -> None:
    assembler.feed(
        [
            sender.stream_start(5, first=True),
            sender.relation(1, "t", xid=5),
            sender.insert(1, "lost", xid=6),
            sender.stream_stop(),
            sender.stream_abort(5, 6),
            sender.stream_commit(5, 100, 108),
            sender.begin(9, 200),
            sender.insert(1, "kept"),
            sender.commit(200, 208),
        ]
    )
    (transaction,) = take(assembler)
    assert list(transaction.rows) == [sender.relation(1, "t"), sender.insert(1, "kept")]


def test_what_is_durable_already_is_left_out_but_not_what_it_described(tmp_path: Path) -> None:
    assembler = Assembler(Budget(PLENTY), lambda: SpillFile(tmp_path))
    assembler.skip_before(Lsn(200))
    assembler.feed([sender.begin(7, 192), sender.relation(1, "t"), sender.insert(1, "old"), sender.commit(192, 200)])
    assert assembler.take(10) == ([], 200)
    assembler.feed([sender.begin(8, 200), sender.insert(1, "new"), sender.commit(200, 208)])
    (transaction,) = take(assembler)
    assert list(transaction.rows) == [sender.relation(1, "t"), sender.insert(1, "new")]
    assert values(transaction) == ["new"]


def test_a_late_streamed_transaction_does_not_bring_an_old_description_back(assembler: Assembler) -> None:
    assembler.feed(
        [
            sender.stream_start(5, first=True),
            sender.relation(1, "t", schema="before", xid=5),
            sender.insert(1, "streamed", xid=5),
            sender.stream_stop(),
            # The schema is renamed; another transaction is told so, and the sender counts it as told to all.
            sender.begin(8, 100),
            sender.relation(1, "t", schema="after"),
            sender.insert(1, "a"),
            sender.commit(100, 108),
            sender.stream_commit(5, 200, 208),
            sender.begin(9, 300),
            sender.insert(1, "b"),
            sender.commit(300, 308),
        ]
    )
    found = [(change.relation.schema, change.after) for change in changes(take(assembler)) if change.relation]
    assert found == [("after", {"id": "a"}), ("before", {"id": "streamed"}), ("after", {"id": "b"})]


def test_a_message_outside_of_transactions_stands_alone(tmp_path: Path) -> None:
    assembler = Assembler(Budget(PLENTY), lambda: SpillFile(tmp_path), sent_at_us=lambda data: 42)
    assembler.feed([sender.message(160, "note", b"\xff", transactional=False)])
    (transaction,) = take(assembler)
    assert (transaction.xid, transaction.commit_lsn, transaction.end_lsn) == (0, 159, 160)
    assert transaction.commit_time_us == 42
    assert changes([transaction])[0].after == {"prefix": "note", "content": "\\xff"}


def test_a_commit_right_behind_a_message_is_later_than_the_message(assembler: Assembler) -> None:
    """`LogicalMessage.lsn` is where the message's record ends: there the COMMIT record begins."""
    stream = [
        sender.message(160, "note", b"", transactional=False),
        sender.begin(7, 160),
        sender.relation(1, "t"),
        sender.insert(1, "a"),
        sender.commit(160, 200),
    ]
    assembler.feed(stream)
    message, transaction = take(assembler)
    assert message.commit_lsn < message.end_lsn <= transaction.commit_lsn

    # The message is durable, and the transaction is sent again.
    assembler.skip_before(message.end_lsn)
    assembler.feed(stream)
    assert [found.xid for found in take(assembler)] == [7]


def test_a_prepared_transaction_is_refused(assembler: Assembler) -> None:
    with pytest.raises(SourceError, match="prepared"):
        assembler.feed([sender.begin_prepare(5, 100)])


@pytest.mark.parametrize(
    "said",
    [
        [sender.insert(1, "a")],
        [sender.relation(1, "t")],
        [sender.truncate(1)],
        [sender.commit(1, 2)],
        [sender.origin("o")],
        [sender.stream_stop()],
        [sender.stream_commit(5, 1, 2)],
        [sender.stream_start(5, first=False)],
        [sender.begin(1, 2), sender.begin(2, 3)],
        [sender.begin(1, 2), sender.stream_start(5, first=True)],
        [sender.begin(1, 2), sender.stream_stop()],
        [sender.begin(1, 2), sender.stream_abort(1, 1)],
        [sender.stream_start(5, first=True), sender.commit(1, 2)],
        [sender.stream_start(5, first=True), sender.stream_stop(), sender.stream_start(5, first=True)],
        [sender.message(5, "p", b"", transactional=True)],
        [b"?"],
    ],
)
def test_what_is_out_of_place_is_refused(assembler: Assembler, said: list[bytes]) -> None:
    with pytest.raises(DecodeError) as caught:
        assembler.feed(said)
    assert caught.value.data == said[-1]


STEPS = ("row", "row", "row", "savepoint", "release", "roll_back", "stream", "stream", "commit", "abort")


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from((*STEPS, "rename", "emit")), st.integers(0, 3)), max_size=150),
    budget_bytes=st.sampled_from((0, 700, 3000, PLENTY)),
    seed=st.integers(0, 1 << 32),
)
def test_any_interleaving_gives_what_committed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], budget_bytes: int, seed: int
) -> None:
    server = Sender()
    running: dict[int, RunningTransaction] = {}
    for step, slot in steps:
        if step == "rename":
            server.version += 1
        elif step == "emit":
            server.emit()
        else:
            transaction = running.setdefault(slot, server.run())
            getattr(server, step)(transaction)
            if step in ("commit", "abort"):
                del running[slot]

    budget = Budget(budget_bytes)
    folder = tmp_path_factory.getbasetemp()
    assembler = Assembler(budget, lambda: SpillFile(folder))
    dice = random.Random(seed)
    taken: list[Transaction] = []
    at = 0
    while at < len(server.sent):
        after = at + dice.randint(1, 12)
        assembler.feed(server.sent[at:after])
        at = after
        if dice.random() < 0.3:
            taken += assembler.take(dice.randint(1, 5))[0]
    taken += take(assembler)

    assert [(transaction.xid, _rows(transaction)) for transaction in taken] == server.committed
    # A reader that feeds every description to one registry, in order, sees the same.
    assert _read_in_order(taken) == [rows for _, rows in server.committed]
    assert [transaction.change_count for transaction in taken] == [len(rows) for _, rows in server.committed]
    assert [transaction.commit_lsn for transaction in taken] == sorted(transaction.commit_lsn for transaction in taken)
    assembler.close()
    for transaction in taken:
        transaction.close()
    assert budget.used_bytes == 0


def _rows(transaction: Transaction) -> list[tuple[int, str]]:
    return [_row(change) for change in changes([transaction])]


def _row(change: Change) -> tuple[int, str]:
    assert change.after is not None
    if change.relation is None:
        return 0, change.after["content"] or ""
    return int(change.relation.schema.removeprefix("version-")), change.after["id"] or ""


def _read_in_order(transactions: list[Transaction]) -> list[list[tuple[int, str]]]:
    """Read without `Transaction.relations`, as the fast path does."""
    version, found = 0, []
    for transaction in transactions:
        rows: list[tuple[int, str]] = []
        for data in transaction.rows:
            if data[:1] == b"R":
                version = int(data[5 : data.index(b"\0", 5)].removeprefix(b"version-"))
            elif data[:1] == b"I":
                rows.append((version, data[13:].decode()))
            else:
                rows.append((0, "content"))
        found.append(rows)
    return found
