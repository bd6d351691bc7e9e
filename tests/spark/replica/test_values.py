"""The text that a replica is given: what the log has, as PostgreSQL reads it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from walstream.spark.replica.values import ColumnText, array_text, bytea_text, lines


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("[]", "{}"),
        ("[1,null,-3]", "{1,NULL,-3}"),
        ("[[1,2],[3,4]]", "{{1,2},{3,4}}"),
        ("[true,false,null]", "{t,f,NULL}"),
        (
            '["a,b","say \\"hi\\"",null,"","NULL","back\\\\slash"]',
            '{"a,b","say \\"hi\\"",NULL,"","NULL","back\\\\slash"}',
        ),
        ("[0.1,1e+300]", "{0.1,1e+300}"),
        ('["NaN"]', '{"NaN"}'),
        ('"[0:1]={a,b}"', "[0:1]={a,b}"),
        ("[0:1]={a,b}", "[0:1]={a,b}"),
        ('["é🐘\\n"]', '{"é🐘\n"}'),
    ],
)
def test_arrays(value: str, text: str) -> None:
    assert array_text(value) == text


def test_arrays_of_bytes_and_of_boxes() -> None:
    assert array_text('["AP8=",null,""]', is_bytes=True) == '{"\\\\x00ff",NULL,"\\\\x"}'
    assert array_text('["(3,4),(1,2)","(7,8),(5,6)"]', ";") == '{"(3,4),(1,2)";"(7,8),(5,6)"}'


def test_bytes() -> None:
    assert bytea_text("AP8=") == "\\x00ff"
    assert bytea_text("") == "\\x"
    assert bytea_text("\\x00ff") == "\\x00ff"


def test_lines_tell_null_from_nothing_and_keep_every_character() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"a": ["x", None, "", 'q"u,o\nte', "\\.", "\\N"], "b": ["AA==", None, "AP8=", "", "", ""]}
    )
    written = lines(batch, {1: ColumnText(is_bytes=True)}, [pa.array(range(6))])
    assert written.decode().splitlines(keepends=True) == [
        '"x","\\x00",0\n',
        ",,1\n",
        '"","\\x00ff",2\n',
        '"q""u,o\n',
        'te","\\x",3\n',
        '"\\.","\\x",4\n',
        '"\\N","\\x",5\n',
    ]
