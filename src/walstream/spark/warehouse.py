"""Where things lie in a warehouse, and which of them are tables.

    <warehouse>/<schema>/<table>         a table: its folder, the same for both writers
    <warehouse>/_walstream_commits       the cuts
    <warehouse>/_checkpoint              where the stream stands, for Spark alone

Owns the names; refuses to know what is in the folders. Names of PostgreSQL may hold any character, those of folders
may not: what is no letter, digit, `-`, `_` or `.` is written as `%` and its bytes, as in an address. Sans-IO.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

from walstream.spark.options import parse_table

CUTS: Final = "_walstream_commits"
CHECKPOINT: Final = "_checkpoint"


def table_path(warehouse: str, name: str) -> str:
    """Return the folder of a table, given as options name it. Raises UsageError."""
    schema, table = parse_table(name)
    return f"{warehouse.rstrip('/')}/{_folder(schema)}/{_folder(table)}"


def cuts_path(warehouse: str) -> str:
    """Return the folder of the cuts."""
    return f"{warehouse.rstrip('/')}/{CUTS}"


def checkpoint_path(warehouse: str) -> str:
    """Return the folder of the stream's checkpoint, unless another one is configured."""
    return f"{warehouse.rstrip('/')}/{CHECKPOINT}"


def _folder(name: str) -> str:
    written = quote(name, safe="")
    # What begins so is hidden to Hadoop, or one of ours, or not a name at all.
    return re.sub(r"^[._]", lambda found: f"%{ord(found[0]):02X}", written)
