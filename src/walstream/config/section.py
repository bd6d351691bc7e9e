"""What all sections of the configuration share, and the units their defaults are written in."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

KIB = 1024
MIB = 1024 * KIB
DAY_MS = 24 * 60 * 60 * 1000


class Section(BaseModel):
    """What all sections share: frozen, no unknown keys, fields described by the docstring below each."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
