"""`walstream config`: what is set, where it came from, and what could be."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from walstream.cli.options import Sources, command
from walstream.cli.output import Column, Output
from walstream.config import reference as reference_page
from walstream.config import value_of
from walstream.config.reference import show

app = typer.Typer(help="Explain the configuration.", no_args_is_help=True)

_COLUMNS = (
    Column("key", "key"),
    Column("shown", "value"),
    Column("origin", "from", "state"),
)


@command(app, "explain")
def explain(
    sources: Sources,
    output: Output,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not the default.")] = False,
) -> None:
    """Tell every value and where it came from."""
    loaded = sources.load()
    rows = []
    for key, origin in loaded.origins.items():
        value = _without_secrets(value_of(loaded.config, key))
        if not changed or origin.source != "default":
            row = {"key": key, "value": value, "source": origin.source, "detail": origin.detail}
            rows.append({**row, "shown": show(value), "origin": origin} if output.is_for_people else row)
    output.rows("values", rows, _COLUMNS, "Everything has its default value.")


@command(app, "reference")
def reference() -> None:
    """Print the reference page, in Markdown."""
    print(reference_page(), end="")


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return dict.fromkeys(value, "…")
    if isinstance(value, tuple):
        return [item.model_dump(mode="json") if hasattr(item, "model_dump") else item for item in value]
    return value
