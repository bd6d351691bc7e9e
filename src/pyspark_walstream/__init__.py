"""What makes Spark find `format("walstream")` by itself: it looks into every module whose name begins with `pyspark_`.

Refuses to fail: a module of that kind that cannot be imported breaks every lookup of any data source. What is missing
is told when the source is used.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource

try:
    from walstream.spark.source import WalstreamSource as DefaultSource
except Exception as error:
    _REASON = str(error)

    class DefaultSource(DataSource):  # type: ignore[no-redef]
        """Stands for the source that cannot be had, and says why."""

        @classmethod
        def name(cls) -> str:
            """Return the name that `format` takes."""
            return "walstream"

        def schema(self) -> str:
            """Raise what is missing."""
            from walstream.errors import UsageError

            raise UsageError(_REASON)


__all__ = ["DefaultSource"]
