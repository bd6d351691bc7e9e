"""The feed on a cluster: partitions with different leaders, which are killed one after the other."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from integration.replicating import Cluster, running
from integration.support import MakeNode, seeded
from integration.written_log import Writers, everything, lsns_of, places_of, read_count, reading


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
