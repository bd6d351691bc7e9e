"""The feed on a cluster: partitions with different leaders, which are killed one after the other."""

from __future__ import annotations

import asyncio
import threading
from itertools import islice, pairwise

import pytest

from integration.feed_processes import MakeFeed, Writing, check_complete
from integration.replicating import Cluster, running
from integration.support import MakeNode, seeded, wait_for
from integration.written_log import Writers, everything, lsns_of, places_of, read_count, reading
from walstream.feed.service.ack_log import TOPIC as ACKS


def create(cluster: Cluster, topic: str, partitions: int) -> None:
    cluster.create(topic, partitions, message_timestamp_type="LogAppendTime", min_insync_replicas=2)


async def test_one_order_over_several_leaders_that_come_and_go(make_node: MakeNode) -> None:
    seed, dice = seeded()
    topics = {"a": 2, "b": 2, "c": 1}
    with running(make_node, leaders={"b": 2, "c": 3}) as cluster:
        for topic, partitions in topics.items():
            await asyncio.to_thread(create, cluster, topic, partitions)
        writers = Writers(cluster.address, topics, seed).start()
        async with reading(cluster.address) as log:
            live = await log.subscribe(0)
            frames = await read_count(live, 200)
            for number in dice.sample([1, 2, 3], 3):
                cluster[number].kill()
                await asyncio.sleep(1)
                await asyncio.to_thread(cluster[number].start)
                frames += await read_count(live, 200, timeout_s=60)
            await writers.stop()
            wanted = await asyncio.to_thread(everything, cluster.address, topics)
            frames += await read_count(live, len(wanted) - sum(map(len, frames)), timeout_s=60)
            lsns = lsns_of(frames)
            assert all(before < after for before, after in pairwise(lsns))
            assert set(places_of(frames)) == wanted
            again = await read_count(await log.subscribe(lsns[len(lsns) // 2]), len(lsns) - len(lsns) // 2)
            assert lsns_of(again) == lsns[len(lsns) // 2 :]
            await live.close()


@pytest.mark.timeout(600)
def test_a_feed_of_a_cluster_serves_while_leaders_come_and_go(make_node: MakeNode, make_feed: MakeFeed) -> None:
    """The whole way, over gRPC; and what was acknowledged is on every node's disk."""
    _, generator = seeded()
    seen, failed = [], []
    with running(make_node, leaders={"numbers": 2}) as cluster:
        create(cluster, "numbers", 3)
        feed = make_feed(cluster)
        writing = Writing(cluster, "numbers", 3, generator, 0.02)

        with feed.client() as client, client.subscribe("oldest") as stream:

            def follow() -> None:
                try:
                    for entry in stream:
                        seen.append((str(entry.lsn), entry.partition, int((entry.value or b"").split()[0])))
                except Exception as error:
                    failed.append(error)

            following = threading.Thread(target=follow)
            following.start()
            with writing.running():
                for number in (2, 1, 3):
                    before = len(seen)
                    wait_for(lambda before=before: failed or len(seen) > before + 50, "entries come", 60)
                    cluster[number].kill()
                    cluster[number].start()
            wait_for(lambda: failed or len(seen) >= writing.count, "everything has come", 60)
        following.join()
        assert not failed
        check_complete(seen, writing.sent)
        with feed.client() as client:
            entries = list(islice(client.subscribe("oldest"), 100))
            client.ack(entries[60].lsn)
        feed.kill()
        cluster.wait_in_sync(ACKS, 3)
        assert cluster.compare(ACKS) > 0
        feed.start()
        with feed.client() as client:
            assert list(islice(client.subscribe(), 40)) == entries[60:]
