"""From disk to the window and back, with a log in memory: whatever happens when, a source gets everything once."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import LsnNotAvailable
from walstream.feed.reading import log_source
from walstream.feed.reading.frames import Frame
from walstream.feed.reading.log_source import LogSource
from walstream.feed.reading.metrics import ReadingMetrics
from walstream.feed.reading.window import Window
from walstream.positions import TopicPartition


def frame_of(lsns: list[int]) -> Frame:
    return Frame(lsns, [b"entry %d" % lsn for lsn in lsns], [b""] * len(lsns), ["t"] * len(lsns))


PARTITION = TopicPartition("t", 0)


class Model:
    """A log whose entries are numbers, of which the window has read the first `published`."""

    def __init__(self, bytes_max: int) -> None:
        self.lsns: list[int] = []
        self.published = 0
        self.removed = 0
        self.disk_frame = 3
        view: Any = SimpleNamespace(
            promises=SimpleNamespace(check=lambda *_: None),
            topics=SimpleNamespace(chosen=lambda _: ()),
            metrics=ReadingMetrics(),
            model=self,
        )
        self.view = view
        self.window = Window(view, bytes_max)

    def begin_window(self) -> None:
        """Begin (anew) at the end, as the window does when it opens or its tail has failed."""
        self.published = len(self.lsns)
        self.window._clear(self.lsns[-1] + 1 if self.lsns else 0)
        places = {PARTITION: SimpleNamespace(offset=self.published)}
        self.window._tail = SimpleNamespace(position=self.window.floor, places=places)  # type: ignore[assignment]

    def publish(self, count: int) -> None:
        lsns = self.lsns[self.published : self.published + count]
        if lsns:
            self.published += len(lsns)
            self.window._tail.position = lsns[-1] + 1  # type: ignore[misc, union-attr]
            self.window._tail.places[PARTITION].offset = self.published  # type: ignore[misc, union-attr]
            self.window._publish(frame_of(lsns))


class DiskReader:
    """What a Cursor is to a source: it reads everything below its position, in order."""

    def __init__(self, view: Any, start: int, topics: tuple[str, ...] = ()) -> None:
        self._model: Model = view.model
        self.position = start

    @property
    def places(self) -> dict[TopicPartition, Any]:
        return {PARTITION: SimpleNamespace(offset=bisect_left(self._model.lsns, self.position))}

    async def step(self) -> Frame | None:
        await asyncio.sleep(0)
        lsns = self._model.lsns
        if self._model.removed and self.position < self._model.removed:
            raise LsnNotAvailable.of(self.position, self._model.removed, lsns[-1])
        first = bisect_left(lsns, self.position)
        found = lsns[first : first + self._model.disk_frame]
        if not found:
            # Everything is read: what the log promises is beyond its last entry.
            self.position = max(self.position, lsns[-1] + 1 if lsns else 0)
            return None
        self.position = found[-1] + 1
        return frame_of(found)

    async def join(self) -> bool:
        return True

    def entries_behind(self) -> int:
        return 0

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def read_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_source, "Cursor", DiskReader)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 6)),
        st.tuples(st.just("publish"), st.integers(1, 6)),
        st.tuples(st.just("next"), st.integers(0, 2)),
        st.tuples(st.just("subscribe"), st.integers(0, 60)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(1, 12), st.integers(1, 4))
async def test_every_source_gets_everything_once(steps: list[tuple[str, int]], frames: int, disk_frame: int) -> None:
    model = Model(bytes_max=frames * 1000)
    model.disk_frame = disk_frame
    model.begin_window()
    sources: list[tuple[int, LogSource, list[int]]] = []

    async def pull(source: LogSource, got: list[int]) -> bool:
        before = source.position
        frame = await source.next(0)
        if frame is None:
            assert source.position >= before
            return False
        assert frame.lsns[0] >= before
        got += frame.lsns
        assert source.position == frame.lsns[-1] + 1 or not source.is_live
        return True

    for name, number in steps:
        if name == "append":
            last = model.lsns[-1] if model.lsns else 5
            model.lsns += range(last + 2, last + 2 + 2 * number, 2)
        elif name == "publish":
            model.publish(number)
        elif name == "restart":
            model.begin_window()
        elif name == "subscribe":
            is_served = model.window.serves(number)
            reader: Any = None if is_served else DiskReader(model.view, number)
            sources.append((number, LogSource(model.view, model.window, number, (), reader), []))
        elif sources:
            _, source, got = sources[number % len(sources)]
            await pull(source, got)
    for start, source, got in sources:
        for _ in range(1000):
            model.publish(1000)
            if not await pull(source, got) and source.is_live and source._next >= model.window.next:
                break
        wanted = [lsn for lsn in model.lsns if lsn >= start]
        assert got == wanted
        assert source.is_live
        await source.close()


async def test_who_fell_behind_and_finds_it_removed_is_told() -> None:
    model = Model(bytes_max=2500)
    model.begin_window()
    source = LogSource(model.view, model.window, 0, ())
    model.lsns = list(range(10, 40))
    for _ in range(15):
        model.publish(2)
    model.removed = 30
    with pytest.raises(LsnNotAvailable, match=r"start_lsn=0 older than oldest_lsn=30; .* head_lsn=39"):
        await source.next(1)


async def test_who_waits_is_woken_by_the_next_frame() -> None:
    model = Model(bytes_max=100_000)
    model.begin_window()
    source = LogSource(model.view, model.window, 0, ())
    waiting = asyncio.create_task(source.next(10))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    model.lsns = [7]
    model.publish(1)
    frame = await asyncio.wait_for(waiting, 1)
    assert frame is not None
    assert frame.lsns == [7]
    assert await source.next(0.01) is None


async def test_the_window_takes_nobody_who_has_read_what_it_has_not() -> None:
    """Should it find that to have come too late, whoever has read it would be told to lack it."""
    model = Model(bytes_max=100_000)
    model.lsns = [1]
    model.begin_window()
    model.lsns.append(5)
    source = LogSource(model.view, model.window, 0, (), DiskReader(model.view, 0))  # type: ignore[arg-type]
    frame = await source.next(1)
    assert frame is not None
    assert frame.lsns == [1, 5]
    assert await source.next(0.01) is None
    assert not source.is_live
    model.publish(1)
    assert await source.next(0.01) is None
    assert source.is_live


async def test_the_position_goes_on_without_entries() -> None:
    model = Model(bytes_max=100_000)
    model.begin_window()
    source = LogSource(model.view, model.window, 0, ())
    assert await source.next(0) is None
    model.window._tail.position = 500  # type: ignore[misc, union-attr]
    assert await source.next(0) is None
    assert source.position == 500
    assert source.entries_behind() == 0


def test_how_far_an_lsn_is_behind_is_told_from_marks() -> None:
    model = Model(bytes_max=10_000)
    model.begin_window()
    model.lsns = list(range(10_000))
    assert model.window.entries_since(0) == 0
    for _ in range(100):
        model.publish(100)
    for lsn, least, most in ((9_999, 1, 1), (9_950, 50, 50), (5_000, 4_000, 6_000), (0, 9_900, 10_100)):
        assert least <= model.window.entries_since(lsn) <= most
    assert model.window.entries_since(20_000) == 0
    assert model.window.has_seen(0)
    assert model.view.metrics.window_bytes <= 25_000
    assert model.view.metrics.index_bytes > 0
