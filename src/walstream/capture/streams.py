"""Which rows go to which topics, under which keys, for which tenant.

Owns the reading of `[[streams]]` and of `capture.tenant`, and the names of topics; refuses to know rows. Every rule
that matches a table gives its rows a destination; without any rule each table goes to `<prefix>.<schema>.<table>`.

Two tables never share a topic by accident: whatever Kafka does not allow in a topic's name, and a dot, which separates
the parts of it, becomes `_`, and a hash of the true name is put behind. No rule leads into the topics that capture
keeps for itself, nor into a topic that another table has without a rule: readers take all rows there for that table's.
A key is made of columns whose old values PostgreSQL sends, or a delete could not be keyed. The same holds for the
column of the tenant: where its old values are not sent, no row of the table has a tenant, because a tenant would get
rows and never be sent their deletes. Sans-IO.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Final

from walstream.capture.codegen import Target
from walstream.config import RowOperation, StreamRule
from walstream.errors import ConfigError
from walstream.postgres.relations import RelationInfo

INTERNAL_TOPICS: Final = ("commits", "schema", "status", "message", "dead_letter")
"""What follows `<prefix>.` in the names of the topics that are not for rows."""

TOPIC_CHARACTERS_MAX: Final = 249
"""Kafka's limit."""

TENANT_SCHEMA: Final = "schema"
TENANT_COLUMN: Final = "column:"

_DEFAULT_TOPIC: Final = "{prefix}.{schema}.{table}"
_DEFAULT_OUTBOX_TOPIC: Final = "{route}"
_HASH_CHARACTERS: Final = 8

_is_name = re.compile(r"[a-zA-Z0-9_-]+").fullmatch
_is_hashed = re.compile(r".*-[0-9a-f]{8}", re.DOTALL).fullmatch
_is_route = re.compile(r"[a-zA-Z0-9._-]+").fullmatch


def topic_part(name: str) -> str:
    """Return a name as it stands in a topic: itself, or something legal with a hash behind it."""
    if _is_name(name) and not _is_hashed(name):
        return name
    return _hashed(name, r"[^a-zA-Z0-9_-]")


def _hashed(name: str, illegal: str) -> str:
    digest = sha256(name.encode()).hexdigest()[:_HASH_CHARACTERS]
    return f"{re.sub(illegal, '_', name)}-{digest}"


class Streams:
    """The destinations of every table's rows."""

    def __init__(self, prefix: str, rules: Sequence[StreamRule] = (), tenant: str = "default") -> None:
        """Take the prefix of all topics, the rules (none: the default one), and the tenant as [capture] has it."""
        self._prefix = prefix
        self._rules = [(rule, _matcher(rule.table)) for rule in rules or (StreamRule(),)]
        self._tenant = tenant
        self._internal = frozenset(f"{prefix}.{name}" for name in INTERNAL_TOPICS)
        self.message_topic = f"{prefix}.message"
        self.table_topics: dict[str, tuple[str, str]] = {}
        """The topics without a rule that rows of known tables go to, each with its table."""
        self._taken: dict[str, tuple[str, str]] = {}
        """The topics of rules, each with one of the tables whose rows go there."""

    def meet(self, tables: Iterable[tuple[str, str]]) -> None:
        """Keep the topics of these tables for them alone. Raises ConfigError when a rule leads other rows there."""
        found = [name for name in tables if self.operations_of(*name)]
        self.table_topics |= {self.topic(*name): name for name in found}
        for name in found:
            topic = self.topic(*name)
            if (other := self._taken.get(topic, name)) != name:
                raise _mixed(topic, other, name)

    def topic(self, schema: str, table: str) -> str:
        """Return the topic of a table without a rule."""
        return self._fill(_DEFAULT_TOPIC, schema, table)

    def takes(self, schema: str, table: str) -> bool:
        """Whether any rule matches a table."""
        return any(matches(f"{schema}.{table}") for _, matches in self._rules)

    def operations_of(self, schema: str, table: str) -> frozenset[RowOperation]:
        """Return the operations whose rows go to the table's own topic."""
        own = self.topic(schema, table)
        return frozenset(
            operation
            for rule, matches in self._rules
            if matches(f"{schema}.{table}")
            and rule.format == "debezium"
            and self._fill(rule.topic or _DEFAULT_TOPIC, schema, table) == own
            for operation in rule.operations
        )

    def topics_of(self, info: RelationInfo) -> list[str]:
        """Return the topics of a table that are known before its first row. Raises ConfigError."""
        topics = [self._topic(rule, info) for rule in self._matching(info) if rule.format == "debezium"]
        return list(dict.fromkeys(topics))

    def targets(self, info: RelationInfo, operation: str) -> tuple[Target, ...]:
        """Return where the envelopes of an operation go. Raises ConfigError."""
        return tuple(
            Target(self._topic(rule, info), self._key(rule, info), rule.tombstones)
            for rule in self._matching(info)
            if rule.format == "debezium" and operation in rule.operations
        )

    def outbox_rules(self, info: RelationInfo, operation: str) -> list[StreamRule]:
        """Return the rules that take an operation's rows as messages."""
        return [rule for rule in self._matching(info) if rule.format == "outbox" and operation in rule.operations]

    def outbox_topic(self, rule: StreamRule, info: RelationInfo, route: str) -> str:
        """Return the topic of a message. Raises ValueError when there is none or it may not be written to."""
        if not route:
            raise ValueError(f"{rule.outbox_route_column} is empty: the message has no topic")
        # A route may be a whole topic with dots in it.
        safe = route if _is_route(route) else _hashed(route, r"[^a-zA-Z0-9._-]")
        template = rule.topic or _DEFAULT_OUTBOX_TOPIC
        topic = self._fill(template, info.schema, info.table, safe)
        # Whoever may write a row may not choose one of capture's own topics, nor a table's.
        is_ours = topic in self._internal or topic in self.table_topics or topic.startswith("__")
        if topic.startswith(f"{self._prefix}."):
            # Without any fixed text the route could also name a table that is published only later.
            is_free = template.startswith("{prefix}.{route}")
            is_ours |= not template.startswith("{prefix}.")
            is_ours |= is_free and topic.removeprefix(f"{self._prefix}.").count(".") == 1
        if is_ours or topic in {".", ".."} or len(topic) > TOPIC_CHARACTERS_MAX:
            raise ValueError(f"{rule.outbox_route_column} names the topic {topic!r}, which is not for messages")
        return topic

    def tenant_of(self, info: RelationInfo) -> str | None:
        """Return the tenant of all rows of a table; None when it is unknown or another one in each row."""
        if self._tenant.startswith(TENANT_COLUMN):
            return None
        return info.schema if self._tenant == TENANT_SCHEMA else self._tenant

    @property
    def tenant_of_messages(self) -> str | None:
        """Return the tenant of logical messages, which have no table."""
        return None if self._tenant == TENANT_SCHEMA or self._tenant.startswith(TENANT_COLUMN) else self._tenant

    def tenant_column(self, info: RelationInfo) -> int | None:
        """Return the number of the column that names the tenant, if there is one."""
        if not self._tenant.startswith(TENANT_COLUMN):
            return None
        name = self._tenant.removeprefix(TENANT_COLUMN)
        found = next((index for index, column in enumerate(info.columns) if column.name == name), None)
        return None if found is not None and self._is_untold(info, found) else found

    def untold_tenant(self, info: RelationInfo) -> str | None:
        """Return the name of a table's tenant column whose old values PostgreSQL does not send."""
        if not self._tenant.startswith(TENANT_COLUMN):
            return None
        name = self._tenant.removeprefix(TENANT_COLUMN)
        is_untold = any(self._is_untold(info, at) for at, column in enumerate(info.columns) if column.name == name)
        return name if is_untold else None

    def _is_untold(self, info: RelationInfo, tenant: int) -> bool:
        """Whether a delete, or an update that gives a row to another tenant, would not tell the tenant that had it."""
        if info.replica_identity in "fn" or info.columns[tenant].is_key:
            return False
        return any({"update", "delete"} & set(rule.operations) for rule in self._matching(info))

    def _matching(self, info: RelationInfo) -> list[StreamRule]:
        name = f"{info.schema}.{info.table}"
        return [rule for rule, matches in self._rules if matches(name)]

    def _topic(self, rule: StreamRule, info: RelationInfo) -> str:
        topic = self._fill(rule.topic or _DEFAULT_TOPIC, info.schema, info.table)
        if topic in self._internal:
            raise ConfigError(
                f"The rows of {info.schema}.{info.table} would go to {topic}, which capture keeps for itself.",
                "Give them another topic in [[streams]], or another capture.prefix.",
            )
        name = (info.schema, info.table)
        if (owner := self.table_topics.get(topic, name)) != name:
            raise _mixed(topic, name, owner)
        self._taken[topic] = name
        if len(topic) > TOPIC_CHARACTERS_MAX:
            raise ConfigError(
                f"The topic of {info.schema}.{info.table} would be {topic}, of {len(topic)} characters.",
                f"Kafka allows {TOPIC_CHARACTERS_MAX}: give the table a topic in [[streams]].",
            )
        return topic

    def _fill(self, template: str, schema: str, table: str, route: str = "") -> str:
        places = {"prefix": self._prefix, "schema": topic_part(schema), "table": topic_part(table), "route": route}
        return re.sub(r"\{(\w+)\}", lambda match: places[match[1]], template)

    def _key(self, rule: StreamRule, info: RelationInfo) -> tuple[int, ...]:
        names = rule.key or info.key_columns
        numbers = {column.name: index for index, column in enumerate(info.columns)}
        table = f"{info.schema}.{info.table}"
        if missing := [name for name in names if name not in numbers]:
            raise ConfigError(
                f"A stream keys {table} by {', '.join(missing)}, which the publication does not send.",
                "Correct key in [[streams]], or publish the column.",
            )
        if rule.key and info.replica_identity != "f" and {"update", "delete"} & set(rule.operations):
            unknown = [name for name in names if not info.columns[numbers[name]].is_key]
            if unknown:
                raise ConfigError(
                    f"A stream keys {table} by {', '.join(unknown)}, which is not in its replica identity:"
                    " a delete would not tell it.",
                    f"Run: ALTER TABLE {_quoted(info.schema)}.{_quoted(info.table)} REPLICA IDENTITY FULL; or take"
                    ' operations = ["insert", "snapshot"] only.',
                )
        return tuple(numbers[name] for name in names)


def _mixed(topic: str, name: tuple[str, str], owner: tuple[str, str]) -> ConfigError:
    return ConfigError(
        f"The rows of {'.'.join(name)} would go to {topic}, the topic of the table {'.'.join(owner)}.",
        "Give them another topic in [[streams]].",
    )


def _matcher(pattern: str) -> Callable[[str], object]:
    """Return what tells whether a name matches; `*` stands for any text."""
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL).fullmatch


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
