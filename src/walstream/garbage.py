"""Python's collector of cycles, in processes that serve for months.

What such a process is made of lives as long as it does, and what a request is made of is mostly let go of by counting
references. Left to itself the collector looks at hundreds of requests that wait for the disk, again and again: every
700 new objects, a twentieth of a busy node's processor time.
"""

from __future__ import annotations

import gc
from typing import Final

OBJECTS_BETWEEN: Final = 20_000
"""New containers between two looks at the young ones: some megabytes of cycles at most."""


def settle() -> None:
    """Call once when the process is up: what is there now is not looked at again, and the rest more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN, *gc.get_threshold()[1:])
