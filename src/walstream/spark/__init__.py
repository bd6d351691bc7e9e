"""Spark: the log's rows as typed DataFrames, and the pipeline that makes tables of them.

Needs the extra `[spark]`; whoever imports anything from here without it is told so in one line. Nothing of it is
imported here, so that a Spark worker which only reads does not pay for the rest.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from walstream.errors import UsageError

if TYPE_CHECKING:
    from walstream.spark.cut_tables import Cut, read_at

__all__ = ["Cut", "read_at"]

NEEDED: Final = ("pyspark", "pyarrow", "pandas", "deltalake")

if missing := [name for name in NEEDED if find_spec(name) is None]:
    raise UsageError(f"walstream.spark needs {', '.join(missing)}.", "Install it: pip install 'walstream[spark]'")


def __getattr__(name: str) -> Any:
    """Bring what users import from here, when they do."""
    if name in __all__:
        from walstream.spark import cut_tables

        return getattr(cut_tables, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
