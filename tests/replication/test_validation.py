from collections.abc import Callable

import pytest

from replication.memory_log import MemoryLog
from replication.world import World
from walstream.replication import effects as fx
from walstream.replication import events as ev
from walstream.replication.validation import violations


def sound() -> MemoryLog:
    log = MemoryLog()
    log.lead(3)
    for text in "abcd":
        log.append(text)
    log.flush()
    log.high_watermark = 2
    return log


def test_sound_log() -> None:
    assert violations(sound(), known_epoch=3) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda log: setattr(log, "high_watermark", 5), "high watermark 5 is above the durable end 4"),
        (lambda log: setattr(log, "log_start", -1), "log start is negative"),
        (lambda log: setattr(log, "log_start", 3), "log start 3 is above the high watermark 2"),
        (lambda log: setattr(log, "durable_end", 9), "durable end 9 is above the log end 4"),
        (lambda log: log.epochs.assign(4, 1_000), "above the log end"),
        (lambda log: setattr(log.epochs, "_entries", ([3, 3], [0, 2])), "does not rise"),
    ],
)
def test_what_cannot_be(spoil: Callable[[MemoryLog], None], words: str) -> None:
    log = sound()
    spoil(log)
    assert any(words in sentence for sentence in violations(log, known_epoch=4))


def test_epoch_of_the_log_that_was_never_persisted() -> None:
    assert "newest epoch known is 2" in violations(sound(), known_epoch=2)[0]


def test_log_that_is_being_cut_is_not_judged() -> None:
    log = sound()
    log.epochs.assign(4, 1_000)
    log.is_held = True
    assert violations(log, known_epoch=4) == []


def test_replica_that_cannot_be_is_quarantined_when_its_role_changes() -> None:
    world = World(2)
    world.elect(1)
    world.run(100)
    world.nodes[2].log.high_watermark = 7
    world.elect(1)
    world.run(100)
    assert any(node == 2 and isinstance(effect, fx.Quarantine) for node, effect in world.effects)
    assert world.nodes[2].manager.facts.quarantine
    world.nodes[2].log.high_watermark = 0
    world.nodes[2].handle(ev.QuarantineLifted())
    world.run(2_000)
    assert world.state.isr_nodes == {1, 2}
