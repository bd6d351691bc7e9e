"""The order in which whoever was marked in a turn is called."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from walstream.node.marks import ROUNDS_MAX, Marks


def plain(call: Callable[[], None]) -> None:
    call()


class Told:
    """Writes down what it is called for, and does something then."""

    def __init__(self, name: str, story: list[str], act: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.story = story
        self.act = act

    def _called(self, what: str) -> None:
        self.story.append(f"{self.name} {what}")

    is_awaited = False

    def release(self) -> None:
        self._called("begins")

    def send_filled(self) -> None:
        self._called("sends")
        self.act()

    def look(self) -> None:
        self._called("looks")
        self.act()

    def looked(self) -> None:
        self._called("has looked")

    def serve(self) -> None:
        self._called("serves")
        self.act()

    def served(self) -> None:
        self._called("has served")


def test_clients_first_then_cores_then_links_all_of_which_send_before_any_core_hears() -> None:
    story: list[str] = []
    marks = Marks(plain)
    links = [Told("link 2", story), Told("link 3", story)]
    marks.mark_link(links[0])
    marks.mark(Told("partition", story, lambda: marks.mark_link(links[1])))
    marks.mark_connection(Told("client", story))
    marks.run()
    assert story == [
        "client sends", "partition looks", "link 2 serves", "link 3 serves", "link 2 has served", "link 3 has served",
        "partition has looked",
    ]  # fmt: skip
    assert not marks


@pytest.mark.parametrize("is_awaited", [False, True])
def test_the_disk_begins_after_the_followers_have_been_sent_to_only_if_somebody_waits_for_them(
    is_awaited: bool,
) -> None:
    story: list[str] = []
    marks, link = Marks(plain), Told("link", story)
    marks.mark_writes(Told("disk", story))
    partition = Told("partition", story, lambda: marks.mark_link(link))
    partition.is_awaited = is_awaited
    marks.mark(partition)
    marks.run()
    expected = ["partition looks", "link serves", "link has served", "partition has looked"]
    expected.insert(2 if is_awaited else 0, "disk begins")
    assert story == expected
    assert not marks


def test_what_a_round_leads_to_is_done_in_the_same_turn() -> None:
    story: list[str] = []
    marks, client = Marks(plain), Told("client", story)
    marks.mark(Told("partition", story, lambda: marks.mark_connection(client)))
    marks.run()
    assert story == ["partition looks", "client sends", "partition has looked"]


def test_a_hundred_marks_are_one_call() -> None:
    story: list[str] = []
    marks, client, link = Marks(plain), Told("client", story), Told("link", story)
    for _ in range(100):
        marks.mark_connection(client)
        marks.mark_link(link)
    marks.run()
    assert story == ["client sends", "link serves", "link has served"]


def test_who_marks_itself_again_and_again_ends_the_turn_and_is_left_for_the_next() -> None:
    story: list[str] = []
    marks = Marks(plain)
    busy = Told("link", story, lambda: marks.mark_link(busy))
    marks.mark_link(busy)
    marks.run()
    assert story.count("link serves") == ROUNDS_MAX
    assert marks


def test_what_one_raises_is_for_whoever_calls_them() -> None:
    def fail() -> None:
        raise RuntimeError("planted")

    marks = Marks(plain)
    marks.mark(Told("partition", [], fail))
    with pytest.raises(RuntimeError, match="planted"):
        marks.run()
