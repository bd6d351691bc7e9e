"""Everything that goes wrong on purpose, and how it is put right again.

Picks a fault of the scenario every now and then and does it to a node, a disk, the network or the metadata service;
most of them end by themselves after a while. `stop` ends them all: from then on the cluster has to recover.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from walstream.sim.clock import MS, SECOND
from walstream.sim.driver import Pace
from walstream.sim.metadata import SERVICE
from walstream.sim.network import Weather

if TYPE_CHECKING:
    from walstream.sim.cluster import Cluster
    from walstream.sim.node import SimNode

DOWN_US = (50 * MS, 6 * SECOND)
LASTS_US = (100 * MS, 8 * SECOND)


class Faults:
    """The one who breaks things."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self._is_over = False
        self._acts: dict[str, Callable[[], None]] = {
            "crash": self._crash,
            "kill": self._kill,
            "restart": self._restart,
            "fuse": self._fuse,
            "cut": self._cut,
            "isolate": self._isolate,
            "break": self._break,
            "weather": self._weather,
            "slow disk": self._slow_disk,
            "hanging disk": self._hanging_disk,
            "failing sync": self._failing_sync,
            "full disk": self._full_disk,
            "rot": self._rot,
            "wipe": self._wipe,
            "no metadata": self._no_metadata,
            "pause": self._pause,
            "handover": self._handover,
        }

    def start(self) -> None:
        """Begin."""
        if self._cluster.scenario.faults:
            self._schedule()

    def _schedule(self) -> None:
        self._clock.after(self._clock.between(*self._cluster.scenario.fault_every_us), self._act)

    def _act(self) -> None:
        if not self._is_over:
            self._acts[self._clock.random.choice(self._cluster.scenario.faults)]()
            self._schedule()

    def stop(self) -> None:
        """End every fault, start every node, and break nothing any more."""
        self._is_over = True
        cluster = self._cluster
        cluster.trace("world", "faults stop")
        cluster.network.weather = Weather()
        cluster.network.heal()
        for endpoint in cluster.network.endpoints():
            # A connection that lost or repeated a frame would be broken by now.
            if cluster.scenario.is_lossy:
                cluster.network.break_off(endpoint)
        cluster.metadata_available(True)
        for node in cluster.nodes:
            node.disk.is_full = False
            node.disk.failing_syncs = 0
            node.disk.fuse = None
            node.disk.cold_probability = 0.0
            node.resume()
            self._heal_disk(node)
            if not node.is_up:
                node.start()
            elif node.has_offline_partition():
                node.stop()
                node.start()

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _node(self, wanted: Callable[[SimNode], bool] = lambda node: node.is_up) -> SimNode | None:
        nodes = [node for node in self._cluster.nodes if wanted(node)]
        return self._clock.random.choice(nodes) if nodes else None

    def _later(self, callback: Callable[[], None], within_us: tuple[int, int] = LASTS_US) -> None:
        """Put something right after a while, unless everything has been put right by then."""

        def act() -> None:
            if not self._is_over:
                callback()

        self._clock.after(self._clock.between(*within_us), act)

    def _start(self, node: SimNode) -> None:
        if not node.is_up:
            if self._clock.chance(0.15):
                node.disk.fuse = self._clock.between(0, 40)
            node.start()
            if not node.is_up:
                self._later(partial(self._start, node), DOWN_US)

    def _crash(self) -> None:
        node = self._node()
        if node is not None:
            node.crash(is_power_lost=True)
            self._later(partial(self._start, node), DOWN_US)

    def _kill(self) -> None:
        node = self._node()
        if node is not None:
            node.crash(is_power_lost=False)
            self._later(partial(self._start, node), DOWN_US)

    def _restart(self) -> None:
        node = self._node()
        if node is not None:
            node.stop()
            self._later(partial(self._start, node), DOWN_US)

    def _fuse(self) -> None:
        """Cut the power in the middle of whatever a node does next on its disk."""
        node = self._node()
        if node is not None:
            node.disk.fuse = self._clock.between(0, 15)

            def start() -> None:
                node.disk.fuse = None
                self._start(node)

            self._later(start, DOWN_US)

    def _pause(self) -> None:
        """Let a process stand still, as a stopped virtual machine does; it comes back none the wiser."""
        node = self._node()
        if node is not None:
            node.pause()
            self._later(node.resume)

    def _handover(self) -> None:
        self._cluster.hand_over()

    # ── the network and the metadata service ─────────────────────────────────────────────────────────────────────

    def _cut(self) -> None:
        network, random = self._cluster.network, self._clock.random
        places = [SERVICE, *(node.id for node in self._cluster.nodes)]
        one, other = random.sample(places, 2)
        network.cut(one, other)
        if random.random() < 0.5:
            network.cut(other, one)
        self._cluster.trace("net", f"cut {one} {other}")
        self._later(self._heal)

    def _isolate(self) -> None:
        network, random = self._cluster.network, self._clock.random
        node = random.choice(self._cluster.nodes).id
        places = [place.id for place in self._cluster.nodes if place.id != node]
        if random.random() < 0.6:
            places.append(SERVICE)
        for place in places:
            network.cut(node, place)
            network.cut(place, node)
        self._cluster.trace("net", f"isolate {node} from {places}")
        self._later(self._heal)

    def _heal(self) -> None:
        self._cluster.trace("net", "heal")
        self._cluster.network.heal()

    def _break(self) -> None:
        endpoints = self._cluster.network.endpoints()
        if endpoints:
            endpoint = self._clock.random.choice(endpoints)
            self._cluster.trace("net", f"break {endpoint.local} {endpoint.remote}")
            self._cluster.network.break_off(endpoint)

    def _weather(self) -> None:
        random = self._clock.random
        weather = Weather(delay_us=random.choice(((50, 1_500), (1_000, 30 * MS), (10 * MS, 400 * MS))))
        weather.splitting = random.choice((0.0, 0.0, 0.3))
        if self._cluster.scenario.is_lossy:
            weather.splitting = 0.0  # Half a lost frame is not what this is about.
            weather.loss = random.choice((0.0, 0.01, 0.1))
            weather.duplication = random.choice((0.0, 0.05, 0.3))
            weather.reordering = random.choice((0.0, 0.05, 0.3))
        self._cluster.network.weather = weather
        self._cluster.trace("net", f"weather {weather}")
        self._later(self._calm)

    def _calm(self) -> None:
        self._cluster.network.weather = Weather()

    def _no_metadata(self) -> None:
        self._cluster.metadata_available(False)
        self._later(partial(self._cluster.metadata_available, True))

    # ── disks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _slow_disk(self) -> None:
        node = self._node()
        if node is not None:
            slow = self._clock.between(20 * MS, 900 * MS)
            node.pace.flush_us = node.pace.job_us = (slow // 2, slow)
            node.disk.cold_probability = 0.3
            self._cluster.trace(f"n{node.id}", f"slow disk {slow}")
            self._later(partial(self._heal_disk, node))

    def _hanging_disk(self) -> None:
        node = self._node()
        if node is not None:
            node.pace.is_hanging = True
            self._cluster.trace(f"n{node.id}", "hanging disk")
            self._later(partial(self._heal_disk, node))

    def _heal_disk(self, node: SimNode) -> None:
        fresh = Pace()
        node.pace.flush_us, node.pace.job_us = fresh.flush_us, fresh.job_us
        node.disk.cold_probability = 0.0
        if node.pace.is_hanging:
            node.pace.is_hanging = False
            self._cluster.trace(f"n{node.id}", "disk moves again")
            node.disk_moves()

    def _failing_sync(self) -> None:
        """Let an fsync fail. The partitions it covered are offline until the node has been restarted."""
        node = self._node()
        if node is not None:
            node.disk.failing_syncs = 1
            self._cluster.trace(f"n{node.id}", "failing sync")

            def mend() -> None:
                node.disk.failing_syncs = 0
                if node.is_up and node.has_offline_partition():
                    node.crash(is_power_lost=self._clock.chance(0.5))
                    self._later(partial(self._start, node), DOWN_US)

            self._later(mend)

    def _full_disk(self) -> None:
        node = self._node()
        if node is not None:
            node.disk.is_full = True
            self._cluster.trace(f"n{node.id}", "full disk")

            def mend() -> None:
                node.disk.is_full = False
                self._start(node)

            self._later(mend)

    def _rot(self) -> None:
        """Flip a bit in the one log whose medium may be harmed."""
        node = self._cluster.nodes[self._cluster.scenario.victim - 1]
        if self._cluster.leads_statically(node.id):
            return  # What only it holds, nobody could give back, and nobody else could lead.
        where = node.rot()
        if where is not None:
            self._cluster.trace(f"n{node.id}", f"rot {where}")

    def _wipe(self) -> None:
        node = self._cluster.nodes[self._cluster.scenario.victim - 1]
        if node.is_up and not self._cluster.leads_statically(node.id):
            node.crash(is_power_lost=True)
            node.wipe()
            self._later(partial(self._start, node), DOWN_US)
