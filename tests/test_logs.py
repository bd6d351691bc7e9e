"""Logging: a constant phrase and its fields, for people or for machines, and nothing secret in tracebacks."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from walstream import logs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def fail() -> None:
    password = "hunter2"
    raise ValueError(len(password))


def test_json_lines() -> None:
    stream = io.StringIO()
    logs.set_up("info", "auto", stream)
    logs.get("walstream.log.segment").info("segment sealed", partition="orders-0", size_bytes=10)
    logs.get("walstream.log.segment").debug("not said")
    line = json.loads(stream.getvalue())
    assert list(line)[:3] == ["time", "level", "message"]
    assert (line["message"], line["level"], line["module"]) == ("segment sealed", "info", "log.segment")
    assert (line["partition"], line["size_bytes"]) == ("orders-0", 10)
    assert line["time"].endswith("Z")


def test_console_lines() -> None:
    stream = io.StringIO()
    logs.set_up("debug", "console", stream)
    logs.get("walstream.node.server").debug("client connected", peer="127.0.0.1")
    assert "client connected" in stream.getvalue()
    assert "peer=127.0.0.1" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("style", ["json", "console"])
def test_tracebacks_hold_no_local_variables(style: logs.LogFormat) -> None:
    stream = io.StringIO()
    logs.set_up("info", style, stream)
    try:
        fail()
    except ValueError:
        logs.get("walstream.x").exception("it failed")
    said = stream.getvalue().replace('password = "hunter2"', "")
    assert "ValueError" in said
    assert "hunter2" not in said


def test_libraries_are_heard_when_something_is_wrong() -> None:
    stream = io.StringIO()
    logs.set_up("info", "json", stream)
    logging.getLogger("asyncio").info("not said")
    logging.getLogger("asyncio").warning("slow %s", "callback")
    line = json.loads(stream.getvalue())
    assert (line["message"], line["level"]) == ("slow callback", "warning")


def test_a_stream_that_is_gone_loses_the_line_and_not_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    logs.set_up("info", "json")
    stream.close()
    logs.get("walstream.node").info("nobody hears this")
    logging.getLogger("library").error("nor this")
    later = io.StringIO()
    monkeypatch.setattr("sys.stderr", later)
    logs.get("walstream.node").info("heard again")
    assert "heard again" in later.getvalue()
