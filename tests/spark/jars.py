"""The jars of Delta: `DELTA` is what the writer delta-spark needs, and `settings()` what a session needs to have it."""

from __future__ import annotations

import pytest

from jvm.jars import Jars
from walstream.spark.session import DELTA_CATALOG, DELTA_EXTENSION, delta_package

# The rest of what it needs is Spark's own.
DELTA = Jars(delta_package(), groups="io.delta,io.unitycatalog")


def settings() -> dict[str, str]:
    """What a session needs to write Delta with its jars; nothing when they are not there."""
    files = DELTA.files()
    if not files:
        return {}
    return {
        "spark.jars": ",".join(files),
        "spark.sql.extensions": DELTA_EXTENSION,
        "spark.sql.catalog.spark_catalog": DELTA_CATALOG,
    }


def required() -> None:
    """Skip the test when Delta's jars, or its Python package, cannot be had."""
    pytest.importorskip("delta", reason="delta-spark is not installed")
    DELTA.required()
