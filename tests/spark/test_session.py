"""Settings of Spark, what its failures mean, and a session after another."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from deltalake.exceptions import DeltaError

from walstream.config import PipelineConfig
from walstream.errors import RowsMissing, SparkFailed, UsageError, ValueUnrepresentable, WarehouseFailed
from walstream.spark.failures import meaning, stops_one_table
from walstream.spark.session import DELTA_CATALOG, delta_package, settings


class TestSettings:
    def test_on_this_machine(self) -> None:
        found = settings(PipelineConfig(), "shop", is_submitted=False)
        assert found["spark.master"] == "local[*]"
        assert found["spark.app.name"] == "walstream pipeline shop"
        assert found["spark.scheduler.mode"] == "FAIR"
        assert int(found["spark.sql.shuffle.partitions"]) >= 2
        assert "spark.jars.packages" not in found

    def test_spark_submit_names_its_own_master(self) -> None:
        assert "spark.master" not in settings(PipelineConfig(master="spark://a:7077"), "shop", is_submitted=True)

    def test_those_of_the_configuration_win(self) -> None:
        config = PipelineConfig(settings={"spark.scheduler.mode": "FIFO", "spark.executor.memory": "4g"})
        found = settings(config, "shop", is_submitted=False)
        assert (found["spark.scheduler.mode"], found["spark.executor.memory"]) == ("FIFO", "4g")

    def test_delta_spark_brings_its_catalog_and_its_jars(self) -> None:
        found = settings(
            PipelineConfig(writer="delta-spark", settings={"spark.jars": "a.jar"}), "s", is_submitted=False
        )
        assert found["spark.sql.catalog.spark_catalog"] == DELTA_CATALOG
        assert "spark.jars.packages" not in found
        found = settings(PipelineConfig(writer="delta-spark"), "s", is_submitted=False)
        assert found["spark.jars.packages"] == delta_package()


SPARK_SAYS = """
An error occurred while calling o123.load.
: org.apache.spark.SparkException: Job aborted due to stage failure: Traceback (most recent call last):
  File "worker.py", line 1, in main
walstream.errors.ValueUnrepresentable: public.a, column at: infinity. Name it in strings.
\tat org.apache.spark.x(Y.scala:1)
"""


class TestMeaning:
    def test_ours_is_found_again(self) -> None:
        found = meaning(RuntimeError(SPARK_SAYS))
        assert type(found) is ValueUnrepresentable
        assert found.message == "public.a, column at: infinity. Name it in strings."
        assert stops_one_table(found)

    def test_ours_is_itself(self) -> None:
        error = RowsMissing("one is gone")
        assert meaning(error) is error
        assert not stops_one_table(error)
        assert stops_one_table(UsageError("no such column"))

    @pytest.mark.parametrize("text", ["", "\n\n", "An error occurred while calling o1.collect\n: x\n"])
    def test_another_is_spark_s(self, text: str) -> None:
        found = meaning(RuntimeError(text))
        assert type(found) is SparkFailed
        assert found.retryable
        assert not stops_one_table(found)

    def test_what_is_not_spark_s_is_not_said_of_it(self) -> None:
        full = meaning(OSError(errno.ENOSPC, "No space left on device", "/w/_delta_log/x"))
        assert type(full) is WarehouseFailed
        assert full.message == (
            "A file could not be read or written: [Errno 28] No space left on device: '/w/_delta_log/x'."
        )
        assert "Make room" in full.hint
        log = meaning(DeltaError("Generic delta kernel error: No files in log segment"))
        assert type(log) is WarehouseFailed
        assert log.message == "Delta's log of a table failed: Generic delta kernel error: No files in log segment."
        for error in (full, log):
            assert error.retryable
            assert not stops_one_table(error)
        # The JVM is gone.
        assert type(meaning(ConnectionRefusedError(111, "Connection refused"))) is SparkFailed

    def test_of_nothing_we_know_the_name(self) -> None:
        assert type(meaning(RuntimeError("walstream.errors.Unknown: x"))) is SparkFailed


@pytest.mark.timeout(300)
@pytest.mark.jvm
def test_a_session_after_another_has_a_jvm_of_its_own(tmp_path: Path) -> None:
    # In a process of its own, because Spark in this one belongs to other tests.
    script = str(Path(__file__).with_name("two_sessions.py"))
    done = subprocess.run(
        [sys.executable, script, str(tmp_path / "rows")], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["10 10 10", "20 20 20"]
