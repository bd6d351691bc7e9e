"""Versions of tables: when there is a new one, when an old one comes back, what the catalogue adds."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgres.servers import Database
from walstream.errors import DecodeError
from walstream.postgres import catalogue
from walstream.postgres.messages import Relation, RelationColumn
from walstream.postgres.relations import ColumnFacts, RelationFacts, RelationInfo, Relations, unsent_key
from walstream.postgres.session import connect
from walstream.postgres.types import TypeFacts, Types

INT4, TEXT = 23, 25


def message(*columns: tuple[str, int, bool], identity: str = "d", table: str = "t", oid: int = 7) -> Relation:
    described = tuple(RelationColumn(name, type_oid, -1, is_key) for name, type_oid, is_key in columns)
    return Relation(None, oid, "s", table, identity, described)


def facts(
    *columns: tuple[int, str, int],
    primary_key: tuple[str, ...] = (),
    identity: str = "d",
    table: str = "t",
    oid: int = 7,
) -> RelationFacts:
    described = tuple(
        ColumnFacts(attnum, name, type_oid, -1, {INT4: "integer", TEXT: "text"}[type_oid], attnum == 1, "")
        for attnum, name, type_oid in columns
    )
    return RelationFacts(oid, "s", table, "r", identity, described, primary_key, primary_key, None)


ID = ("id", INT4, True)
NOTE = ("note", TEXT, False)
FACTS = facts((1, "id", INT4), (2, "note", TEXT), primary_key=("id",))


def test_first_description_is_version_one() -> None:
    info = Relations().update(message(ID, NOTE), FACTS)
    assert (info.version, info.key_columns) == (1, ("id",))
    assert [(c.name, c.is_key, c.attnum, c.type_name, c.not_null) for c in info.columns] == [
        ("id", True, 1, "integer", True),
        ("note", False, 2, "text", False),
    ]


def test_same_description_keeps_its_version() -> None:
    relations = Relations()
    first = relations.update(message(ID, NOTE), FACTS)
    assert relations.update(message(ID, NOTE), FACTS) is first
    assert relations[7] is first
    assert list(relations) == [first]


@pytest.mark.parametrize(
    "changed",
    [
        message(ID, NOTE, ("more", TEXT, False)),
        message(ID),
        message(ID, ("note", INT4, False)),
        message(ID, ("comment", TEXT, False)),
        message(NOTE, ID),
        message(ID, ("note", TEXT, True)),
        message(ID, NOTE, identity="i"),
        message(ID, NOTE, oid=8),
    ],
    ids=["added", "dropped", "retyped", "renamed", "reordered", "key", "identity", "created again"],
)
def test_each_change_is_a_new_version(changed: Relation) -> None:
    relations = Relations()
    relations.update(message(ID, NOTE))
    assert relations.update(changed).version == 2


def test_what_was_before_keeps_its_number_when_it_comes_back() -> None:
    relations = Relations()
    wide = message(ID, NOTE)
    assert [relations.update(each).version for each in (message(ID), wide, message(ID), wide)] == [1, 2, 1, 2]


def test_versions_go_on_across_a_restart() -> None:
    before = Relations()
    for each in (message(ID), message(ID, NOTE)):
        before.update(each)
    stored = [RelationInfo.from_json(info.to_json(Types())) for info in before]
    after = Relations(reversed(stored))
    assert 7 not in after
    assert after.update(message(ID)).version == 1
    assert after.update(message(ID, NOTE)).version == 2
    assert after.update(message(NOTE)).version == 3


def test_each_table_counts_by_itself() -> None:
    relations = Relations()
    assert relations.update(message(ID)).version == 1
    assert relations.update(message(ID, table="other", oid=8)).version == 1
    assert relations.update(message(ID, table="renamed")).version == 1
    assert relations[7].table == "renamed"


def test_column_dropped_and_added_again_is_another_column() -> None:
    relations = Relations()
    relations.update(message(ID, NOTE), FACTS)
    again = facts((1, "id", INT4), (3, "note", TEXT), primary_key=("id",))
    assert relations.update(message(ID, NOTE), again).version == 2


@pytest.mark.parametrize(
    "newer",
    [
        None,
        facts((1, "id", INT4), (2, "renamed", TEXT)),
        facts((1, "note", TEXT), (2, "id", INT4)),
        facts((1, "id", INT4), (2, "note", INT4)),
        facts((1, "id", INT4), (2, "note", TEXT), table="renamed"),
        facts((1, "id", INT4), (2, "note", TEXT), oid=9),
    ],
    ids=["gone", "renamed", "swapped", "retyped", "table renamed", "another table"],
)
def test_newer_catalogue_is_not_believed_and_the_known_version_stays(newer: RelationFacts | None) -> None:
    relations = Relations()
    known = relations.update(message(ID, NOTE), FACTS)
    assert relations.update(message(ID, NOTE), newer) is known
    alone = Relations().update(message(ID, NOTE), newer)
    assert [column.attnum for column in alone.columns] == [None, None]
    assert alone.key_columns == ("id",)


MORE = ("more", TEXT, False)


@pytest.mark.parametrize(
    ("columns", "newer", "numbers"),
    [
        ((ID, NOTE, MORE), facts((1, "id", INT4), (2, "renamed", TEXT)), [1, 2, None]),
        ((ID, ("renamed", TEXT, False), MORE), facts((1, "id", INT4), (2, "renamed", INT4)), [1, 2, None]),
        ((ID, ("retyped", INT4, False)), facts((1, "id", INT4), (2, "retyped", TEXT)), [1, 2]),
        ((ID, NOTE, MORE), facts((1, "id", INT4), (3, "more", TEXT)), [1, None, None]),
        ((ID, ("shown", TEXT, False), NOTE), facts((1, "id", INT4), (3, "note", TEXT)), [1, None, None]),
        ((ID, ("meanwhile", TEXT, False)), facts((1, "id", INT4), (2, "renamed", TEXT)), [None, None]),
        ((NOTE,), facts((1, "id", INT4), (2, "renamed", TEXT)), [None]),
        ((NOTE, MORE), facts((1, "id", INT4), (2, "renamed", TEXT)), [None, None]),
        ((ID, NOTE, MORE), facts((1, "id", INT4), (2, "renamed", TEXT), oid=8), [None, None, None]),
    ],
    ids=[
        "renamed later",
        "renamed before, retyped later",
        "both before, retyped later",
        "dropped later",
        "a number that was not there",
        "renamed twice",
        "fewer are published",
        "others are published",
        "created again",
    ],
)
def test_numbers_are_counted_off_when_the_catalogue_is_ahead(
    columns: tuple[tuple[str, int, bool], ...], newer: RelationFacts, numbers: list[int | None]
) -> None:
    relations = Relations()
    relations.update(message(ID, NOTE), FACTS)
    info = relations.update(message(*columns), newer)
    assert info.version == 2
    assert [column.attnum for column in info.columns] == numbers
    assert {column.type_name for column in info.columns} == {None}, "what the catalogue says now was not so then"
    assert Relations([RelationInfo.from_json(info.to_json(Types()))]).update(message(*columns), newer) == info


def test_published_columns_may_be_fewer_than_the_table_has() -> None:
    info = Relations().update(message(("note", TEXT, False)), FACTS)
    assert [column.attnum for column in info.columns] == [2]


@pytest.mark.parametrize("identity", ["f", "n"])
def test_key_of_full_and_nothing_is_the_primary_key(identity: str) -> None:
    flagged = identity == "f"
    described = message(("id", INT4, flagged), ("note", TEXT, flagged), identity=identity)
    relations = Relations()
    known = relations.update(described, FACTS)
    assert known.key_columns == ("id",)
    assert relations.update(described, None) is known
    assert Relations().update(described, None).key_columns == ()
    assert Relations().update(message(("note", TEXT, flagged), identity=identity), FACTS).key_columns == ()


def full(*names: str, types: dict[str, int] | None = None) -> Relation:
    return message(*((name, (types or {}).get(name, INT4), True) for name in names), identity="f")


NOW = facts((1, "id", INT4), (2, "renamed", INT4), primary_key=("id",), identity="f")
BEFORE = facts((1, "id", INT4), (2, "v", INT4), primary_key=("id",), identity="f")


@pytest.mark.parametrize(
    ("then", "newer", "key"),
    [
        (full("id", "v", "z"), NOW, ("id",)),
        (full("id", "v", "z"), None, ("id",)),
        (full("old", "v", "z"), NOW, ("old",)),
        (full("id", "v", "z", types={"id": TEXT}), NOW, ("id",)),
        (full("id", "v", "z"), NOW._replace(primary_key=("renamed",)), ()),
        (full("id", "v", "z"), NOW._replace(primary_key=()), ()),
        (full("v", "z"), NOW, ()),
        (full("id", "v", "z"), NOW._replace(id=8), ("id",)),
    ],
    ids=[
        "column renamed later",
        "table dropped later",
        "key column renamed",
        "key column retyped",
        "another key now",
        "no key now",
        "the key is not published",
        "created again",
    ],
)
def test_key_of_full_when_the_catalogue_is_ahead(
    then: Relation, newer: RelationFacts | None, key: tuple[str, ...]
) -> None:
    before = BEFORE
    if then.columns[0].name == "old":
        before = BEFORE._replace(
            columns=(BEFORE.columns[0]._replace(name="old"), BEFORE.columns[1]), primary_key=("old",)
        )
    relations = Relations()
    relations.update(full(before.columns[0].name, "v"), before)
    info = relations.update(then, newer)
    assert (info.version, info.key_columns) == (2, key)
    assert [column.name for column in info.columns if column.is_key] == list(key)
    known = Relations([RelationInfo.from_json(one.to_json(Types())) for one in relations])
    assert known.update(then, newer).version == 2


def test_key_of_full_without_an_earlier_version() -> None:
    assert Relations().update(full("id", "v", "z"), NOW).key_columns == ("id",)
    assert Relations().update(full("v", "z"), NOW).key_columns == ()
    relations = Relations()
    relations.update(full("id", "v"), BEFORE._replace(primary_key=()))
    assert relations.update(full("id", "v", "z"), NOW).key_columns == (), "the primary key may have come later"


def test_an_index_that_was_the_identity_says_nothing_of_the_primary_key() -> None:
    relations = Relations()
    by_index = facts((1, "id", INT4), (2, "v", INT4), primary_key=("id",), identity="i")._replace(identity_key=("v",))
    first = relations.update(message(("id", INT4, False), ("v", INT4, True), identity="i"), by_index)
    assert first.key_columns == ("v",)
    assert relations.update(full("id", "v", "z"), NOW).key_columns == ("id",)


def test_a_key_that_is_not_sent_whole_is_none() -> None:
    """PostgreSQL before 18 flags the columns that it sends, and not the generated one."""
    generated = facts((1, "id", INT4), (2, "g", INT4), (3, "v", INT4), primary_key=("id", "g"))
    generated = generated._replace(
        columns=tuple(one._replace(generated="s" if one.name == "g" else "") for one in generated.columns)
    )
    described = message(ID, ("v", INT4, False))
    relations = Relations()
    info = relations.update(described, generated)
    assert unsent_key(described, generated) == ("g",)
    assert (info.key_columns, [column.is_key for column in info.columns]) == ((), [False, False])
    assert Relations([RelationInfo.from_json(info.to_json(Types()))]).update(described, generated).version == 1
    ahead = generated._replace(columns=(*generated.columns[:2], generated.columns[2]._replace(name="w")))
    assert relations.update(message(ID, ("v", INT4, False), MORE), ahead).key_columns == ()
    added = facts((1, "id", INT4), (2, "w", INT4), (3, "tenant", INT4), primary_key=("id", "tenant"))
    assert relations.update(message(ID, ("v", TEXT, False)), added).key_columns == ("id",), "it was added later"
    listed = facts((1, "id", INT4), (2, "k", INT4), (3, "v", INT4), primary_key=("id", "k"))
    assert Relations().update(described, listed).key_columns == ()


def test_row_of_a_relation_that_was_never_described() -> None:
    with pytest.raises(DecodeError, match="relation 5 came before"):
        Relations()[5]


def test_json_says_what_a_reader_needs() -> None:
    price, prices = 50_001, 50_002
    types = Types(
        [
            TypeFacts(price, "s", "price", "d", base_oid=1700, base_modifier=655366),
            TypeFacts(prices, "s", "_price", "b", element_oid=price),
        ]
    )
    info = Relations().update(message(ID, ("größe", price, False), ("ps", prices, False)))
    written = json.loads(info.to_json(types))
    assert written["key"] == ["id"]
    assert (written["replica_identity"], written["version"], written["table"]) == ("default", 1, "t")
    one, many = written["columns"][1:]
    assert (one["name"], one["type"], one["base"], one["base_modifier"], one["kind"]) == (
        "größe",
        "price",
        "numeric",
        655366,
        "plain",
    )
    assert (many["kind"], many["element"], many["element_kind"]) == ("array", "numeric", "plain")


names = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=5)


@given(
    st.lists(
        st.tuples(names, st.sampled_from([INT4, TEXT, 99_999]), st.booleans()), unique_by=lambda c: c[0], max_size=5
    ),
    st.sampled_from("dnfi"),
)
def test_json_round_trip(columns: list[tuple[str, int, bool]], identity: str) -> None:
    info = Relations().update(message(*columns, identity=identity))
    assert RelationInfo.from_json(info.to_json(Types())) == info
    with_facts = Relations().update(message(ID, NOTE), FACTS)
    assert RelationInfo.from_json(with_facts.to_json(Types())) == with_facts


@given(st.one_of(st.binary(max_size=40), st.sampled_from([b"[]", b"{}", b"null", b'{"key": [], "columns": [1]}'])))
def test_garbage_in_the_schema_topic(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        RelationInfo.from_json(data)


def test_facts_of_real_tables(each_database: Database) -> None:
    each_database.execute("""
        create table "Odd ""näme" (b text, "a" int, c int generated always as (a * 2) stored, gone int, d numeric(8, 3),
                                   primary key (c, b) include (d));
        alter table "Odd ""näme" drop column gone;
        create table indexed (x int, y int not null, z text);
        create unique index indexed_y on indexed (y) include (z);
        alter table indexed replica identity using index indexed_y;
        create table whole (a int primary key, b int);
        alter table whole replica identity full;
        create table deferred (a int primary key deferrable);
        create table bare (a int);
        alter table bare replica identity nothing;
        create table parent (id int primary key) partition by range (id);
        create table middle partition of parent for values from (0) to (10) partition by list (id);
        create table leaf partition of middle for values in (1);
    """)
    with connect(each_database.dsn) as session:
        odd = catalogue.find_relation(session, "public", 'Odd "näme')
        assert odd is not None
        assert [(c.attnum, c.name, c.type_name, c.not_null, c.generated) for c in odd.columns] == [
            (1, "b", "text", True, ""),
            (2, "a", "integer", False, ""),
            (3, "c", "integer", True, "s"),
            (5, "d", "numeric(8,3)", False, ""),
        ]
        assert odd.primary_key == odd.identity_key == ("b", "c")
        found = {
            name: catalogue.find_relation(session, "public", name)
            for name in ("indexed", "whole", "deferred", "bare", "parent", "leaf", "absent")
        }
    assert found["absent"] is None
    described = {
        name: (fact.kind, fact.replica_identity, fact.primary_key, fact.identity_key, fact.partition_root)
        for name, fact in found.items()
        if fact
    }
    assert described == {
        "indexed": ("r", "i", (), ("y",), None),
        "whole": ("r", "f", ("a",), ("a", "b"), None),
        "deferred": ("r", "d", ("a",), (), None),
        "bare": ("r", "n", (), (), None),
        "parent": ("p", "d", ("id",), ("id",), None),
        "leaf": ("r", "d", ("id",), ("id",), ("public", "parent")),
    }
