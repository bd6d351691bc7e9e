"""Changes of the catalogue, one at a time: planned, made durable, and then in force.

Each is planned from the catalogue that the one before it has left, so the next plan is asked for when that is in force.
Called on the event-loop thread; the driver does what blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from walstream import logs

if TYPE_CHECKING:
    from walstream.cluster.local import Catalogue, Change
    from walstream.errors import PartitionOffline
    from walstream.log.append_clock import Covered
    from walstream.log.driver import Driver

log = logs.get(__name__)

Plan = Callable[[], "Change | None"]
Changed = Callable[["Change | None", Exception | None], None]


class ChangeQueue:
    """The changes of a store's catalogue."""

    def __init__(
        self,
        catalogue: Catalogue,
        driver: Driver,
        put_in_force: Callable[[Change], None],
        cover_append_time: Callable[[Covered], None],
    ) -> None:
        """`put_in_force` shows a durable change and makes its partitions."""
        self._catalogue = catalogue
        self._driver = driver
        self._put_in_force = put_in_force
        self._cover_append_time = cover_append_time
        self._queue: deque[tuple[Plan, Changed]] = deque()
        self._is_changing = False

    def submit(self, plan: Plan, done: Changed) -> None:
        """Change the catalogue: durably, then the partitions, then `done`. Waits for no disk.

        `plan` is called when the changes before are in force, and returns the change to the catalogue as it is then, or
        None where there is nothing to change. What it raises goes to `done`.
        """
        self._queue.append((plan, done))
        self._change_next()

    def apply(self, change: Change) -> None:
        """Make a change durable and put it in force. Blocks: for the start of a node, for tools and tests."""
        assert not self._is_changing, "one change at a time"
        self._catalogue.write(change)
        self._put_in_force(change)

    def restore_file(self) -> None:
        """Write the file of the catalogue again, where a failed write may have replaced it. Called about once a second.

        Changes wait meanwhile: the file is not to go back behind one of them.
        """
        if not self._catalogue.is_file_current and not self._is_changing:
            self._is_changing = True
            self._driver.run(self._catalogue.restore, self._restored)

    def _restored(self, _: None, error: Exception | None) -> None:
        self._is_changing = False
        if error is None:
            log.info("catalogue restored")
        self._change_next()

    def _change_next(self) -> None:
        catalogue = self._catalogue
        while self._queue and not self._is_changing:
            plan, done = self._queue.popleft()
            try:
                change = plan()
                has_append_time = change is not None and any(
                    catalogue.settings(topic).append_time for topic in catalogue.altered(change)
                )
            except Exception as error:
                _answer(done, None, error)
                continue
            if change is None:
                _answer(done, None, None)
            else:
                self._is_changing = True
                written = partial(self._written, change, done, has_append_time)
                self._driver.run(partial(catalogue.write, change), written)

    def _written(self, change: Change, done: Changed, has_append_time: bool, _: None, error: Exception | None) -> None:
        def covered(_: PartitionOffline | None) -> None:
            try:
                self._put_in_force(change)
            except Exception as failure:
                log.exception("catalogue change not applied")
                self._ended(done, None, failure)
            else:
                self._ended(done, change, None)

        if error is not None:
            self._ended(done, None, error)
        elif has_append_time:
            self._cover_append_time(covered)
        else:
            covered(None)

    def _ended(self, done: Changed, made: Change | None, error: Exception | None) -> None:
        self._is_changing = False
        _answer(done, made, error)
        self._change_next()


def _answer(done: Changed, made: Change | None, error: Exception | None) -> None:
    """Call back, and log what that raises: the changes that are queued behind this one do not wait for it."""
    try:
        done(made, error)
    except Exception:
        log.exception("change of the catalogue not answered")
