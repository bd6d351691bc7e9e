"""Records read one by one: the JSON of some of their columns as it stands, and what every record says of itself.

Owns the parsing of single envelopes, for the few chunks and columns that Arrow does not take; refuses to know types
(values.py) and the rule. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from walstream.spark.values import NULL


class SourceBlock(msgspec.Struct):
    """What a record says of where it comes from."""

    source_epoch: int
    commit_lsn: int
    seq: int
    gen: int
    ts_ms: int
    schema_version: int
    unchanged: list[str]
    snapshot: bool | str = False
    txId: int | None = None


class RawRows:
    """Reads some columns of envelopes as the JSON that they are."""

    def __init__(self, names: Sequence[str]) -> None:
        """Take the names of the columns."""
        self._places = [f"c{number}" for number in range(len(names))]
        columns = msgspec.defstruct(
            "Columns",
            [(place, msgspec.Raw, msgspec.Raw(NULL)) for place in self._places],
            rename=dict(zip(self._places, names, strict=True)),
        )
        envelope = msgspec.defstruct(
            "Envelope", [("op", str), ("source", SourceBlock), ("before", columns | None), ("after", columns | None)]
        )
        self._decode = msgspec.json.Decoder(envelope).decode

    def read(self, values: Sequence[bytes]) -> tuple[list[Any], list[list[bytes | None]]]:
        """Return the envelopes, and for each column the JSON of its values: of a delete the old ones, None for null."""
        envelopes: list[Any] = [self._decode(value) for value in values]
        images = [each.before if each.op == "d" else each.after for each in envelopes]
        columns = [
            [None if image is None or (raw := bytes(getattr(image, place))) == NULL else raw for image in images]
            for place in self._places
        ]
        return envelopes, columns
