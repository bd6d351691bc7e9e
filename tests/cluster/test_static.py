"""A static cluster's metadata: a new epoch for each life, its own proposals, and when a leader leads no more."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest

from walstream.cluster.local import ANY_PRODUCER_ID, Catalogue, NewTopic, Topic
from walstream.cluster.metadata import NO_LEADER, IsrProposal, Member, Outcome, PartitionState, Refusal
from walstream.cluster.static import Opening, StaticCluster, Told, decode_told, encode_told, producer_ids
from walstream.errors import CorruptLog, MalformedFrame
from walstream.log.disk import OsDisk
from walstream.log.driver import InlineDriver
from walstream.log.settings import TopicSettings
from walstream.log.store import LogStore

KEY = (UUID(int=7), 0)
NOW_MS = 1_700_000_000_000


def at_once(job: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
    try:
        job()
    except OSError as error:
        done(error)
    else:
        done(None)


def start(folder: Path, node: int = 1, now_ms: int = NOW_MS) -> StaticCluster:
    OsDisk().make_directory(folder)
    return StaticCluster(OsDisk(), folder, node, now_ms, at_once)


def opening(*, leader: int = 1, epoch: int = -1, unclean: bool = False, min_isr: int = 2) -> Opening:
    return Opening(KEY, (1, 2, 3), leader, min_isr, epoch, unclean)


def opened(cluster: StaticCluster, found: Opening) -> PartitionState:
    cluster.open([found])
    state = cluster.state(KEY)
    assert state is not None
    return state


def propose(cluster: StaticCluster, *nodes: int) -> Outcome:
    state = cluster.state(KEY)
    assert state is not None
    members = tuple(Member(node, cluster.incarnation if node == 1 else 5) for node in nodes)
    answers: list[Outcome] = []
    cluster.propose(IsrProposal(KEY, 1, state.epoch, state.version, members), answers.append)
    return answers[0]


class TestLives:
    def test_each_start_is_another_life(self, tmp_path: Path) -> None:
        first = start(tmp_path).incarnation
        assert start(tmp_path).incarnation == first + 1
        assert start(tmp_path, now_ms=NOW_MS - 10**9).incarnation == first + 2, "a clock that goes back repeats no life"

    def test_a_wiped_disk_does_not_live_an_old_life_again(self, tmp_path: Path) -> None:
        first = start(tmp_path / "a").incarnation
        assert start(tmp_path / "b", now_ms=NOW_MS + 60_000).incarnation > first

    def test_each_start_of_a_leader_takes_a_new_epoch(self, tmp_path: Path) -> None:
        epochs = [opened(start(tmp_path), opening()).epoch for _ in range(3)]
        assert epochs == [0, 1, 2]

    def test_above_every_epoch_that_the_log_has_heard_of(self, tmp_path: Path) -> None:
        assert opened(start(tmp_path), opening(epoch=41)).epoch == 42

    def test_a_follower_takes_none(self, tmp_path: Path) -> None:
        state = opened(start(tmp_path), opening(leader=2, epoch=5))
        assert (state.leader, state.epoch) == (2, 5)

    def test_a_torn_file_stops_the_start(self, tmp_path: Path) -> None:
        start(tmp_path)
        (tmp_path / "replication.json").write_bytes(b'{"incarn')
        with pytest.raises(CorruptLog, match="do not delete it"):
            start(tmp_path)


class TestInSync:
    def test_begins_with_the_leader_alone(self, tmp_path: Path) -> None:
        assert opened(start(tmp_path), opening()).isr_nodes == {1}

    def test_granted_durably(self, tmp_path: Path) -> None:
        cluster = start(tmp_path)
        opened(cluster, opening())
        assert propose(cluster, 1, 2).refusal is None
        assert propose(cluster, 1, 2, 3).refusal is None
        again = start(tmp_path)
        state = opened(again, opening(epoch=0))
        assert state.isr == (Member(1, again.incarnation), Member(2, 5), Member(3, 5))

    def test_eligible_replicas_are_kept(self, tmp_path: Path) -> None:
        cluster = start(tmp_path)
        opened(cluster, opening())
        propose(cluster, 1, 2)
        propose(cluster, 1)
        assert opened(start(tmp_path), opening(epoch=0)).elr == (2,)

    def test_a_stale_proposal_is_refused(self, tmp_path: Path) -> None:
        cluster = start(tmp_path)
        state = opened(cluster, opening())
        propose(cluster, 1, 2)
        answers: list[Outcome] = []
        cluster.propose(IsrProposal(KEY, 1, state.epoch, state.version, state.isr), answers.append)
        assert answers[0].refusal is Refusal.STALE_VERSION

    def test_what_cannot_be_saved_is_not_granted(self, tmp_path: Path) -> None:
        folder = tmp_path / "data"
        folder.mkdir()
        cluster = start(folder)
        opened(cluster, opening())
        (folder / "replication.json").unlink()
        folder.rmdir()
        assert propose(cluster, 1, 2).refusal is Refusal.UNKNOWN

    def test_after_another_has_led_nobody_else_counts(self, tmp_path: Path) -> None:
        cluster = start(tmp_path)
        opened(cluster, opening())
        propose(cluster, 1, 2, 3)
        assert opened(start(tmp_path), opening(epoch=9)).isr_nodes == {1}


class TestLeadingNoMore:
    def test_a_leader_that_lost_bytes_which_others_hold(self, tmp_path: Path) -> None:
        cluster = start(tmp_path)
        opened(cluster, opening())
        propose(cluster, 1, 2)
        state = opened(start(tmp_path), opening(epoch=0, unclean=True))
        assert (state.leader, state.last_leader, state.isr_nodes) == (NO_LEADER, 1, {2})
        # The next start finds a log that looks whole, and must remember that it is not.
        assert opened(start(tmp_path), opening(epoch=0)).leader == NO_LEADER

    def test_a_leader_that_lost_bytes_which_nobody_holds(self, tmp_path: Path) -> None:
        opened(start(tmp_path), opening())
        state = opened(start(tmp_path), opening(epoch=0, unclean=True))
        assert (state.leader, state.unclean_epoch) == (1, state.epoch)

    def test_a_new_disk_in_the_place_of_a_leaders(self, tmp_path: Path) -> None:
        assert opened(start(tmp_path), opening(unclean=True)).leader == NO_LEADER

    def test_a_resigned_leader_leads_again_in_a_new_epoch(self, tmp_path: Path) -> None:
        cluster = start(tmp_path)
        first = opened(cluster, opening())
        told: list[PartitionState] = []
        cluster.watch(KEY, told.append)
        cluster.resign(KEY, 1, first.epoch)
        cluster.lead_again(KEY, 17)
        assert [(state.leader, state.epoch) for state in told] == [(1, 0), (NO_LEADER, 0), (1, 18)]
        assert [state.version for state in told] == sorted({state.version for state in told})

    def test_one_that_lost_bytes_does_not(self, tmp_path: Path) -> None:
        cluster = start(tmp_path)
        opened(cluster, opening(unclean=True))
        cluster.lead_again(KEY, 17)
        state = cluster.state(KEY)
        assert state is not None
        assert state.leader == NO_LEADER


class TestCatalogue:
    def catalogue(self, folder: Path, *, founds: bool) -> Catalogue:
        return Catalogue(OsDisk(), folder, node_id=1, defaults=TopicSettings(), founds_cluster=founds)

    def test_a_new_node_belongs_to_no_cluster_until_it_joins(self, tmp_path: Path) -> None:
        founder, member = self.catalogue(tmp_path / "a", founds=True), self.catalogue(tmp_path / "b", founds=False)
        founder.apply(founder.create([NewTopic("t", 2, {}, (1, 2))]))
        assert founder.cluster_id
        assert not member.cluster_id
        member.apply(member.join(founder.cluster_id, founder.version))
        member.apply(member.take_over(founder.version, founder.topics.values()))
        again = self.catalogue(tmp_path / "b", founds=False)
        assert (again.cluster_id, again.version, again.topics) == (
            founder.cluster_id,
            founder.version,
            founder.topics,
        )

    def test_topics_older_than_the_disk(self, tmp_path: Path) -> None:
        founder, member = self.catalogue(tmp_path / "a", founds=True), self.catalogue(tmp_path / "b", founds=False)
        (old,) = founder.apply(founder.create([NewTopic("old", 1, {})]))
        member.apply(member.join(founder.cluster_id, founder.version))
        (new,) = founder.apply(founder.create([NewTopic("new", 1, {})]))
        assert member.is_older_than_disk(old, 0)
        assert not member.is_older_than_disk(new, 0)
        assert not founder.is_older_than_disk(old, 0), "who founded the cluster has had its disk from the beginning"

    def test_partitions_added_after_the_disk_joined_are_led(self, tmp_path: Path) -> None:
        """An older one is not: the disk before this one may have held what only the others have now."""
        founder, member = self.catalogue(tmp_path / "a", founds=True), self.catalogue(tmp_path / "b", founds=False)
        founder.apply(founder.create([NewTopic("t", 1, {}, (1, 2))]))
        founder.apply(founder.grow("t", 2))
        member.apply(member.join(founder.cluster_id, founder.version))
        store = LogStore(
            OsDisk(), tmp_path / "b", member, InlineDriver(), lambda: NOW_MS, lambda: NOW_MS, replicated=True
        )
        store.take_over(founder.version, list(founder.topics.values()))
        founder.apply(founder.grow("t", 4))
        told = decode_told(encode_told(Told(list(founder.topics.values()))))
        assert told.topics is not None
        store.take_over(founder.version, told.topics)
        opened = [store.partition("t", index) for index in range(4)]
        assert [partition.is_unclean for partition in opened] == [True, True, False, False]
        cluster = start(tmp_path / "b")
        cluster.open([Opening(one.key, (1, 2), 1, 2, one.leader_epoch, one.is_unclean) for one in opened])
        states = [cluster.state(partition.key) for partition in opened]
        assert [state.leader for state in states if state is not None] == [NO_LEADER, NO_LEADER, 1, 1]
        again = self.catalogue(tmp_path / "b", founds=False)
        assert again.topics == founder.topics, "growth is kept over a restart"

    def test_topics_of_a_version_that_noted_no_growth(self, tmp_path: Path) -> None:
        """In a file and on a link: their partitions are as old as they are."""
        body = b'{"topics": [{"name": "t", "id": "00000000-0000-0000-0000-000000000001", "partitions": 3, "since": 4}]}'
        told = decode_told(body)
        assert told.topics is not None
        OsDisk().make_directory(tmp_path)
        (tmp_path / "topics.json").write_bytes(body)
        for topic in (*told.topics, self.catalogue(tmp_path, founds=True).topics["t"]):
            assert [topic.since_of(index) for index in range(3)] == [4, 4, 4]

    def test_who_has_joined_is_remembered(self, tmp_path: Path) -> None:
        catalogue = self.catalogue(tmp_path, founds=True)
        change = catalogue.note_joined(3)
        assert change is not None
        catalogue.apply(change)
        assert catalogue.note_joined(3) is None
        assert self.catalogue(tmp_path, founds=True).joined == {3}

    def test_on_a_link(self) -> None:
        told = Told([Topic("t", UUID(int=1), 3, {"a": "b"}, [1, 2], 4)], {"x/0": (5, [1, 2])})
        assert decode_told(encode_told(told)) == told
        assert decode_told(encode_told(Told())) == Told()
        with pytest.raises(MalformedFrame):
            decode_told(b'{"topics": [{"name": 5}]}')


class TestProducerIds:
    def test_no_two_nodes_have_one_in_common(self) -> None:
        ranges = [ANY_PRODUCER_ID, *(producer_ids(node, NOW_MS) for node in (0, 1, 2, 32_766))]
        for one, other in pairwise(ranges):
            assert one.stop <= other.start
        assert ranges[-1].stop <= 2**63

    def test_a_wiped_node_gives_none_again(self, tmp_path: Path) -> None:
        def first(folder: Path, now_ms: int) -> int:
            ids = producer_ids(1, now_ms)
            catalogue = Catalogue(OsDisk(), folder, node_id=1, defaults=TopicSettings(), producer_ids=ids)
            return [catalogue.next_producer_id() for _ in range(3_000)][-1]

        last = first(tmp_path / "a", NOW_MS)
        assert first(tmp_path / "b", NOW_MS + 1_000) > last
        assert first(tmp_path / "a", NOW_MS - 10**9) > last, "nor one whose clock went back"


class TestUnsaved:
    def test_a_change_that_did_not_reach_the_file_is_told_to_nobody(self, tmp_path: Path) -> None:
        failing = [False]

        def run(job: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
            at_once(job, done) if not failing[0] else done(OSError(28, "No space left on device"))

        OsDisk().make_directory(tmp_path)
        cluster = StaticCluster(OsDisk(), tmp_path, 1, NOW_MS, run)
        first = opened(cluster, opening())
        assert propose(cluster, 1, 2, 3).refusal is None
        before = cluster.state(KEY)
        assert before is not None
        failing[0] = True
        proposal = IsrProposal(KEY, 1, first.epoch, before.version, (Member(1, cluster.incarnation), Member(2, 5)))
        answers: list[Outcome] = []
        cluster.propose(proposal, answers.append)
        cluster.propose(proposal, answers.append)
        assert answers == [Outcome(Refusal.UNKNOWN, None)] * 2
        read: list[PartitionState | None] = []
        cluster.read(KEY, read.append)
        assert read == [None]
        assert opened(start(tmp_path), opening()).isr_nodes == {1, 2, 3}, "a restart knows the file alone"

        failing[0] = False
        cluster.propose(proposal, answers.append)
        assert answers[2].refusal is Refusal.STALE_VERSION
        assert answers[2].state is not None
        assert answers[2].state.isr_nodes == {1, 2}
        assert opened(start(tmp_path), opening()).isr_nodes == {1, 2}

    @pytest.mark.parametrize("fails_first", [False, True])
    def test_nothing_is_shown_before_the_file_has_it(self, tmp_path: Path, fails_first: bool) -> None:
        """An epoch that was shown and lost in a crash would be taken a second time, by another life of this node."""
        jobs: list[tuple[Callable[[], None], Callable[[Exception | None], None]]] = []
        OsDisk().make_directory(tmp_path)
        cluster = StaticCluster(OsDisk(), tmp_path, 1, NOW_MS, lambda job, done: jobs.append((job, done)))

        def save() -> None:
            if fails_first:
                jobs.pop(0)[1](OSError(28, "No space left on device"))
                cluster.tick()
            at_once(*jobs.pop(0))
            assert not jobs

        def shown() -> PartitionState | None:
            return cluster.state(KEY)

        opened: list[Exception | None] = []
        cluster.open([opening()], opened.append)
        assert (shown(), opened) == (None, [])
        save()
        first = shown()
        assert first is not None
        told: list[PartitionState] = []
        cluster.watch(KEY, told.append)
        cluster.set_min_isr(KEY, 1)
        assert (shown(), told) == (first, [first])
        save()
        second = shown()
        assert second is not None
        assert (second.min_isr, told) == (1, [first, second])
        cluster.lead_again(KEY, 7)
        assert (shown(), told[2:]) == (second, [])
        save()
        third = shown()
        assert third is not None
        assert (third.epoch, told[2:]) == (8, [third])

    @pytest.mark.parametrize("has_resigned", [False, True])
    def test_a_failed_replica_does_not_lead_in_the_epoch_that_was_being_saved(
        self, tmp_path: Path, has_resigned: bool
    ) -> None:
        jobs: list[tuple[Callable[[], None], Callable[[Exception | None], None]]] = []
        OsDisk().make_directory(tmp_path)
        cluster = StaticCluster(OsDisk(), tmp_path, 1, NOW_MS, lambda job, done: jobs.append((job, done)))
        cluster.open([opening()])
        told: list[PartitionState] = []
        cluster.watch(KEY, told.append)
        if has_resigned:
            cluster.resign(KEY, 1, told[0].epoch)
        cluster.lead_again(KEY, 7)
        cluster.retire(KEY)
        while jobs:
            at_once(*jobs.pop(0))
            cluster.tick()
        state = cluster.state(KEY)
        assert state is not None
        assert (state.leader, state.last_leader, state.epoch) == (NO_LEADER, 1, 8)
        assert [one.leader for one in told] == [1, NO_LEADER, NO_LEADER]
        assert opened(start(tmp_path), opening()).epoch == 9, "the next start leads in a newer epoch"

    def test_a_leader_that_resigns_while_its_record_is_saved_has_resigned(self, tmp_path: Path) -> None:
        jobs: list[tuple[Callable[[], None], Callable[[Exception | None], None]]] = []
        OsDisk().make_directory(tmp_path)
        cluster = StaticCluster(OsDisk(), tmp_path, 1, NOW_MS, lambda job, done: jobs.append((job, done)))
        cluster.open([opening()])
        state = cluster.state(KEY)
        assert state is not None
        isr = (Member(1, cluster.incarnation), Member(2, 5))
        told: list[PartitionState] = []
        cluster.watch(KEY, told.append)
        cluster.propose(IsrProposal(KEY, 1, state.epoch, state.version, isr), lambda _: None)
        cluster.resign(KEY, 1, state.epoch)
        resigned = cluster.state(KEY)
        assert resigned is not None
        assert resigned.leader == NO_LEADER
        at_once(*jobs.pop(0))
        assert cluster.state(KEY) == told[-1] == resigned, "what was saved meanwhile is from before the resignation"
        cluster.tick()
        at_once(*jobs.pop(0))
        state = cluster.state(KEY)
        assert state is not None
        assert (state.leader, state.last_leader, state.isr_nodes) == (NO_LEADER, 1, {1, 2})
        cluster.tick()
        assert not jobs, "nothing is left to be saved"
