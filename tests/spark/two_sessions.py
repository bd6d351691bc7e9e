"""Two Spark sessions in one process, one after the other: test_session.py runs it as a process of its own.

Prints for each how many rows it has written, seen on their way, and read back through Python.
"""

from __future__ import annotations

import sys

from pyspark.sql import Observation
from pyspark.sql import functions as f

from walstream import logs
from walstream.config import PipelineConfig
from walstream.spark import session

QUIET = {"spark.ui.enabled": "false", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}


def main(folder: str) -> None:
    """Start, use and stop Spark twice."""
    logs.set_up("warning")
    for rows in (10, 20):
        spark = session.start(PipelineConfig(master="local[1]", settings=QUIET), "twice")
        seen = Observation()
        frame = spark.range(rows, numPartitions=1).observe(seen, f.count(f.lit(1)).alias("rows"))
        frame.write.mode("overwrite").parquet(folder)
        read = spark.read.parquet(folder).rdd.map(lambda row: row.id).count()
        print(rows, seen.get["rows"], read, flush=True)
        session.stop(spark)


if __name__ == "__main__":
    main(sys.argv[1])
