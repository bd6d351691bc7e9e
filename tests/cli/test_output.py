"""What commands say: the same data as a table for people and as JSON for programs."""

from __future__ import annotations

import errno
import io
import json
import sys

import pytest

from walstream.cli import main
from walstream.cli.output import Column, JsonOutput, Output, TableOutput, bytes_in_words, cell, plural, printable
from walstream.processes import free_port

COLUMNS = (Column("topic", "topic"), Column("records", "records", "number"), Column("size_bytes", "size", "bytes"))
ROWS = [
    {"topic": "orders", "records": 1234567, "size_bytes": 3_500_000},
    {"topic": "a-much-longer-topic-name-than-that", "records": 0, "size_bytes": 17},
]


def make(kind: type[TableOutput | JsonOutput]) -> tuple[Output, io.StringIO, io.StringIO]:
    stdout, stderr = io.StringIO(), io.StringIO()
    return kind(stdout, stderr), stdout, stderr


def test_table() -> None:
    output, stdout, stderr = make(TableOutput)
    output.rows("topics", ROWS, COLUMNS, "none")
    assert stdout.getvalue().splitlines() == [
        "topic                                  records      size",
        "orders                               1,234,567   3.3 MiB",
        "a-much-longer-topic-name-than-that           0      17 B",
    ]
    assert stderr.getvalue() == ""


class ClosedTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("kind", [TableOutput, JsonOutput])
def test_a_note_outlives_a_closed_terminal(kind: type[TableOutput | JsonOutput]) -> None:
    kind(io.StringIO(), ClosedTerminal()).note("Sending the last 2 records.")


def test_an_error_at_a_closed_terminal_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    assert main.invoke(["tail", "t", "--bootstrap", f"127.0.0.1:{free_port()}", "--timeout-ms", "100"]) == 3


def test_json_has_raw_numbers_under_names_with_units() -> None:
    output, stdout, _ = make(JsonOutput)
    output.rows("topics", ROWS, COLUMNS, "none")
    assert json.loads(stdout.getvalue()) == {"topics": ROWS}


def test_nothing_is_a_message_to_people_and_an_empty_list_to_programs() -> None:
    table, table_out, table_err = make(TableOutput)
    table.rows("topics", [], COLUMNS, "There are no topics.")
    assert (table_out.getvalue(), table_err.getvalue()) == ("", "There are no topics.\n")
    as_json, json_out, json_err = make(JsonOutput)
    as_json.rows("topics", [], COLUMNS, "There are no topics.")
    assert (json.loads(json_out.getvalue()), json_err.getvalue()) == ({"topics": []}, "")


@pytest.mark.parametrize("kind", [TableOutput, JsonOutput])
def test_messages_never_reach_stdout(kind: type[TableOutput | JsonOutput]) -> None:
    output, stdout, stderr = make(kind)
    output.note("[bold]as it is[/bold] :smile:")
    assert (stdout.getvalue(), stderr.getvalue()) == ("", "[bold]as it is[/bold] :smile:\n")


def test_an_act_is_a_sentence_or_its_result() -> None:
    table, table_out, table_err = make(TableOutput)
    table.done("Created topic orders.", {"topic": "orders"})
    assert (table_out.getvalue(), table_err.getvalue()) == ("", "Created topic orders.\n")
    as_json, json_out, _ = make(JsonOutput)
    as_json.done("Created topic orders.", {"topic": "orders"})
    assert json.loads(json_out.getvalue()) == {"topic": "orders"}


def test_item() -> None:
    output, stdout, _ = make(TableOutput)
    output.item({"topic": "orders", "records": None, "size_bytes": 2048}, COLUMNS)
    assert stdout.getvalue().splitlines() == ["topic     orders", "records   -", "size      2.0 KiB"]


def test_long_cells_are_not_cut_off_a_terminal() -> None:
    output, stdout, _ = make(TableOutput)
    output.rows("topics", [{"topic": "x" * 500, "records": 1, "size_bytes": 1}], COLUMNS, "")
    assert "x" * 500 in stdout.getvalue()


def test_what_others_wrote_does_not_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\n\u202e") == "a\\x1b[2Jb\\n\\u202e"
    assert str(cell("\x1b[31m")) == "\\x1b[31m"
    assert printable("grüße 🙂") == "grüße 🙂"


def test_words() -> None:
    assert [bytes_in_words(n) for n in (0, 1023, 1024, 1024**3, 5 * 1024**5)] == [
        "0 B", "1,023 B", "1.0 KiB", "1.0 GiB", "5,120.0 TiB",
    ]  # fmt: skip
    assert (plural(1, "record"), plural(2000, "record")) == ("1 record", "2,000 records")
    assert str(cell(["a", "b"])) == "a, b"
    assert str(cell(True)) == "yes"
