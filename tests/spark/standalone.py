"""A Spark standalone cluster for tests: a master and two workers, each a process of its own, from the pip package.

A worker has one core and little memory, so a job with two executors has one on each. Their environment leads Spark's
Python processes to this walstream, as an installation on every machine does.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyspark

import walstream
from jvm.child import QUICK, Child
from walstream.processes import HOST, free_port

WORKERS = 2
_DEPLOY = "org.apache.spark.deploy"


class Cluster:
    """A cluster that runs."""

    def __init__(self, port: int, page: int) -> None:
        self.master = f"spark://{HOST}:{port}"
        self._page = f"http://{HOST}:{page}/json/"

    def look(self) -> dict[str, Any]:
        """What the master says of its workers and applications; nothing while it does not answer."""
        try:
            with urllib.request.urlopen(self._page, timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (urllib.error.URLError, ConnectionError, json.JSONDecodeError):
            return {}  # Its other pages are there before this one.


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster while the block runs; its logs and what executors write are in the folder."""
    port, page = free_port(), free_port()
    cluster = Cluster(port, page)
    with ExitStack() as stack:
        master = _start(folder, "master", f"{_DEPLOY}.master.Master", "--port", port, "--webui-port", page)
        stack.callback(master.end)
        master.wait_for(cluster.look, "a master")
        for number in range(WORKERS):
            name = f"worker-{number}"
            size = ["--cores", 1, "--memory", "1g", "--webui-port", free_port(), "--work-dir", folder / name]
            worker = _start(folder, name, f"{_DEPLOY}.worker.Worker", *size, cluster.master)
            stack.callback(worker.end)
        master.wait_for(lambda: cluster.look().get("aliveworkers") == WORKERS, "two workers")
        yield cluster


def _start(folder: Path, name: str, what: str, *arguments: object) -> Child:
    home = Path(pyspark.__file__).parent
    roots = [str(Path(walstream.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": " ".join(QUICK),
        "PYTHONPATH": os.pathsep.join(roots),
    }
    command = [str(home / "bin" / "spark-class"), what, "--host", HOST, *map(str, arguments)]
    return Child(command, folder / f"{name}.log", environment)
