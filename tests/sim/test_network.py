from __future__ import annotations

from walstream.sim.clock import MS, SECOND, Clock
from walstream.sim.network import GIVE_UP_US, Endpoint, Network, Weather


class Pair:
    """Node 1 connected to node 2; what each side hears is kept."""

    def __init__(self, seed: int = 1, **weather: object) -> None:
        self.clock = Clock(seed)
        self.network = Network(self.clock, Weather(**weather))  # type: ignore[arg-type]
        self.near: Endpoint | None = None
        self.far: Endpoint | None = None
        self.heard: list[bytes] = []
        self.closed: list[str] = []
        self.network.listen(2, self.accept)
        self.network.connect(1, 2, self.opened)
        self.run()

    def accept(self, endpoint: Endpoint) -> None:
        self.far = endpoint
        endpoint.received = self.heard.append
        endpoint.heard_closed = lambda: self.closed.append("far")

    def opened(self, endpoint: Endpoint | None) -> None:
        self.near = endpoint
        if endpoint is not None:
            endpoint.heard_closed = lambda: self.closed.append("near")

    def run(self, until_us: int | None = None) -> None:
        """Let everything happen, or everything up to a time."""
        if until_us is not None:
            done: list[bool] = []
            self.clock.after(until_us - self.clock.now_us, lambda: done.append(True))
            while not done:
                self.clock.step()
        else:
            while self.clock.step():
                pass

    def send(self, count: int) -> list[bytes]:
        assert self.near is not None
        frames = [b"%d" % number for number in range(count)]
        for frame in frames:
            self.near.send(frame)
        return frames


def test_frames_arrive_in_order() -> None:
    pair = Pair()
    sent = pair.send(50)
    pair.run()
    assert pair.heard == sent


def test_a_split_frame_is_whole_in_the_end() -> None:
    pair = Pair(splitting=1.0)
    assert pair.near is not None
    pair.near.send(b"a frame")
    pair.near.send(b" and another")
    pair.run()
    assert len(pair.heard) == 4
    assert b"".join(pair.heard) == b"a frame and another"


def test_closing_is_heard_after_everything_sent() -> None:
    pair = Pair()
    sent = pair.send(5)
    assert pair.near is not None
    pair.near.close()
    pair.run()
    assert pair.heard == sent
    assert pair.closed == ["far"]


def test_a_partition_holds_frames_up_and_lets_them_go_in_order() -> None:
    pair = Pair()
    pair.network.cut(1, 2)
    sent = pair.send(5)
    pair.run(1 * SECOND)
    assert pair.heard == []
    assert pair.far is not None
    pair.far.send(b"the other way is open")
    pair.network.heal()
    pair.run()
    assert pair.heard == sent


def test_a_partition_that_lasts_breaks_the_senders_side_only() -> None:
    pair = Pair()
    pair.network.cut(1, 2)
    pair.send(1)
    pair.run(GIVE_UP_US + SECOND)
    assert pair.closed == ["near"]
    pair.network.heal()
    pair.run()
    assert pair.closed == ["near", "far"]
    assert pair.heard == []


def test_nobody_gets_through_to_connect_over_a_partition_or_to_nobody() -> None:
    pair = Pair()
    answers: list[Endpoint | None] = []
    pair.network.cut(2, 1)
    pair.network.connect(1, 2, answers.append)
    pair.run()
    pair.network.heal()
    pair.network.silence(2)
    pair.network.connect(1, 2, answers.append)
    pair.run()
    assert answers == [None, None]


def test_a_process_that_is_gone_answers_with_a_reset() -> None:
    pair = Pair()
    assert pair.far is not None
    pair.far.vanish()
    pair.send(1)
    pair.run()
    assert pair.closed == ["near"]
    assert pair.heard == []


def test_loss_breaks_the_connection_later() -> None:
    pair = Pair(loss=1.0)
    pair.send(1)
    pair.run()
    assert pair.heard == []
    assert sorted(pair.closed) == ["far", "near"]
    assert pair.network.counters.lost == 1


def test_frames_are_repeated_and_overtaken() -> None:
    pair = Pair(duplication=0.3, reordering=0.3, delay_us=(1, 5 * MS))
    sent = pair.send(100)
    pair.run()
    assert len(pair.heard) > 100
    assert set(pair.heard) == set(sent)
    first_times = [frame for number, frame in enumerate(pair.heard) if frame not in pair.heard[:number]]
    assert first_times != sent
