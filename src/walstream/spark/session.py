"""The Spark session of the pipeline: started, or joined where spark-submit has started it.

Owns Spark's settings as the pipeline needs them, which the user's win over, and what Spark prints; refuses to know what
the session is used for. A JVM that we start says what it has to say through our log, so that it appears between other
lines and not in the middle of a terminal's table. Under spark-submit the JVM is there already, and keeps its own.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

import walstream
from walstream import logs
from walstream.config import PipelineConfig
from walstream.errors import UnreachableError, UsageError

SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""In the environment of a program that spark-submit runs."""

DELTA_VERSION: Final = "4.4.0"
"""Of Delta's jars. Its Python package has releases of its own (4.4.1) that no jars belong to."""
DELTA_EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
DELTA_CATALOG: Final = "org.apache.spark.sql.delta.catalog.DeltaCatalog"

LAST_WORDS: Final = 20
STOP_S_MAX: Final = 20.0

_USUAL: Final = (
    "Utils: ",  # which of the machine's addresses it takes
    "NativeCodeLoader: ",
    "SparkConf: Note that spark.local.dir",
    "FairSchedulableBuilder: A job was submitted with scheduler pool",
    "StringUtils: Truncated the string representation of a plan",
    "ProcessingTimeExecutor: Current batch is falling behind",  # our own progress tells how long batches take
    "ResolveWriteToStream: spark.sql.adaptive.enabled is not supported",
)
"""Warnings that Spark gives every time and that nobody can do anything about."""

_LINE: Final = re.compile(r"^\d\d/\d\d/\d\d \d\d:\d\d:\d\d (?P<level>[A-Z]+) (?P<text>.*)$")

log = logs.get(__name__)

_is_ending = threading.Event()


def settings(config: PipelineConfig, prefix: str, *, is_submitted: bool) -> dict[str, str]:
    """Return Spark's settings; those of the configuration win."""
    found = {
        "spark.app.name": f"walstream pipeline {prefix}",
        "spark.scheduler.mode": "FAIR",
        # Java's own remembers the last hundred pieces that it has read back from disk, and they can be large.
        "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if not is_submitted:
        found["spark.master"] = config.master
    if not is_submitted and config.master.startswith("local"):
        # The default of 200 is for clusters: here most of a small batch's time would go into empty partitions.
        found["spark.sql.shuffle.partitions"] = str(max(2, os.cpu_count() or 2))
    if config.writer == "delta-spark" and config.destination == "delta":
        found["spark.sql.extensions"] = DELTA_EXTENSION
        found["spark.sql.catalog.spark_catalog"] = DELTA_CATALOG
        if not is_submitted and not {"spark.jars", "spark.jars.packages"} & config.settings.keys():
            found["spark.jars.packages"] = delta_package()
    return found | config.settings


def delta_package() -> str:
    """Return the Maven coordinates of Delta for this Spark."""
    return f"io.delta:delta-spark_{'.'.join(pyspark.__version__.split('.')[:2])}_2.13:{DELTA_VERSION}"


def start(config: PipelineConfig, prefix: str) -> SparkSession:
    """Start Spark, or join the one that runs this program. Raises UsageError, UnreachableError."""
    is_submitted = SUBMITTED in os.environ
    conf = SparkConf(loadDefaults=False)
    conf.setAll(list(settings(config, prefix, is_submitted=is_submitted).items()))
    if is_submitted:
        return SparkSession.builder.config(conf=conf).getOrCreate()
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise UsageError("Spark needs Java 17 or newer, and there is none.", "On Debian: make java")
    _prepare_workers(config.master)
    words: deque[str] = deque(maxlen=LAST_WORDS)
    try:
        with _hangup_ignored():
            gateway = launch_gateway(
                conf,
                {  # type: ignore[no-untyped-call]
                    "stdout": subprocess.DEVNULL,
                    "stderr": subprocess.PIPE,
                },
            )
        process: Any = gateway.proc
        threading.Thread(target=_listen, args=(process.stderr, words), name="walstream-spark", daemon=True).start()
        context = SparkContext(conf=conf, gateway=gateway)
    except (PySparkException, OSError) as error:
        said = "".join(f"\n  {line}" for line in words)
        raise UsageError(f"Spark does not start: {error}{said}") from None
    except Exception as error:
        # What the JVM raises on its way up: above all a cluster that does not answer.
        raise UnreachableError(f"Spark at {config.master} cannot be used: {_first_line(error)}") from None
    context.setLogLevel("WARN")
    log.info("spark started", master=context.master, version=context.version, ui=context.uiWebUrl)
    return SparkSession(context)


@contextmanager
def _hangup_ignored() -> Iterator[None]:
    """Ignore SIGHUP, as a process started meanwhile does for good.

    The kernel sends it to the JVM, too, when the terminal closes; the batch in progress still needs that one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, handler)


def stop(spark: SparkSession) -> None:
    """End Spark, with the JVM that was started for it; what it says on its way out is of no use to anybody."""
    context = spark.sparkContext
    gateway = getattr(context, "_gateway", None)
    process = getattr(gateway, "proc", None)
    context.setLogLevel("OFF")
    spark.stop()
    if process is None:
        return
    # PySpark keeps its connection for the next session, which would then talk to a JVM that is gone.
    if SparkContext._gateway is gateway:
        SparkContext._gateway = SparkContext._jvm = None
    process.stdin.close()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def quieten() -> None:
    """Take what Spark says from now on for the noise of its end: a batch that is not begun any more is none to it."""
    _is_ending.set()
    logging.getLogger("py4j").setLevel(logging.CRITICAL)


def _prepare_workers(master: str) -> None:
    """Have Spark's Python processes be this Python, and those on this machine have this walstream."""
    # Of a cluster too: reads are planned here, and both sides are started by the same path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if not master.startswith("local"):
        return
    root = str(Path(walstream.__file__).parent.parent)
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if root not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *known])


def _listen(stream: IO[bytes], words: deque[str]) -> None:
    """Pass on what the JVM prints: warnings and errors as such, the rest for whoever asks for everything."""
    for line in _lines(stream):
        words.append(line)
        match = _LINE.match(line)
        level, text = (match["level"], match["text"]) if match else ("", line)
        if _is_ending.is_set() or text.startswith(_USUAL):
            level = ""
        say = log.error if level in ("ERROR", "FATAL") else log.warning if level == "WARN" else log.debug
        say("spark says", said=text)


def _lines(stream: IO[bytes]) -> Iterable[str]:
    for line in stream:
        text = line.decode(errors="replace").rstrip()
        if text:
            yield text


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
