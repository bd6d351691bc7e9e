"""The file of schemas against kio, from which it is generated."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Literal

import pytest

from node.kio_schemas import kio_schema, schemas_json
from walstream.node.api import APIS
from walstream.node.schemas import FILE, Entity, schema


def typed(entity: Entity) -> Any:
    """What an entity holds with the types of its defaults: 0, False and 0.0 are equal."""
    fields = [(field, type(field.default), typed(field.entity) if field.entity else None) for field in entity.fields]
    return entity, fields, {name: type(default) for name, default in entity.defaults.items()}


@pytest.mark.parametrize("direction", ["request", "response"])
@pytest.mark.parametrize("api_key", APIS, ids=lambda key: APIS[key].name)
def test_every_schema_is_that_of_kio(api_key: int, direction: Literal["request", "response"]) -> None:
    ours, kios = schema(api_key, direction), kio_schema(api_key, direction)
    assert ours.keys() == kios.keys()
    assert {*range(APIS[api_key].min_version, APIS[api_key].max_version + 1)} <= ours.keys()
    for version, entity in kios.items():
        assert typed(ours[version]) == typed(entity), version


def test_the_file_is_what_make_schemas_writes() -> None:
    assert FILE.read_text(encoding="utf-8") == schemas_json()


def test_a_node_imports_neither_kio_nor_hypothesis() -> None:
    program = "import sys, walstream.node.server; print(*{'kio', 'phantom', 'hypothesis'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not done.stdout.strip()
