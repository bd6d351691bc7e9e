"""The sections of the pipeline: [pipeline] and, per table, [pipeline.tables."schema.table"].

Where the log is and who may read it stands in [capture], and so does the prefix: what wrote the log is what is read.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from walstream.config.replica import ReplicaConfig
from walstream.config.section import MIB, Section

TableMode = Literal["mirror", "history", "append"]
WriterName = Literal["deltalake", "delta-spark"]
Destination = Literal["delta", "postgres"]


class TableRule(Section):
    """How one table is kept, under the name `schema.table`; a schema with a dot in its name is in double quotes."""

    mode: Literal["default", "mirror", "history", "append"] = "default"
    """How the table is kept; `default`: as `pipeline.mode` says."""

    strings: tuple[str, ...] = ()
    """Columns that become strings: for values that their type cannot hold, such as infinity in a timestamp."""

    enabled: bool = True
    """Whether the table is kept at all."""


class PipelineConfig(Section):
    """How Spark turns the log into tables."""

    destination: Destination = "delta"
    """`delta`: tables in the warehouse; `postgres`: a replica, as `[pipeline.replica]` says."""

    warehouse: str = Field(default="walstream-warehouse", min_length=1)
    """Folder or object store of the tables: `<warehouse>/<schema>/<table>`."""

    writer: WriterName = "deltalake"
    """What writes Delta: `deltalake`, which needs no jar, or `delta-spark`, whose MERGE runs on the cluster."""

    mode: TableMode = "mirror"
    """How tables are kept: `mirror` the current rows, `history` every version of them, `append` every change."""

    master: str = Field(default="local[*]", min_length=1)
    """The Spark cluster. Under spark-submit, which names its own, this is not looked at."""

    settings: dict[str, str] = Field(default={})
    """Settings of Spark, such as `"spark.executor.memory" = "4g"` or `"spark.jars.packages"`."""

    checkpoint: str = ""
    """Folder of the stream's checkpoint. Empty: `<warehouse>/_checkpoint`. To lose it costs time, not rows."""

    trigger_interval_ms: int = Field(default=1_000, ge=0)
    """How often a micro-batch begins, unless the one before takes longer."""

    batch_rows_max: int = Field(default=2_000_000, ge=1)
    """Rows of a micro-batch. Soft: transactions are never split."""

    batch_bytes_max: int = Field(default=2048 * MIB, ge=1)
    """Bytes of a micro-batch, as they are in the log. Soft in the same way."""

    small_rows_max: int = Field(default=50_000, ge=0)
    """Rows of a table in a micro-batch that one task does, with `deltalake` on files, without queries; 0: none."""

    parallel_tables_max: int = Field(default=4, ge=1, le=64)
    """Tables of a micro-batch that are written at once."""

    cuts_kept_hours: int = Field(default=24, ge=1, le=29 * 24)
    """How long a cut can be read with `read_at`."""

    maintenance_interval_minutes: int = Field(default=60, ge=0)
    """How often tables are compacted and vacuumed, between micro-batches; 0: only by `walstream pipeline maintain`."""

    http_listen: str = Field(default="", pattern=r"^(.*:\d{1,5})?$")
    """Address of the health and metrics endpoint, as `host:port`. Empty: none."""

    replica: ReplicaConfig = ReplicaConfig()

    tables: dict[str, TableRule] = Field(default={})
    """What differs for single tables."""
