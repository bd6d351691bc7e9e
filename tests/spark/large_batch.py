"""A driver with little memory that merges a batch larger than itself: test_writers_memory.py runs it as a process.

Prints one line of JSON: the bytes of the folded rows, and the most that the driver's Python and its JVM have held.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from walstream.spark.columns import TableColumn
from walstream.spark.writers import TablePlan, open_writer

COLUMNS = (TableColumn("id", t.LongType(), 1), TableColumn("doc", t.StringType(), 2))
DOC_BYTES = 3_200


def changes(spark: SparkSession, first: int, last: int, op: str, lsn: int) -> DataFrame:
    """Changes with a document that does not compress."""
    parts = [
        f.sha2(f.concat_ws(" ", f.col("id"), f.lit(number), f.lit(lsn)), 512) for number in range(DOC_BYTES // 128)
    ]
    return spark.range(first, last, numPartitions=16).select(
        "id",
        f.concat(*parts).alias("doc"),
        f.lit(op).alias("_op"),
        f.lit(1).alias("_source_epoch"),
        f.lit(lsn).cast("long").alias("_commit_lsn"),
        (f.col("id") + 1).alias("_seq"),
        f.lit(None).cast("timestamp").alias("_ts"),
        f.lit(lsn).cast("long").alias("_txid"),
        f.lit(None).cast("string").alias("_snapshot"),
        f.array().cast("array<string>").alias("_unchanged"),
    )


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had resident."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main(folder: str, rows: int) -> None:
    """Make a small table, then merge a large batch into it."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", "512m")
        .config("spark.driver.extraJavaOptions", "-XX:MaxDirectMemorySize=64m")
        .config("spark.serializer", "org.apache.spark.serializer.KryoSerializer")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "16")
        .config("spark.local.dir", f"{folder}/local")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    writer = open_writer("deltalake", spark)

    def apply(end_lsn: int, batch: DataFrame) -> int:
        plan = TablePlan("public.docs", f"{folder}/docs", "mirror", ("id",), COLUMNS, 1, "test", 1, end_lsn)
        return writer.apply(plan, batch).rows_folded

    apply(10, changes(spark.newSession(), 0, 1000, "c", 5))
    folded = apply(20, changes(spark.newSession(), 500, 500 + rows, "u", 15))
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    java = gateway.jvm.java.lang.ProcessHandle.current().pid()
    found = {"folded_bytes": folded * DOC_BYTES, "rows": folded}
    found |= {"python_bytes_max": peak_bytes(os.getpid()), "jvm_bytes_max": peak_bytes(java)}
    print(json.dumps({**found, "threads": threading.active_count()}))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
