from __future__ import annotations

from walstream.sim.clock import EPOCH_MS, Clock


def test_events_happen_in_the_order_of_time_then_of_scheduling() -> None:
    clock, seen = Clock(1), []
    clock.after(20, lambda: seen.append("late"))
    clock.after(10, lambda: seen.append("first"))
    clock.after(10, lambda: seen.append("second"))
    while clock.step():
        pass
    assert seen == ["first", "second", "late"]
    assert clock.now_us == 20
    assert clock.now_ms == EPOCH_MS
    assert clock.steps == 3


def test_cancelled_events_do_not_happen_and_are_no_step() -> None:
    clock, seen = Clock(1), []
    timer = clock.after(5, lambda: seen.append("cancelled"))
    clock.after(6, lambda: seen.append("kept"))
    timer.cancel()
    clock.forget_cancelled()
    while clock.step():
        pass
    assert seen == ["kept"]
    assert clock.steps == 1


def test_a_seed_decides() -> None:
    draws = [[Clock(seed).between(0, 10**9) for _ in range(3)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
