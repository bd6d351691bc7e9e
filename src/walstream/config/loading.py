"""The sources of the configuration, merged: a TOML file, the environment, flags; and where each value came from.

Each value is checked by itself against its field, so that an error names the key, the source and what is allowed;
rules between fields are checked once everything is known. Which keys there are is read off the models, nested sections
and lists of tables included, so a new section is a field of its parent and nothing else.

This module reads the one file it is given and nothing else: the environment enters as an argument.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo

from walstream.config.capture import CaptureConfig, SourceConfig, StreamRule
from walstream.config.feed import FeedConfig
from walstream.config.node import LimitsConfig, LogConfig, NodeConfig, SecurityConfig
from walstream.config.pipeline import PipelineConfig
from walstream.config.reference import accepts, file, page
from walstream.config.replication import ReplicationConfig
from walstream.config.section import Section
from walstream.errors import ConfigError

ENVIRONMENT_PREFIX = "WALSTREAM_"
ENVIRONMENT_SEPARATOR = "__"

DEFAULT_FILE = Path("walstream.toml")

S = TypeVar("S", bound=Section)


class Config(Section):
    """The whole configuration."""

    node: NodeConfig = NodeConfig()
    log: LogConfig = LogConfig()
    limits: LimitsConfig = LimitsConfig()
    security: SecurityConfig = SecurityConfig()
    replication: ReplicationConfig = ReplicationConfig()
    source: SourceConfig = SourceConfig()
    capture: CaptureConfig = CaptureConfig()
    pipeline: PipelineConfig = PipelineConfig()
    feed: FeedConfig = FeedConfig()

    streams: tuple[StreamRule, ...] = ()
    """Which rows go to which topic, as `[[streams]]` tables. Empty: each table has a topic of its own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.log.message_bytes_max > self.limits.request_bytes_max:
            raise ValueError(
                "log.message_bytes_max is larger than limits.request_bytes_max: such a batch never arrives"
            )
        if self.limits.request_bytes_max > self.limits.inflight_bytes_max:
            raise ValueError(
                "limits.request_bytes_max is larger than limits.inflight_bytes_max: such a request never fits"
            )
        if self.limits.group_session_timeout_ms_min > self.limits.group_session_timeout_ms_max:
            raise ValueError("limits.group_session_timeout_ms_min is larger than limits.group_session_timeout_ms_max")
        nodes = self.replication.nodes
        if nodes and self.node.node_id not in [node.id for node in nodes]:
            raise ValueError(f"replication.nodes does not have this node, node.node_id = {self.node.node_id}")
        return self


def sections(model: type[Section] = Config, path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every section with its dotted name, parents first; the name of the whole is empty."""
    yield path, model
    for key, field in model.model_fields.items():
        if child := _section_of(field):
            yield from sections(child, f"{path}.{key}".lstrip("."))


def _section_of(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _rule_of(field: FieldInfo) -> type[Section] | None:
    """Return the model of a list of tables, or of tables by name."""
    kinds = [kind for kind in get_args(field.annotation) if isinstance(kind, type) and issubclass(kind, Section)]
    return kinds[0] if kinds else None


def rules() -> dict[str, type[Section]]:
    """Return the model of each list of tables, and of tables by name, by its dotted name."""
    return {name: rule for name, field in fields() if (rule := _rule_of(field))}


def fields(model: type[Section] = Config, path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key by its dotted name, such as `source.postgres.host`, with its field, in the order of the models."""
    for key, field in model.model_fields.items():
        name = f"{path}.{key}".lstrip(".")
        if child := _section_of(field):
            yield from fields(child, name)
        else:
            yield name, field


@cache
def _fields() -> dict[str, FieldInfo]:
    return dict(fields())


@cache
def _sections() -> dict[str, type[Section]]:
    return dict(sections())


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from."""

    source: Literal["default", "file", "environment", "flag"]
    detail: str = ""
    """The file, the variable or the flag."""

    def __str__(self) -> str:
        return f"{self.source} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and, for every `section.key`, its origin."""

    config: Config
    origins: dict[str, Origin]


DEFAULT = Origin("default")


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Loaded:
    """Merge the sources into one configuration; `overrides` maps `section.key` to a value or to its text."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_fields(), DEFAULT)
    for name, value, origin in (
        *_from_file(file),
        *_from_environment(environ or {}),
        *_from_overrides(overrides or {}),
    ):
        values[name] = _checked(name, value, origin)
        origins[name] = origin
    try:
        config = _build(Config, "", values)
    except ValidationError as error:
        raise ConfigError(f"The configuration contradicts itself: {_reason(error)}.", _EXPLAIN) from None
    return Loaded(config, origins)


def load_default(environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> Loaded:
    """Merge the sources that count where nobody names a file: the one in this folder, if there is one."""
    return load(DEFAULT_FILE if DEFAULT_FILE.is_file() else None, environ, overrides)


def _build(model: type[S], path: str, values: Mapping[str, Any]) -> S:
    given: dict[str, Any] = {}
    for key, field in model.model_fields.items():
        name = f"{path}.{key}".lstrip(".")
        if child := _section_of(field):
            given[key] = _build(child, name, values)
        elif name in values:
            given[key] = values[name]
    return model(**given)


def value_of(config: Config, name: str) -> Any:
    """Return the value of a key, given by its dotted name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def environment_name(name: str) -> str:
    """Return the environment variable that sets a key."""
    return f"{ENVIRONMENT_PREFIX}{name.replace('.', ENVIRONMENT_SEPARATOR)}".upper()


_Given = tuple[str, Any, Origin]
_EXPLAIN = "`walstream config explain` shows every value and where it came from."


def _from_file(file: Path | None) -> Iterator[_Given]:
    if file is None:
        return
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration file {file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file {file} is not valid TOML: {error}.") from error
    yield from _from_table("", document, Origin("file", str(file)))


def _from_table(path: str, table: Mapping[str, Any], origin: Origin) -> Iterator[_Given]:
    for key, value in table.items():
        name = f"{path}.{key}".lstrip(".")
        if name not in _sections():
            _require(name, origin)
            yield name, value, origin
        elif isinstance(value, dict):
            yield from _from_table(name, value, origin)
        else:
            raise ConfigError(f"{name} = {value!r} ({origin}): this is a section, written as [{name}].")


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    for variable, text in sorted(environ.items()):
        name = variable.removeprefix(ENVIRONMENT_PREFIX).replace(ENVIRONMENT_SEPARATOR, ".").lower()
        # Names without a section are those of other things, such as WALSTREAM_BOOTSTRAP, unless a key has that name.
        if variable.startswith(ENVIRONMENT_PREFIX) and ("." in name or name in _fields()):
            origin = Origin("environment", variable)
            _require(name, origin)
            yield name, _Text(text), origin


def _from_overrides(overrides: Mapping[str, Any]) -> Iterator[_Given]:
    for name, value in overrides.items():
        origin = Origin("flag", f"{name}={value}")
        _require(name, origin)
        yield name, _Text(value) if isinstance(value, str) else value, origin


class _Text(str):
    """A value given as text, by the environment or a flag: numbers and lists in it are still to be read."""


def _require(name: str, origin: Origin) -> None:
    """Refuse a key that does not exist, naming the one that was probably meant."""
    if name in _fields():
        return
    section, _, key = name.rpartition(".")
    known = [section for section in _sections() if section]
    if section in known:
        # A key of another section is the likelier mistake than a misspelling of one in this section.
        elsewhere = [other for other in _fields() if other.endswith(f".{key}")]
        within = [other for other in (*_fields(), *known) if other.rpartition(".")[0] == section]
        raise _unknown(name, elsewhere or within, f"key {name}", origin)
    if not section:
        raise _unknown(name, [*known, *rules()], f"section [{name}]", origin)
    raise _unknown(section, known, f"section [{section}]", origin)


def _unknown(given: str, known: list[str], what: str, origin: Origin) -> ConfigError:
    nearest = difflib.get_close_matches(given, known, n=1, cutoff=0.0)[0]
    return ConfigError(f"Unknown {what} ({origin}).", f"Did you mean {nearest}?")


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    field = _fields()[name]
    kind: Any = field.annotation
    for constraint in field.metadata:
        kind = Annotated[kind, constraint]
    return TypeAdapter(kind)


def _checked(name: str, value: Any, origin: Origin) -> Any:
    """Return the value as its field has it, or raise an error that says what is allowed."""
    adapter = _adapter(name)
    field = _fields()[name]
    try:
        if isinstance(value, _Text):
            if get_origin(field.annotation) not in (tuple, dict):
                return adapter.validate_strings(str(value))
            value = json.loads(value) if value.lstrip().startswith(("[", "{")) else _split(value)
        # As JSON, because strict validation takes a list for a tuple there and still refuses "5" for a number.
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        shown = repr(value) if field.repr else "…"
        raise ConfigError(
            f"{name} = {shown} ({origin}) is not allowed: {_reason(error)}.", f"Allowed: {allowed(name)}."
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} ({origin}) is not valid JSON: {error}.", f"Allowed: {allowed(name)}.") from None


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in first["loc"])
    message = message[:1].lower() + message[1:] if not message[:2].isupper() else message
    return f"{where}: {message}" if where else message


def allowed(name: str) -> str:
    """Say in a few words what a key accepts."""
    section, _, key = name.rpartition(".")
    return accepts(_sections()[section], key)


def reference() -> str:
    """Write the reference page."""
    return page(_headed())


def template(loaded: Loaded) -> str:
    """Write a configuration file with every key, in which what `loaded` does not have by default is set."""
    changed = {name: value_of(loaded.config, name) for name, origin in loaded.origins.items() if origin != DEFAULT}
    return file(_headed(), changed)


def _headed() -> dict[str, type[Section]]:
    """Return the models that have keys of their own by their headings in TOML, each list after its section."""
    headed: dict[str, type[Section]] = {}
    for path, model in sections():
        lists = {
            _heading(f"{path}.{key}", field): rule
            for key, field in model.model_fields.items()
            if (rule := _rule_of(field))
        }
        if path and any(not _section_of(field) for field in model.model_fields.values()):
            headed[f"[{path}]"] = model
            headed |= lists
    # Lists outside any section are the last, because nothing but tables can follow them.
    return headed | {f"[[{name}]]": rule for name, rule in rules().items() if "." not in name}


def _heading(name: str, field: FieldInfo) -> str:
    """Return how TOML heads a table of a list, or one that has a name."""
    return f'[{name}."schema.table"]' if get_origin(field.annotation) is dict else f"[[{name}]]"
