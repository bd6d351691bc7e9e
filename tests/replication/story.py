"""Reads a scenario: commands that tell a story, and after `----` what is heard of it, up to an empty line.

Lines that begin with # are prose. With WALSTREAM_REWRITE=1 the files are written anew with what is heard now; look at
the difference before keeping it. Commands:

    cluster 3 min_isr=2 digest_records=0     begin; settings by their names in CoreSettings
    elect B | elect B uncleanly              the metadata service elects
    B writes m1 m2 [acks=1]                  produce; acks=all unless said otherwise
    run | 10s pass | 40ms pass               let everything happen that can; and time pass
    B crashes | B starts                     unsynced records are lost
    B loses all from 3                       ... while it is down: durable records too
    B gets a new disk                        ... all of it, and what it knew of epochs
    B hangs | B goes on                      its disk: nothing is synced, nothing ends
    B syncs                                  ... although it hangs: once
    A and B part | A and B meet              no link between them
    A tells B [2] | A to B is lost [2]       deliver, or lose, messages under way
    A to B comes twice | A to B overtakes    repeat the first message under way, or put the last before it
    metadata hangs | metadata answers [unknown | late]
    A is out of reach | A is within reach    of the metadata service
    B forgets that                           ... that its disk has lost anything
    B is released                            an operator lifts its quarantine
    A sends                                  what the driver has to do for A is done: frames are under way
    B rots at 2 | B differs at 2 as x        damage that is found; a difference that nobody knows of
    B trims to 3                             the leader's log start moves
    show | show A                            how things stand
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from replication.memory_log import MemoryLog, Record
from replication.world import World, name, number
from walstream.cluster.metadata import NodeId, Refusal
from walstream.replication import events as ev
from walstream.replication.follower import Follower
from walstream.replication.leader import Leader
from walstream.replication.settings import CoreSettings

BREAK = "----"


def play(text: str) -> str:
    """Return the text with what is heard now after each `----`."""
    story, out, is_expected = Story(), [], False
    for line in text.splitlines():
        if is_expected:
            is_expected = bool(line.strip())
            if is_expected:
                continue
        out.append(line)
        if line == BREAK:
            is_expected = True
            out += story.heard()
        elif line and not line.startswith("#"):
            story.obey(line)
    return "\n".join(out).rstrip("\n") + "\n"


class Story:
    def __init__(self) -> None:
        self.world = World(0)
        self.lines: list[str] = []
        self._quiet = 0

    def heard(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def obey(self, line: str) -> None:
        for pattern, method in COMMANDS:
            if match := pattern.fullmatch(line):
                method(self, *match.groups())
                self.lines += self.world.told
                self.world.told.clear()
                return
        raise ValueError(f"cannot read {line!r}")

    def cluster(self, count: str, settings: str) -> None:
        values = dict(pair.split("=") for pair in settings.split())
        min_isr = int(values.pop("min_isr", 1))
        self.world = World(
            int(count),
            min_isr,
            CoreSettings(**{key: int(value) if value.isdigit() else value for key, value in values.items()}),  # type: ignore[arg-type]
        )

    def elect(self, node: str, uncleanly: str | None) -> None:
        if not self.world.elect(number(node), unclean=bool(uncleanly)):
            self.lines.append("nobody can be elected")
        else:
            state = self.world.state
            self.lines.append(f"{name(state.leader)} is elected in epoch {state.epoch}")

    def writes(self, node: str, texts: str, acks: str | None) -> None:
        for text in texts.split():
            self.world.produce(number(node), text, int(acks) if acks else -1)

    def run(self) -> None:
        self.world.run()

    def time_passes(self, count: str, unit: str) -> None:
        self.world.run(int(count) * (1_000 if unit == "s" else 1))

    def crashes(self, node: str) -> None:
        self.world.disconnect(number(node))
        self.world.nodes[number(node)].crash()

    def starts(self, node: str) -> None:
        self.world.nodes[number(node)].start()
        self.world.connect()

    def loses(self, node: str, offset: str) -> None:
        one = self.world.nodes[number(node)]
        assert not one.is_up
        one.is_unclean = one.log.lose(int(offset))

    def new_disk(self, node: str) -> None:
        one = self.world.nodes[number(node)]
        assert not one.is_up
        one.log, one.is_unclean = MemoryLog(), True

    def hangs(self, node: str) -> None:
        self.world.nodes[number(node)].has_slow_disk = True

    def goes_on(self, node: str) -> None:
        self.world.nodes[number(node)].has_slow_disk = False

    def syncs(self, node: str) -> None:
        one = self.world.nodes[number(node)]
        for _ in range(len(one.tasks)):
            one.tasks.popleft()()
        if one.log.flush():
            one.handle(ev.Durable())

    def part(self, one: str, other: str) -> None:
        self.world.cuts.add(frozenset((number(one), number(other))))
        self.world.disconnect(number(one), number(other))

    def meet(self, one: str, other: str) -> None:
        self.world.cuts.discard(frozenset((number(one), number(other))))
        self.world.connect()

    def _ways(self, one: str, other: str) -> list[tuple[tuple[NodeId, NodeId], NodeId]]:
        sender, receiver = number(one), number(other)
        links = ((sender, receiver), (receiver, sender))
        return [(link, sender) for link in links if self.world.wires.get((link, sender))]

    def tells(self, one: str, other: str, count: str | None) -> None:
        for _ in range(int(count or 1)):
            self.world.deliver_one(*self._ways(one, other)[0])

    def is_lost(self, one: str, other: str, count: str | None) -> None:
        for _ in range(int(count or 1)):
            lost = self.world.wires[self._ways(one, other)[0]].popleft()
            self.lines.append(f"lost: {type(lost).__name__.lower()}")

    def comes_twice(self, one: str, other: str) -> None:
        wire = self.world.wires[self._ways(one, other)[0]]
        wire.appendleft(wire[0])

    def overtakes(self, one: str, other: str) -> None:
        self.world.wires[self._ways(one, other)[0]].rotate(1)

    def metadata_hangs(self) -> None:
        self.world.has_metadata = False

    def metadata_answers(self, how: str | None) -> None:
        world = self.world
        if how == "late":
            effect = world.proposals[0]
            world.answer_proposal(Refusal.UNKNOWN, is_applied=False)
            world.proposals.append(effect)
        elif how == "unknown":
            world.answer_proposal(Refusal.UNKNOWN)
        else:
            world.reach()

    def out_of_reach(self, node: str) -> None:
        self.world.strangers.add(number(node))

    def within_reach(self, node: str) -> None:
        self.world.reach(number(node))

    def forgets(self, node: str) -> None:
        one = self.world.nodes[number(node)]
        one.is_unclean = False
        one.log.hint = (min(one.log.hint[0], one.log.log_end), one.log.hint[1])

    def released(self, node: str) -> None:
        self.world.nodes[number(node)].handle(ev.QuarantineLifted())

    def sends(self, node: str) -> None:
        one = self.world.nodes[number(node)]
        while one.sends:
            one.sends.popleft()()

    def rots(self, node: str, offset: str) -> None:
        one = self.world.nodes[number(node)]
        one.log.damaged.append(int(offset))
        one.handle(ev.DamageFound(((int(offset), int(offset) + 1),)))

    def differs(self, node: str, offset: str, text: str) -> None:
        log = self.world.nodes[number(node)].log
        log.records = [one._replace(text=text) if one.offset == int(offset) else one for one in log.records]

    def trims(self, node: str, offset: str) -> None:
        one = self.world.nodes[number(node)]
        one.log.trim(int(offset))
        one.handle(ev.Tick())

    def show(self, node: str | None) -> None:
        for one in self.world.nodes.values():
            if node in (None, name(one.id)):
                self.lines.append(self._standing(one.id))
        state = self.world.state
        if node is None:
            isr, elr = _names(state.isr_nodes), _names(state.elr)
            self.lines.append(
                f"the record: {name(state.leader)} leads epoch {state.epoch}, ISR {isr or '-'}, ELR {elr or '-'}"
            )

    def _standing(self, node: NodeId) -> str:
        one = self.world.nodes[node]
        log, role = one.log, one.manager.role
        if not one.is_up:
            what = "down"
        elif isinstance(role, Leader):
            what = f"leads epoch {role.epoch}" + ("" if role.is_settled else ", unsettled")
        elif isinstance(role, Follower):
            what = f"follows {name(role.leader)} in epoch {role.epoch}, {role.stage.value}"
        else:
            what = "no role"
        offsets = f"start {log.log_start} hw {log.high_watermark} durable {log.durable_end} end {log.log_end}"
        return f"{name(node)} {what}; {_records(log.records)}; {offsets}"


def _records(records: list[Record]) -> str:
    return " ".join(f"{record.text}/{record.epoch}" for record in records) or "empty"


def _names(nodes: object) -> str:
    return ",".join(name(node) for node in sorted(nodes))  # type: ignore[call-overload]


NODE, TIMES = r"([A-Z])", r"(?: (\d+))?"
COMMANDS: list[tuple[re.Pattern[str], Callable[..., None]]] = [
    (re.compile(pattern), method)
    for pattern, method in {
        r"cluster (\d)((?: \w+=\w+)*)": Story.cluster,
        rf"elect {NODE}( uncleanly)?": Story.elect,
        rf"{NODE} writes ((?:\w+ ?)+?)(?: acks=(\d))?": Story.writes,
        r"run": Story.run,
        r"(\d+)(s|ms) pass": Story.time_passes,
        rf"{NODE} crashes": Story.crashes,
        rf"{NODE} starts": Story.starts,
        rf"{NODE} loses all from (\d+)": Story.loses,
        rf"{NODE} gets a new disk": Story.new_disk,
        rf"{NODE} hangs": Story.hangs,
        rf"{NODE} goes on": Story.goes_on,
        rf"{NODE} syncs": Story.syncs,
        rf"{NODE} and {NODE} part": Story.part,
        rf"{NODE} and {NODE} meet": Story.meet,
        rf"{NODE} tells {NODE}{TIMES}": Story.tells,
        rf"{NODE} to {NODE} is lost{TIMES}": Story.is_lost,
        rf"{NODE} to {NODE} comes twice": Story.comes_twice,
        rf"{NODE} to {NODE} overtakes": Story.overtakes,
        r"metadata hangs": Story.metadata_hangs,
        r"metadata answers(?: (unknown|late))?": Story.metadata_answers,
        rf"{NODE} is out of reach": Story.out_of_reach,
        rf"{NODE} is within reach": Story.within_reach,
        rf"{NODE} forgets that": Story.forgets,
        rf"{NODE} is released": Story.released,
        rf"{NODE} sends": Story.sends,
        rf"{NODE} rots at (\d+)": Story.rots,
        rf"{NODE} differs at (\d+) as (\w+)": Story.differs,
        rf"{NODE} trims to (\d+)": Story.trims,
        rf"show(?: {NODE})?": Story.show,
    }.items()
]


def files() -> list[Path]:
    return sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))
